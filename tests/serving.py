"""A real `turnwise serve` beside a real Prefect server, seen through the server's API. For tests of schedules,
cancellation and what a stop leaves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from flows.orchestration.server import start_server

ROOT = Path(__file__).parents[1]
BASE = """
extends = "tiny"
iterations = 0
model = { engine = "scripted", path = "data/base", lora_rank = 2 }
roles = { max_action_tokens = 400, max_future_tokens = 400 }
collect = { first_episodes = 4, episodes = 4 }
evaluate = { episodes = 4, audit_turns = 4 }
"""
PRESETS = {
    "nightly": "cron = '* * * * *'\ncatch_up = true",
    "by hand": "",
    "endless": "method = 'rft'\niterations = 10000",
}
"""File -> what differs from BASE, which only evaluates the base model and is done in seconds."""

OVER = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


@dataclass(frozen=True)
class Api:
    """A Prefect server's HTTP interface."""

    url: str

    def __call__(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer to a POST of `body`, or to a GET where there is none."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data=data, headers={"Content-Type": "application/json"})
        for pause_s in (0.5, 1.0, 2.0, 4.0, 8.0, None):
            try:
                # Two of Prefect's transactions that wait for each other in SQLite give up after 60 s, and all wait for them.
                with urllib.request.urlopen(request, timeout=180) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                # A database that is busy, as on a slow machine; Prefect's own client tries again, too.
                if error.code != 503 or pause_s is None:
                    raise
            time.sleep(pause_s)

    def start(self, deployment: str, **parameters: Any) -> str:
        """Start a run of a deployment, named "FLOW/NAME", as its page does; returns the flow run's id."""
        found = self(f"/deployments/name/{deployment}")
        state = {"type": "SCHEDULED", "state_details": {"scheduled_time": datetime.now(UTC).isoformat()}}
        return str(
            self(f"/deployments/{found['id']}/create_flow_run", {"parameters": parameters, "state": state})["id"]
        )

    def run(self, run_id: str) -> dict[str, Any]:
        return dict(self(f"/flow_runs/{run_id}"))

    def runs_of(self, deployment: str, *types: str) -> list[dict[str, Any]]:
        """Its flow runs in states of these types, the first to be due first."""
        found = self(f"/deployments/name/{deployment}")
        wanted = {"id": {"any_": [found["id"]]}}
        body = {
            "deployments": wanted,
            "flow_runs": {"state": {"type": {"any_": list(types)}}},
            "sort": "EXPECTED_START_TIME_ASC",
        }
        return list(self("/flow_runs/filter", body))

    def states_of(self, deployment: str) -> list[str]:
        """Of all its flow runs: when each was due, the name of its state and what was said of it; for a failed test."""
        runs = self.runs_of(deployment, "SCHEDULED", "PENDING", "RUNNING", "CANCELLING", *OVER)
        return [f"{run['expected_start_time']} {run['state']['name']}: {run['state']['message']}" for run in runs]

    def reaches(self, run_id: str, *types: str, timeout_s: float = 120.0) -> dict[str, Any]:
        """Wait until the flow run is in a state of one of these types, or is over; returns it."""
        until(lambda: self.run(run_id)["state"]["type"] in (*types, *OVER), timeout_s)
        return self.run(run_id)

    def schedule_missed(self, deployment: str, number: int) -> None:
        """What its schedule would have left waiting: so many of its runs, long due."""
        found = self(f"/deployments/name/{deployment}")
        self(
            f"/deployments/{found['id']}/schedule",
            {"start_time": "2020-01-01T00:00:00Z", "min_runs": number, "max_runs": number},
        )

    def cancel(self, run_id: str) -> None:
        """What the page's button does."""
        self(f"/flow_runs/{run_id}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})

    def slots_taken(self, deployment: str) -> int:
        found = self(f"/deployments/name/{deployment}")
        return int(found["global_concurrency_limit"]["active_slots"])

    def said(self, run_id: str) -> list[str]:
        """Log lines of a flow run."""
        return [str(line["message"]) for line in self("/logs/filter", {"logs": {"flow_run_id": {"any_": [run_id]}}})]


def until(true: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.2)
    return true()


def process_of(run_id: str, timeout_s: float = 120.0) -> psutil.Process:
    """In which a flow run is under way, as soon as there is one."""

    def running() -> list[psutil.Process]:
        return [
            process
            for process in psutil.process_iter(["cmdline", "environ"])
            if "prefect.engine" in (process.info["cmdline"] or [])
            and (process.info["environ"] or {}).get("PREFECT__FLOW_RUN_ID") == run_id
        ]

    assert until(lambda: running() != [], timeout_s), f"no process of {run_id}"
    return running()[0]


@contextmanager
def prefect_server(home: Path, port: int) -> Iterator[Api]:
    """A whole Prefect server of this folder, scheduler included."""
    server = start_server(home, port, full=True)
    try:
        yield Api(server.wait())
    finally:
        server.stop()


@contextmanager
def server_of_another_command(home: Path) -> Iterator[tuple[Api, subprocess.Popen[str]]]:
    """The server that a command like `turnwise ui` keeps for its folder; it ends with the process."""
    code = "import sys, time; from pathlib import Path; from flows.orchestration.server import keep_server\n"
    code += "with keep_server(Path(sys.argv[1])) as server: print(server.url, flush=True); time.sleep(600)"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(home)], stdout=subprocess.PIPE, text=True, env=env | {"PYTHONPATH": str(ROOT)}
    ) as process:
        try:
            assert process.stdout is not None
            yield Api(process.stdout.readline().strip()), process
        finally:
            process.kill()


@contextmanager
def serve(
    home: Path, url: str | None, *options: str, presets: Collection[str] = PRESETS, told: Mapping[str, str] = {}
) -> Iterator[subprocess.Popen[str]]:
    """`turnwise serve` of these presets, once it says that it serves them; stopped with SIGTERM. url: of the server that
    it is told to use; None = it finds one, or starts its own. told: more of its environment.
    """
    chosen = [part for name in presets for part in ("--preset", str(home / f"{name}.toml"))]
    command = [sys.executable, "-m", "turnwise", "serve", "--json", "--home", str(home), *chosen, *options]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    env |= {"PYTHONPATH": str(ROOT), "PREFECT_RUNNER_POLL_FREQUENCY": "2"} | ({"PREFECT_API_URL": url} if url else {})
    env |= told
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=env, cwd=home, preexec_fn=_take_interrupts
    ) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline() or "null"), "serve ended before it was ready"
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(60)


def _take_interrupts() -> None:
    """A shell may have told its background jobs, and so this one, to ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def write_presets(home: Path, presets: Mapping[str, str] = PRESETS) -> None:
    for name, more in presets.items():
        lines = [
            line
            for line in BASE.strip().splitlines()
            if line.split(" = ")[0] not in {other.split(" = ")[0] for other in more.splitlines()}
        ]
        # Top-level keys come before sections; BASE has none, its sections are inline tables.
        (home / f"{name}.toml").write_text("\n".join([*lines, more, ""]))
