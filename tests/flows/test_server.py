"""Prefect servers: found where one runs, started where none does, and gone when their owner is, however it went."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from flows.orchestration import server
from flows.orchestration.leash import Leashed
from stages.frame.types import TurnwiseError

ROOT = Path(__file__).parents[2]
SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


@pytest.fixture(autouse=True)
def no_other_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has set or running is not to be found."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(server, "DEFAULT_PORT", server.free_port())


@pytest.fixture
def answering() -> Iterator[str]:
    """The API address of something that answers as a healthy Prefect server does."""

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"true")

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Healthy)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield server.api_url(http.server_port)
    http.shutdown()
    http.server_close()


def until(true: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


def test_the_server_of_the_environment_comes_first(
    tmp_path: Path, answering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", answering)
    assert server.find_server(tmp_path) == answering


def test_a_server_of_the_environment_that_does_not_answer_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", server.api_url(server.free_port()))
    with pytest.raises(
        TurnwiseError, match=r"nothing answers there\. Start it, unset the variable, or run with --plain"
    ):
        server.find_server(tmp_path)


def test_a_kept_server_and_one_on_the_default_port_are_found(
    tmp_path: Path, answering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.find_server(tmp_path) is None
    (tmp_path / "data" / "prefect").mkdir(parents=True)
    (tmp_path / "data" / "prefect" / "server.json").write_text(json.dumps({"url": answering, "pid": 1}))
    assert server.find_server(tmp_path) == answering
    (tmp_path / "data" / "prefect" / "server.json").unlink()
    monkeypatch.setattr(server, "DEFAULT_PORT", int(answering.rsplit(":", 1)[1].removesuffix("/api")))
    assert server.find_server(tmp_path) == answering


def test_a_server_that_was_found_is_left_running(
    tmp_path: Path, answering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", answering)
    found = server.begin_server(tmp_path)
    assert found.wait() == answering
    found.stop()
    assert server.healthy(answering)


def test_a_server_that_cannot_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    dying = Leashed([sys.executable, "-c", "import sys; sys.exit('no disk')"], log=tmp_path / "log", env=os.environ)
    with pytest.raises(TurnwiseError, match=r"ended while it started \(it said: no disk\).*--plain"):
        server.Server(server.api_url(server.free_port()), dying).wait(30)


def test_a_command_on_the_leash_ends_when_it_is_stopped(tmp_path: Path) -> None:
    leashed = Leashed(SLEEP, log=tmp_path / "log", env=os.environ)
    assert until(lambda: "up" in leashed.tail())
    (child,) = psutil.Process(leashed.pid).children()
    leashed.stop()
    assert not leashed.running()
    assert not child.is_running()


def test_a_command_on_the_leash_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from flows.orchestration.leash import Leashed\n"
        f"Leashed({SLEEP!r}, log=Path({str(tmp_path / 'log')!r}), env=os.environ); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        assert until(lambda: (tmp_path / "log").is_file() and "up" in (tmp_path / "log").read_text())
        below = psutil.Process(owner.pid).children(recursive=True)
        assert len(below) == 2  # the leash and the command
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    assert until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in below))


UNDER_PREFECT = """
import json, os, signal, sys
from pathlib import Path
import fakes, pytest
from flows import cli
from flows.orchestration import server
home, how = Path(sys.argv[1]), sys.argv[2]
server.DEFAULT_PORT = server.free_port()
stop = server.Server.stop
def ask_then_stop(self):
    from prefect.client.orchestration import get_client
    with get_client(sync_client=True) as client:
        flows = {run.id: run for run in client.read_flow_runs()}
        found = {"flows": sorted((run.name, run.state_name) for run in flows.values()), "url": self.url,
                 "tasks": sorted((one.name, one.state_name, flows[one.flow_run_id].name) for one in client.read_task_runs()),
                 "logs": [log.message for log in client.read_logs()]}
    (home / "found.json").write_text(json.dumps(found))
    stop(self)
server.Server.stop = ask_then_stop
with pytest.MonkeyPatch.context() as patch, fakes.fake_stages(patch) as stages:
    patch.setattr("flows.workspace.model_hash", lambda run: "base")
    patch.setattr("flows.workspace.make_engine", lambda run: None)
    if how == "interrupt":
        stages.raises["critic", 0] = KeyboardInterrupt()
    if how == "kill":
        stages.run = lambda name, context: os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(cli.main(["run", str(home / f"{how}.toml"), "--home", str(home), "--json"]))
"""


def run_under_prefect(home: Path, how: str) -> subprocess.CompletedProcess[str]:
    (home / "data").mkdir(exist_ok=True)
    (home / f"{how}.toml").write_text("iterations = 1\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-c", UNDER_PREFECT, str(home), how]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=240)


@pytest.mark.slow
def test_runs_are_shown_by_a_server_that_ends_with_them_however_they_end(home: Path) -> None:
    assert run_under_prefect(home, "kill").returncode == -signal.SIGKILL

    interrupted = run_under_prefect(home, "interrupt")
    assert interrupted.returncode == 1
    assert "interrupted; nothing is half-written" in interrupted.stderr
    assert "Traceback" not in interrupted.stderr

    done = run_under_prefect(home, "done")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "FINISHED"  # and nothing of Prefect's stands on stdout
    found = json.loads((home / "found.json").read_text())
    assert found["flows"] == [["done seed 0", "Completed"], ["interrupt seed 0", "Crashed"], ["kill seed 0", "Crashed"]]
    stages = [
        "collect 0",
        "critic 0",
        "distill 0",
        "evaluate 0",
        "evaluate base",
        "evaluate final",
        "evaluate start",
        "refine 0",
        "targets 0",
    ]
    assert [(name, state) for name, state, flow in found["tasks"] if flow == "done seed 0"] == [
        (name, "Completed") for name in stages
    ]
    assert any("collect 0: run" in message for message in found["logs"])
    assert not server.healthy(found["url"])


@pytest.mark.slow
def test_the_pages_are_on_loopback_and_end_with_ctrl_c(home: Path) -> None:
    (home / "data").mkdir(exist_ok=True)
    port = server.free_port()
    code = f"import sys; from flows import cli, server; server.DEFAULT_PORT = {server.free_port()}; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "ui", "--home", str(home), "--port", str(port), "--json"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")} | {
        "PYTHONPATH": str(ROOT)
    }
    page = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, preexec_fn=_take_interrupts)
    try:
        assert page.stdout is not None
        links = json.loads(page.stdout.readline())
        assert links["runs"].startswith(f"http://127.0.0.1:{port}/#/experiments/")
        assert server.find_server(home) == f"{links['prefect']}/api"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as answer:
            assert answer.status == 200
        below = psutil.Process(page.pid).children(recursive=True)
        assert {address for process in below for address in _listens_on(process)} == {"127.0.0.1"}
        page.send_signal(signal.SIGINT)
        assert page.wait(30) == 0
    finally:
        page.kill()
        page.communicate()
    assert until(lambda: not any(one.is_running() for one in below))
    assert server.find_server(home) is None


def _listens_on(process: psutil.Process) -> set[str]:
    try:
        return {one.laddr.ip for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN}
    except psutil.Error:  # it ended just now
        return set()


def _take_interrupts() -> None:
    """A shell may have told its background jobs, and so this one, to ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_every_preset_is_a_deployment_that_does_not_overlap_with_itself() -> None:
    from flows.orchestration.deployments import deployments

    tiny, rerun = deployments(["tiny"])
    assert (tiny.name, tiny.parameters, tiny.entrypoint) == (
        "tiny",
        {"preset": "tiny", "sets": []},
        "flows.orchestration.deployments.pipeline",
    )
    assert tiny.concurrency_limit == 1
    assert tiny.concurrency_options is not None
    assert tiny.concurrency_options.collision_strategy == "CANCEL_NEW"
    assert (rerun.name, rerun.entrypoint) == ("rerun", "flows.orchestration.deployments.rerun")
