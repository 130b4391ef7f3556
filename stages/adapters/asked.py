"""An OpenAI endpoint on loopback behind which no model stands: each request waits for a reply of whoever plays. So a
library that runs its own loop against an endpoint is played from outside of it. Ours.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from stages.frame.types import Message


@dataclass
class Question:
    """One request: what was said so far, the tools that it offers, and where the reply goes."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    reply: Future[Message] = field(default_factory=Future)


class Asked:
    """url: of the endpoint. sessions: what was asked, by the header X-Session-ID of a request."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.sessions: dict[str, queue.SimpleQueue[Any]] = {}

    def answer(self, session: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and JSON, as soon as somebody has replied."""
        asked = self.sessions.get(session)
        if asked is None or body.get("stream"):
            return 400, {"error": {"message": "no streaming here" if asked else f"nobody plays session {session!r}"}}
        question = Question(body.get("messages") or [], body.get("tools") or [])
        asked.put(question)
        try:
            message = question.reply.result()
        except Exception as error:  # told to the one who asked, whose episode is given up
            return 500, {"error": {"message": str(error)}}
        ended = "tool_calls" if "tool_calls" in message else "stop"
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        choice = {"index": 0, "message": message, "finish_reason": ended}
        told = {"id": "turnwise", "object": "chat.completion", "created": 0, "model": "policy", "usage": usage}
        return 200, {**told, "choices": [choice]}


@contextmanager
def asking() -> Iterator[Asked]:
    """The endpoint, up until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            status, told = asked.answer(self.headers.get("X-Session-ID", ""), body)
            content = json.dumps(told).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except OSError:  # the one who asked is gone, and its episode with it
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    asked = Asked(f"http://127.0.0.1:{server.server_address[1]}/v1")
    threading.Thread(target=server.serve_forever, name="asked", daemon=True).start()
    try:
        yield asked
    finally:
        server.shutdown()
        server.server_close()
