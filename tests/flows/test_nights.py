"""Nights of a served champion as its users meet them: a real server, real `turnwise serve`, real training on the embedded
model, and a receiver of alerts; what is seen is what the server's API, the stores and the receiver tell.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from commands import make_home
from serving import Api, prefect_server, process_of, serve, until, write_presets

from flows.orchestration.server import free_port
from stages.store.runs import RunInfo
from stages.store.tracking import Tracking

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0  # for a state that is there in seconds on an idle machine
CHAMPION = """
extends = "desk+rft_relabel"
iterations = 1
each_run = "champion"
match_episodes = 24

[task.options]
requests = 1
tiers = 1

[collect]
first_episodes = 48

[rft]
epochs = 6
batch = 16

[evaluate]
episodes = 16
probe_path = ""
"""
"""A desk of three rules, which one iteration learns: the base model wins about 1 in 10, every adapter nearly all."""
PRESETS = {"queued": "cron = '0 3 * * *'\noverlap = 'queue'", "endless": "method = 'rft'\niterations = 10000"}

KILLER = '''
"""Kills the process that gives the alias "champion" just before it does, as often as the file KILL_ONCE names is there."""

import importlib.abc, importlib.util, os, signal, sys


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "stages.store.models":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            given = module.name_alias

            def name_alias(client, version, alias):
                if alias == "champion" and os.path.exists(os.environ["KILL_ONCE"]):
                    os.unlink(os.environ["KILL_ONCE"])
                    os.kill(os.getpid(), signal.SIGKILL)
                given(client, version, alias)

            module.name_alias = name_alias

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
'''


@dataclass(frozen=True)
class Nights:
    home: Path
    api: Api
    alerts: list[dict[str, Any]]

    @property
    def tracking(self) -> Tracking:
        return Tracking(self.home / "mlflow")

    def start(self, preset: str, **parameters: Any) -> str:
        return self.api.start(f"turnwise/nights.{preset}", **parameters)

    def run_of(self, flow_run: str) -> RunInfo | None:
        """MLflow's run of a flow run; None where it has not begun."""
        runs = self.tracking.runs("pipeline", 1000)
        return next((one for one in runs if one.tags.get("prefect_run") == flow_run), None)

    def stages_of(self, flow_run: str) -> dict[str, str]:
        """Stage and iteration -> the status of its run, of those that this flow run made itself."""
        run = self.run_of(flow_run)
        made = self.tracking.children(run.run_id) if run else []
        part = [one.tags["part"] if one.tags["part"] != "iteration" else one.tags["iteration"] for one in made]
        return {f"{one.tags['stage']} {name}": one.status for one, name in zip(made, part, strict=True)}

    def finished(self, flow_run: str) -> RunInfo:
        assert self.api.reaches(flow_run, timeout_s=PATIENCE_S)["state"]["type"] == "COMPLETED", self.api.said(flow_run)
        run = self.run_of(flow_run)
        assert run is not None
        return run

    def aliases(self) -> dict[str, int]:
        found = self.tracking._client.get_registered_model("nightly").aliases
        return {alias: int(number) for alias, number in found.items()}


@pytest.fixture(scope="module")
def receiver() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An address that takes alerts, and what was sent there."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/geheim", got
    server.shutdown()


@pytest.fixture(scope="module")
def nights(
    tmp_path_factory: pytest.TempPathFactory, empty_store: Path, base: Path, receiver: tuple[str, list[dict[str, Any]]]
) -> Iterator[Nights]:
    root = tmp_path_factory.mktemp("nights")
    home = make_home(root / "nights", empty_store, ROOT / "data" / "base")
    shutil.copytree(base, home / "data" / "tiny")
    model = "model = { engine = 'scripted', path = 'data/tiny', lora_rank = 2 }"
    write_presets(home, {name: f"{more}\n{model}" for name, more in PRESETS.items()})
    (home / "nightly.toml").write_text(CHAMPION)
    (root / "killer").mkdir()
    (root / "killer" / "sitecustomize.py").write_text(KILLER)
    url, alerts = receiver
    told = {"PYTHONPATH": f"{root / 'killer'}:{ROOT}", "KILL_ONCE": str(root / "kill_once"), "TURNWISE_ALERT_URL": url}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS", "3")
        with (
            prefect_server(home, free_port()) as api,
            serve(home, api.url, "--limit", "9", presets=[*PRESETS, "nightly"], told=told),
        ):
            yield Nights(home, api, alerts)


def test_a_night_that_was_cancelled_and_then_killed_before_its_promotion_promotes_once_and_the_next_one_keeps(
    nights: Nights,
) -> None:
    cancelled = nights.start("nightly")
    assert until(lambda: nights.stages_of(cancelled).get("rft 0") == "RUNNING", PATIENCE_S), nights.api.said(cancelled)
    nights.api.cancel(cancelled)
    assert nights.api.reaches(cancelled, timeout_s=PATIENCE_S)["state"]["type"] == "CANCELLED"
    assert nights.api.slots_taken("turnwise/nights.nightly") == 0
    # By the run itself, whose process may outlive the word of the server by a moment.
    assert until(lambda: set(nights.stages_of(cancelled).values()) == {"FINISHED", "KILLED"}, PATIENCE_S)
    stopped = nights.run_of(cancelled)
    assert stopped is not None and stopped.status == "KILLED"
    early = nights.start("nightly")
    process = process_of(early)  # which takes seconds until Prefect's word reaches it
    nights.api.cancel(early)
    assert until(lambda: nights.api.run(early)["state"]["type"] == "CANCELLED", PATIENCE_S), nights.api.said(early)
    process.wait(PATIENCE_S)
    assert nights.alerts == []  # a person's wish is no failure

    kill_once = nights.home.parent / "kill_once"
    kill_once.touch()
    killed = nights.start("nightly")
    assert nights.api.reaches(killed, timeout_s=PATIENCE_S)["state"]["type"] == "CRASHED", nights.api.said(killed)
    assert not kill_once.exists() and nights.aliases() == {"candidate": 1}
    assert "collect 0" not in nights.stages_of(killed) and nights.stages_of(killed)["evaluate candidate"] == "FINISHED"
    assert until(lambda: nights.alerts != [], PATIENCE_S)
    (alert,) = nights.alerts
    run = nights.run_of(killed)
    assert run is not None
    assert (alert["run"], alert["project"], alert["stage"]) == (run.run_id, "nights", None)
    assert "SIGKILL" in alert["error"] and killed in alert["page"]

    first = nights.finished(nights.start("nightly"))
    assert first.tags["seed"] == stopped.tags["seed"] and nights.tracking.children(first.run_id) == []
    assert nights.aliases() == {"candidate": 1, "champion": 1}
    assert first.tags["champion"].startswith("promoted: ")

    second = nights.finished(nights.start("nightly"))
    assert nights.aliases() == {"candidate": 2, "champion": 1}
    assert second.tags["champion"].startswith("kept: ") and second.tags["seed"] != first.tags["seed"]
    config = json.loads(nights.tracking.artifact(second.run_id, "config.json").read_text())
    assert config["goes_on_from"] == f"{run.run_id}:0"  # which registered the champion, though it was killed
    # Its log says what was decided, too; the lines come in batches.
    told = second.tags["prefect_run"]
    assert until(lambda: any(line.startswith("champion    kept: ") for line in nights.api.said(told)), PATIENCE_S)


def test_of_those_that_fell_due_while_a_queued_preset_ran_one_runs_after_it(nights: Nights) -> None:
    deployment = "turnwise/nights.queued"
    first = nights.start("queued", sets=["method=rft", "iterations=10000"])
    assert nights.api.reaches(first, "RUNNING", timeout_s=PATIENCE_S)["state"]["type"] == "RUNNING"
    # It is RUNNING a moment before its own code, which stands for what fell due until then.
    assert until(lambda: nights.stages_of(first) != {}, PATIENCE_S), nights.api.said(first)
    nights.api.schedule_missed(deployment, 3)

    def waiting() -> list[str]:
        due = nights.api.runs_of(deployment, "SCHEDULED")
        return [run["id"] for run in due if run["state"]["name"] == "AwaitingConcurrencySlot"]

    assert until(lambda: len(waiting()) == 3, PATIENCE_S), (nights.api.states_of(deployment), nights.api.said(first))
    waited = waiting()
    nights.api.cancel(first)
    assert until(
        lambda: all(nights.api.run(one)["state"]["type"] in ("COMPLETED", "CANCELLED") for one in waited), PATIENCE_S
    )
    states = [nights.api.run(one)["state"] for one in waited]
    assert sorted(state["type"] for state in states) == ["CANCELLED", "CANCELLED", "COMPLETED"]
    assert {state["message"] for state in states if state["type"] == "CANCELLED"} == {
        "A run that waited as long replaces it."
    }


def test_a_run_that_takes_too_long_fails_as_one_that_goes_on_later_and_somebody_is_told(nights: Nights) -> None:
    before = len(nights.alerts)
    timed = nights.start("endless", sets=["timeout_h=0.01"])
    state = nights.api.reaches(timed, timeout_s=PATIENCE_S)["state"]
    assert (
        state["type"] == "FAILED"
        and "not done after 0.01 h (timeout_h); it goes on where it stopped" in state["message"]
    )
    assert nights.api.slots_taken("turnwise/nights.endless") == 0
    run = nights.run_of(timed)
    assert run is not None and run.status == "KILLED"
    assert "RUNNING" not in nights.stages_of(timed).values()
    assert until(lambda: len(nights.alerts) > before, PATIENCE_S)
    (alert,) = nights.alerts[before:]
    assert alert["run"] == run.run_id and alert["error"] in state["message"]
