"""An OpenAI endpoint on loopback without a model: each request waits for a reply from the caller. So a library that
runs its own loop against an endpoint can be played from outside. Ours.
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

_HEAD = {"id": "turnwise", "created": 0, "model": "policy"}


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

    def answer(self, session: str, body: Mapping[str, Any]) -> tuple[int, str, str]:
        """Status, content type and content, as soon as somebody has replied."""
        asked = self.sessions.get(session)
        if asked is None:
            return _refused(400, f"nobody plays session {session!r}")
        question = Question(body.get("messages") or [], body.get("tools") or [])
        asked.put(question)
        try:
            message = question.reply.result()
        except Exception as error:  # told to the one who asked, whose episode is given up
            return _refused(500, str(error))
        return _streamed(message) if body.get("stream") else _whole(message)


def _refused(status: int, why: str) -> tuple[int, str, str]:
    return status, "application/json", json.dumps({"error": {"message": why}})


def _whole(message: Message) -> tuple[int, str, str]:
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    choice = {"index": 0, "message": message, "finish_reason": _ended(message)}
    whole = {**_HEAD, "object": "chat.completion", "usage": usage, "choices": [choice]}
    return 200, "application/json", json.dumps(whole)


def _streamed(message: Message) -> tuple[int, str, str]:
    """The same as events: the reply in one piece, then why it ended."""
    calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
    pieces: list[tuple[Message, str | None]] = [
        ({**message, "tool_calls": calls} if calls else message, None),
        ({}, _ended(message)),
    ]
    chunks = [
        {**_HEAD, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": ended}]}
        for delta, ended in pieces
    ]
    return 200, "text/event-stream", "".join(f"data: {one}\n\n" for one in [*map(json.dumps, chunks), "[DONE]"])


def _ended(message: Message) -> str:
    return "tool_calls" if "tool_calls" in message else "stop"


@contextmanager
def asking() -> Iterator[Asked]:
    """The endpoint, up until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            status, kind, told = asked.answer(self.headers.get("X-Session-ID", ""), body)
            content = told.encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", kind)
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
