"""A server on loopback that serves bytes by path, or as badly as a test wants."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer:
    """`files`: path -> bytes. `troubles`: path -> what happens at the next requests, one each: a status, "cut",
    "moved", "endless"; then the file.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.troubles: dict[str, list[int | str]] = {}
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.handle(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def handle(self, http: BaseHTTPRequestHandler) -> None:
        self.asked.append(http.path)
        troubles = self.troubles.get(http.path, [])
        trouble = troubles.pop(0) if troubles else 200 if http.path in self.files else 404
        body = self.files.get(http.path, b"") if trouble in (200, "cut") else b""
        http.send_response(302 if trouble == "moved" else trouble if isinstance(trouble, int) else 200)
        if trouble == "moved":
            http.send_header("Location", f"{self.url}/elsewhere")
        if trouble == "endless":
            http.end_headers()
            try:
                while True:
                    http.wfile.write(bytes(1 << 20))
            except OSError:
                return  # the client has had enough, which is what the test wants
        http.send_header("Content-Length", str(len(body) + 100 * (trouble == "cut")))
        http.end_headers()
        http.wfile.write(body)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
