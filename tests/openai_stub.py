"""A server on loopback that answers as an OpenAI-compatible endpoint does, or as badly as a test wants."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from stages.frame.types import Request
from stages.llm.openai import OpenAIEngine

N_IDS = 5000  # of the stub's tokenizer

Answer = tuple[int, object]  # status, body: JSON, or text as it is


class Stub:
    """A server that keeps what it was asked, and answers by a function (path, body) -> (status, reply)."""

    def __init__(self, port: int = 0) -> None:
        self.asked: list[tuple[str, dict[str, Any], str]] = []
        self.answer: Callable[[str, dict[str, Any]], Answer] = lambda path, body: (200, good(body))
        self.content_type = "application/json"
        self.headers: dict[str, str] = {}  # more of them
        self.pieces: Callable[[str, dict[str, Any]], Iterator[bytes]] | None = None  # of a body without a length
        self.context: int | None = None  # that it tells of the model
        self.greeted = 0
        self.busy = self.busiest = 0
        self.lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                stub.handle(self)

            def do_GET(self) -> None:
                stub.greet(self)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128  # else connections beyond the fifth wait for a second

        self.server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def handle(self, http: BaseHTTPRequestHandler) -> None:
        body = json.loads(http.rfile.read(int(http.headers["Content-Length"])))
        with self.lock:
            self.asked.append((http.path, body, http.headers.get("Authorization", "")))
            self.busy += 1
            self.busiest = max(self.busiest, self.busy)
        if self.pieces is not None:
            self.drip(http, self.pieces(http.path, body))
            return
        status, reply = self.answer(http.path, body)
        with self.lock:
            self.busy -= 1
        self.send(http, status, reply)

    def greet(self, http: BaseHTTPRequestHandler) -> None:
        """The list of models; of no other answer a test asks."""
        self.greeted += 1
        self.send(http, 200, {"object": "list", "data": [{"id": "base-model", "max_model_len": self.context}]})

    def send(self, http: BaseHTTPRequestHandler, status: int, reply: object) -> None:
        data = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
        try:
            http.send_response(status)
            http.send_header("Content-Type", self.content_type)
            http.send_header("Content-Length", str(len(data)))
            http.send_header("Retry-After-Ms", "1")
            for name, value in self.headers.items():
                http.send_header(name, value)
            http.end_headers()
            http.wfile.write(data)
        except OSError:
            pass  # the client gave up, which is what a test wanted

    def drip(self, http: BaseHTTPRequestHandler, pieces: Iterator[bytes]) -> None:
        """A body that ends with its connection."""
        try:
            http.send_response(200)
            http.end_headers()
            for piece in pieces:
                http.wfile.write(piece)
                http.wfile.flush()
        except OSError:
            pass


def stub_engine(url: str | Sequence[str], **settings: Any) -> OpenAIEngine:
    """An engine whose tokenizer knows the replies of `good`, so that no model folder is needed."""
    engine = OpenAIEngine("base-model", url=url, **{"timeout_s": 10.0, **settings})
    engine.tokenizer = StubTokenizer()
    return engine


def engine(stub: Stub, **settings: Any) -> OpenAIEngine:
    """One that asks this stub, three times at most."""
    return stub_engine(stub.url, **{"retries": 2, **settings})


def request(n: int = 3, **changes: Any) -> Request:
    """Of n ids, n its seed."""
    return Request(tuple(range(5, 5 + n)), **{"max_tokens": 8, "temperature": 0.7, "seed": n, **changes})


class StubTokenizer:
    """Makes of `good`'s ids the text that it says."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return f"seed {token_ids[1]}"

    def get_vocab(self) -> dict[str, int]:
        return {"the last token": N_IDS - 1}


def adapter_folder(path: Path) -> Path:
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(b"")
    return path


def good(body: dict[str, Any], **changes: object) -> dict[str, Any]:
    """A reply as vllm serve gives it: prompt length and seed, so that each request is told from its reply."""
    ids = [len(body["prompt"]), body["seed"] % 1000, 2]
    choice = {
        "index": 0,
        "text": f"seed {body['seed']}",
        "finish_reason": "stop",
        "token_ids": ids,
        "prompt_token_ids": body["prompt"],
        "logprobs": {"token_logprobs": [-0.5, -0.25, -0.125], "tokens": ["a", "b", "c"]},
    }
    return {"id": "c", "object": "text_completion", "model": body["model"], "choices": [{**choice, **changes}]}
