"""Prefect servers: found where one runs, started where none does, and gone when their owner is, however it went."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
from waiting import until

from flows.leash import Leashed
from flows.orchestration import server
from flows.workspace import project_name
from stages.frame.types import TurnwiseError
from turnwise import cli

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_other_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has set or running is not to be found."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


@contextmanager
def answers(home: Path | None = None, port: int = 0) -> Iterator[str]:
    """The API address of something that answers as a healthy Prefect server, of the project folder `home`."""

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            settings = {"home": str(home / "data" / "prefect")} if home else True
            self.wfile.write(json.dumps(settings if self.path == "/api/admin/settings" else True).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", port), Healthy)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield server.api_url(http.server_port)
    http.shutdown()
    http.server_close()


@pytest.fixture
def answering() -> Iterator[str]:
    with answers() as url:
        yield url


def port_of(url: str) -> int:
    port = urllib.parse.urlsplit(url).port
    assert port
    return port


def note_port(home: Path, said: str) -> None:
    """Write what a folder says of its server."""
    (home / "data" / "prefect").mkdir(parents=True, exist_ok=True)
    (home / "data" / "prefect" / "server.json").write_text(said)


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


def test_the_kept_server_of_a_folder_is_found_through_it(tmp_path: Path) -> None:
    assert server.find_server(tmp_path) is None
    with answers(tmp_path) as url:
        note_port(tmp_path, json.dumps({"port": port_of(url)}))
        assert server.find_server(tmp_path) == url
    assert server.find_server(tmp_path) is None  # it is gone, what the folder says of it is stale


def test_a_healthy_server_of_another_folder_is_never_used(tmp_path: Path) -> None:
    with answers(tmp_path / "other") as url:
        note_port(tmp_path, json.dumps({"port": port_of(url)}))  # as in a copy of that folder
        assert server.find_server(tmp_path) is None
        own = server.start_server(tmp_path, port_of(url))
        own.stop()
        assert own.url != url


def test_a_healthy_server_on_prefects_usual_port_is_never_used(tmp_path: Path) -> None:
    with ExitStack() as stack:
        with suppress(OSError):  # taken: then what is there is not to be used
            stack.enter_context(answers(port=4200))
        assert server.find_server(tmp_path) is None


@pytest.mark.parametrize("said", ["", "{", "[]", '{"port": "x"}', '{"url": "http://127.0.0.1:4200/api"}'])
def test_a_port_file_that_says_nothing_is_none(tmp_path: Path, said: str) -> None:
    note_port(tmp_path, said)
    assert server.find_server(tmp_path) is None


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


@pytest.mark.parametrize("port", ["-1", "65536", "99999"])
def test_a_port_that_no_page_can_have_is_wrong_usage(
    tmp_path: Path, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ui", "--home", str(tmp_path), "--port", port]) == 2
    assert (
        capsys.readouterr().err
        == f"turnwise: ui: --port {port} is no port. Give a number from 1 to 65535, or 0 for any free port.\n"
    )


def test_a_port_that_is_taken_is_wrong_usage(
    tmp_path: Path, answering: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ui", "--home", str(tmp_path), "--port", str(port_of(answering))]) == 2
    assert f"port {port_of(answering)} is taken" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "name"),
    [("turnwise", "turnwise"), ("my clone (2)", "my-clone-2"), ("a/b.c_d-e", "b.c_d-e"), ("äé", "project")],
)
def test_a_project_is_named_by_its_folder_in_safe_letters(tmp_path: Path, folder: str, name: str) -> None:
    assert project_name(tmp_path / folder) == name


UNDER_PREFECT = """
import json, os, signal, sys
from pathlib import Path
import fakes, pytest
from turnwise import cli
from flows.orchestration import server
home, how = Path(sys.argv[1]), sys.argv[2]
stop = server.Server.stop
def ask_then_stop(self):
    from prefect.client.orchestration import get_client
    with get_client(sync_client=True) as client:
        flows = {run.id: run for run in client.read_flow_runs()}
        found = {"flows": sorted((run.name, run.state_name) for run in flows.values()), "url": self.url,
                 "tags": [tag for one in client.read_task_runs() for tag in one.tags],
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
    (home / f"{how}.toml").write_text("iterations = 1\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-c", UNDER_PREFECT, str(home), how]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=240)


@pytest.mark.slow
def test_runs_are_shown_by_a_server_that_ends_with_them_however_they_end(prefect_home: Path) -> None:
    home = prefect_home
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
        "collect 0", "critic 0", "distill 0", "evaluate 0", "evaluate base", "evaluate final", "evaluate start",
        "refine 0", "targets 0",
    ]  # fmt: skip
    before = {"collect 0", "evaluate base", "evaluate start", "targets 0"}  # what the interrupted run had done
    assert [(name, state) for name, state, flow in found["tasks"] if flow == "done seed 0"] == [
        (name, "Cached" if name in before else "Completed") for name in stages
    ]
    assert found["tags"] == []  # a tag would be asked for at the server before the task starts
    assert any("collect 0: run" in message for message in found["logs"])
    assert any("evaluate/win_rate" in message for message in found["logs"])  # what a stage measured
    assert not server.healthy(found["url"])


KEEP = """
import json, sys
from pathlib import Path
from flows.orchestration.server import keep_server
with keep_server(Path(sys.argv[1])) as server:
    print(json.dumps([server.url, server.owned is not None]), flush=True)
    sys.stdin.read()
"""


@contextmanager
def kept(*homes: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """A process for each folder, started at once, that keeps the folder's server until its input closes."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")} | {
        "PYTHONPATH": str(ROOT)
    }
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", KEEP, str(home)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=env,
                )
            )
            for home in homes
        ]


def told(keeper: subprocess.Popen[str]) -> tuple[str, bool]:
    """The server's address, and whether this keeper started it."""
    assert keeper.stdout is not None
    url, own = json.loads(keeper.stdout.readline())
    return url, own


def flows_seen_at(url: str) -> list[str]:
    request = urllib.request.Request(
        f"{url}/flow_runs/filter", data=b"{}", headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return [run["name"] for run in json.load(answer)]


@pytest.mark.slow
def test_a_server_belongs_to_one_project_folder(prefect_home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    here, there = prefect_home, tmp_path_factory.mktemp("there")
    shutil.copytree(here / "data", there / "data")
    with kept(here, here, there) as (first, second, third):
        (url, first_owns), (same, second_owns), (other, third_owns) = told(first), told(second), told(third)
        assert url == same != other
        assert (first_owns != second_owns, third_owns) == (True, True)
        for own in (url, other):
            with urllib.request.urlopen(f"{own.removesuffix('/api')}/ui-settings") as answer:
                assert json.load(answer)["api_url"] == own

        done = run_under_prefect(here, "done")
        assert done.returncode == 0, done.stderr
        assert flows_seen_at(url) == ["done seed 0"]
        assert flows_seen_at(other) == []

        third.kill()
        assert until(lambda: server.find_server(there) is None)
        with kept(there) as (again,):
            assert told(again) == (other, True)  # the folder's own port, for whoever has the page open


@pytest.mark.slow
def test_the_pages_are_on_loopback_whatever_variables_say_and_end_with_ctrl_c(prefect_home: Path) -> None:
    home = prefect_home
    command = [sys.executable, "-m", "turnwise", "ui", "--home", str(home), "--port", "0", "--json"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")} | {
        "PYTHONPATH": str(ROOT),
        **dict.fromkeys(("PREFECT_SERVER_API_HOST", "PREFECT_SERVER_HOST", "MLFLOW_HOST", "UVICORN_HOST"), "0.0.0.0"),
    }
    page = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, preexec_fn=_take_interrupts)
    try:
        assert page.stdout is not None
        links = json.loads(page.stdout.readline())
        assert "/#/experiments/" in links["runs"]
        assert server.find_server(home) == f"{links['prefect']}/api"
        with urllib.request.urlopen(links["runs"].partition("#")[0]) as answer:
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
