"""Alerts: what is told of a failed run, and that no receiver changes anything or learns its own address from a log."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from flows.orchestration import alert
from stages.store.tracking import Status
from stages.store.workspace import Workspace


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[Any], None]], list[Any]]]:
    """Makes a receiver that answers as it is told; returns what it was sent."""
    servers: list[HTTPServer] = []

    def start(answer: Callable[[Any], None]) -> list[Any]:
        got: list[Any] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                answer(self)

            def log_message(self, *_: object) -> None:
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        monkeypatch.setenv(alert.URL, f"http://127.0.0.1:{servers[-1].server_port}/key-geheim")
        return got

    yield start
    for server in servers:
        server.shutdown()


def reply(status: int) -> Callable[[Any], None]:
    def answer(handler: Any) -> None:
        handler.send_response(status)
        handler.end_headers()

    return answer


def test_a_receiver_gets_the_message_once(receiver: Callable[..., list[Any]]) -> None:
    got = receiver(reply(204))
    assert alert.send({"run": "3f9c", "stage": "critic 3", "error": "nan"}) == "The alert was sent (204)."
    assert got == [{"run": "3f9c", "stage": "critic 3", "error": "nan"}]


def test_a_receiver_that_fails_hangs_or_is_none_is_told_without_its_address(
    receiver: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alert, "TIMEOUT_S", 0.3)
    receiver(reply(500))
    said = [alert.send({})]
    receiver(lambda handler: time.sleep(2))
    started = time.monotonic()
    said.append(alert.send({}))
    assert time.monotonic() - started < 1.5
    for url in ("no address geheim", "http://127.0.0.1:1/geheim", "ftp:/geheim", "http://[geheim"):
        monkeypatch.setenv(alert.URL, url)
        said.append(alert.send({}))
    assert all(one.startswith("The alert ") and "sent (2" not in one for one in said)
    assert "geheim" not in " ".join(said)
    monkeypatch.delenv(alert.URL)
    assert alert.send({}) == ""


def test_a_failure_names_the_run_and_the_stage_that_did_not_end_well(workspace: Workspace) -> None:
    tracking = workspace.tracking
    run_id = tracking.start("pipeline", "p", {alert.PREFECT_RUN: "f1"})
    statuses: dict[str, Status] = {"collect": "FINISHED", "critic": "FAILED"}
    for stage, status in statuses.items():
        child = tracking.start(stage, stage, {"stage": stage, "iteration": "3"}, parent=run_id)
        tracking.finish(child, status)
    told = alert.failure("f1", "http://ann:geheim@host is down", workspace)
    assert told == {"run": run_id, "stage": "critic 3", "error": "http://***@host is down"}
    assert alert.failure("f2", "no preset", workspace) == {"run": None, "stage": None, "error": "no preset"}
