"""`turnwise serve` as its users meet it: real processes, a real server, and only what the server's API and the stores
tell of them.

One server and one `serve` for all that leaves them as they were; the last tests stop and kill them.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import make_home
from serving import OVER, Api, prefect_server, process_of, serve, server_of_another_command, until, write_presets

from flows.orchestration.server import free_port, healthy
from stages.store.runs import RunInfo
from stages.store.tracking import Tracking

pytestmark = pytest.mark.slow
ENDLESS = "turnwise/my-project.endless"
NIGHTLY = "turnwise/my-project.nightly"
ANY = ("SCHEDULED", "PENDING", "RUNNING", *OVER)


@dataclass(frozen=True)
class Served:
    home: Path
    api: Api
    process: subprocess.Popen[str]

    def start_endless(self, seed: int) -> str:
        """A flow run that is in the middle of its work and would never end."""
        run = self.api.start(ENDLESS, sets=[f"seed={seed}"])
        assert self.api.reaches(run, "RUNNING")["state"]["type"] == "RUNNING", self.api.said(run)
        assert until(lambda: any(info.tags["seed"] == str(seed) for info in self.pipelines()), 60)
        return run

    def assert_ended(self, run: str, seed: int) -> None:
        """Server and store say that the run is over, and its deployment has room for the next."""
        assert self.api.run(run)["state"]["type"] == "CRASHED"
        assert self.api.slots_taken(ENDLESS) == 0
        (info,) = [info for info in self.pipelines() if info.tags["seed"] == str(seed)]
        assert info.status == "KILLED"

    def pipelines(self) -> list[RunInfo]:
        return Tracking(self.home / "mlflow").runs("pipeline", 1000)

    def config(self, run_id: str) -> dict[str, Any]:
        return dict(json.loads(Tracking(self.home / "mlflow").artifact(run_id, "config.json").read_text()))

    def seeds(self, preset: str) -> list[int]:
        """Of its finished pipeline runs that made every stage run themselves: nothing was reused."""
        tracking = Tracking(self.home / "mlflow")
        mine = [info for info in self.pipelines() if info.tags["preset"] == preset and info.status == "FINISHED"]
        return [int(info.tags["seed"]) for info in mine if len(tracking.children(info.run_id)) == 2]


def made_up_for(run: dict[str, Any], off: str) -> bool:
    """Whether this run stands for one that fell due while the machine was off: the schedule did not start it."""
    return not run["auto_scheduled"] and run["expected_start_time"][:16] > off[:16]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, empty_store: Path, base: Path) -> Path:
    home = make_home(tmp_path_factory.mktemp("serve") / "my project", empty_store, base)
    write_presets(home)
    return home


@pytest.fixture(scope="module")
def api(home: Path) -> Iterator[Api]:
    with prefect_server(home, free_port()) as api:
        yield api


@pytest.fixture(scope="module")
def served(home: Path, api: Api) -> Iterator[Served]:
    with serve(home, api.url, "--limit", "3") as process:
        yield Served(home, api, process)


def test_deployments_carry_the_projects_name_and_say_what_each_run_is(served: Served) -> None:
    found = served.api(f"/deployments/name/{NIGHTLY}")
    assert found["parameters"] == {"preset": str(served.home / "nightly.toml"), "sets": [], "each_run": "new_seed"}
    choices = found["parameter_openapi_schema"]["properties"]["each_run"]["enum"]  # in the page's form
    assert choices == ["new_seed", "further", "force", "champion"]
    assert served.api("/deployments/name/turnwise/my-project.by-hand")["schedules"] == []


def test_a_run_started_from_the_api_takes_its_parameters_and_can_be_rerun_from_it(served: Served) -> None:
    flow_run = served.api.start("turnwise/my-project.by-hand", sets=["seed=7", "evaluate.episodes=6"])
    assert served.api.reaches(flow_run)["state"]["type"] == "COMPLETED", served.api.said(flow_run)
    wanted = "--set seed=7 --set evaluate.episodes=6"
    assert until(lambda: any(wanted in line for line in served.api.said(flow_run)), 10)  # log lines come in batches
    (run,) = [info for info in served.pipelines() if info.tags["preset"] == "by hand"]
    config = served.config(run.run_id)
    assert (config["seed"], config["evaluate"]["episodes"], run.status) == (7, 6, "FINISHED")

    again = served.api.start(
        "turnwise-rerun/my-project.rerun", stage="evaluate", of=run.run_id, sets=["evaluate.episodes=8"]
    )
    assert served.api.reaches(again)["state"]["type"] == "COMPLETED", served.api.said(again)
    (made,) = [info for info in Tracking(served.home / "mlflow").runs("evaluate", 1000) if "rerun_of" in info.tags]
    assert made.tags["rerun_of"] in {child.run_id for child in Tracking(served.home / "mlflow").children(run.run_id)}
    assert served.config(made.run_id)["config"]["evaluate"]["episodes"] == 8


def test_a_run_that_falls_due_while_another_runs_is_cancelled_and_one_cancelled_on_the_page_makes_room(
    served: Served,
) -> None:
    first = served.start_endless(seed=11)
    second = served.api.reaches(served.api.start(ENDLESS, sets=["seed=12"]))
    assert (second["state"]["type"], second["state"]["message"]) == (
        "CANCELLED",
        "Deployment concurrency limit reached.",
    )
    assert served.api.run(first)["state"]["type"] == "RUNNING"
    served.api.cancel(first)
    # Where its process does not end as Prefect expects, as on a busy machine, it is CRASHED for a moment.
    assert until(lambda: served.api.run(first)["state"]["type"] == "CANCELLED", 120), served.api.said(first)
    assert served.api.slots_taken(ENDLESS) == 0

    def statuses() -> list[str]:
        return [info.status for info in served.pipelines() if info.tags["preset"] == "endless"]

    # By the run itself, as it ends: nothing is left for the next command to find out.
    assert until(lambda: statuses() == ["KILLED"], 30), statuses()


def test_one_that_its_runner_could_not_tell_of_the_cancellation_is_cancelled_all_the_same(served: Served) -> None:
    """Prefect's runner says so over a channel that a process does not hear while it holds signals, as for a write."""
    run = served.start_endless(seed=13)
    process = process_of(run)
    runner = process.parent()
    assert runner is not None
    runner.suspend()
    try:
        served.api.cancel(run)
        process.terminate()
        state = served.api.reaches(run)["state"]["type"]
    finally:
        runner.resume()
    assert state == "CANCELLED"
    assert until(lambda: served.api.slots_taken(ENDLESS) == 0, 30)


def test_a_cron_of_every_minute_fires_every_minute_and_each_run_does_work(served: Served) -> None:
    assert until(lambda: len(served.api.runs_of(NIGHTLY, "COMPLETED")) >= 2, 200), served.api.runs_of(
        NIGHTLY, "SCHEDULED", "FAILED", "CRASHED"
    )
    done = served.api.runs_of(NIGHTLY, "COMPLETED")
    assert all(run["auto_scheduled"] for run in done)
    minutes = [run["expected_start_time"][:16] for run in done]
    assert len(set(minutes)) == len(minutes)
    assert len(set(served.seeds("nightly"))) >= 2


def test_ctrl_c_ends_the_runs_frees_their_slots_and_pauses_the_schedules(served: Served) -> None:
    run = served.start_endless(seed=21)
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(60) == 0
    served.assert_ended(run, seed=21)
    assert served.api(f"/deployments/name/{NIGHTLY}")["paused"]


def test_a_server_that_another_command_kept_is_kept_by_serve_when_that_command_ends(home: Path) -> None:
    with server_of_another_command(home) as (api, keeper), serve(home, None) as process:
        keeper.terminate()
        keeper.wait(60)
        assert until(lambda: not healthy(api.url), 30)  # it is gone
        assert until(lambda: healthy(api.url), 120)  # and back
        run = api.start("turnwise/my-project.by-hand")
        assert api.reaches(run, timeout_s=180)["state"]["type"] == "COMPLETED", api.said(run)
        assert process.poll() is None


def test_what_a_killed_serve_left_is_settled_at_the_next_start_and_its_deployment_runs_again(
    home: Path, api: Api
) -> None:
    with serve(home, api.url) as process:
        left = Served(home, api, process).start_endless(seed=31)
        # All of it at once, as when the machine goes down: neither the worker nor the run has time for a last word.
        for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            one.kill()
        process.wait()
    off = datetime.now(UTC).isoformat()
    assert api.run(left)["state"]["type"] == "RUNNING"  # nobody told the server
    # Another server on the same database: what the first one kept in memory of the slot is gone, as where the server
    # was killed as well.
    with prefect_server(home, free_port()) as fresh:
        assert fresh.slots_taken(ENDLESS) == 1
        fresh.cancel(left)
        assert fresh.run(left)["state"]["type"] == "CANCELLING"  # and so it stayed
        assert until(lambda: datetime.now(UTC).isoformat()[:16] > off[:16], 90)  # a night is missed
        with serve(home, fresh.url) as process:
            assert fresh.run(left)["state"]["type"] == "CANCELLED"
            assert fresh.slots_taken(ENDLESS) == 0
            (caught_up,) = [run for run in fresh.runs_of(NIGHTLY, *ANY) if made_up_for(run, off)]
            assert fresh.reaches(caught_up["id"])["state"]["type"] == "COMPLETED", fresh.said(caught_up["id"])
            served = Served(home, fresh, process)
            assert int(datetime.fromisoformat(caught_up["expected_start_time"]).timestamp()) in served.seeds("nightly")
            run = served.start_endless(seed=32)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        served.assert_ended(run, seed=32)
