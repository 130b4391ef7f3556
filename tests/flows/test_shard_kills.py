"""Shards in processes of their own: real commands, of which a shard or the run that joins them is killed."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import RUN, Ended, ended, make_home, seen, started
from mlflow.entities import ViewType

from stages.store.shards import EXPERIMENT
from stages.store.tracking import Tracking

pytestmark = pytest.mark.slow
HERE = Path(__file__).parents[2]
TWO = ("--set", "run.shards=2", "--set", "iterations=1")
WAIT_S = 480


def ran(home: Path, *argv: str) -> tuple[int, str, str]:
    return ended(started(home, *argv), WAIT_S)


def workers_of(home: Path) -> list[psutil.Process]:
    """The processes that make shards for a command of this folder, without their leashes, by the shard's number."""
    found = {}
    for one in psutil.process_iter(["cmdline"]):
        told = one.info["cmdline"] or []
        if "flows.shard_worker" in told and "flows.leash" not in told and str(home) in told:
            found[told[-1]] = one
    return [found[name] for name in sorted(found)]


def waited_for(what: Callable[[], Any]) -> Any:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError("it was waited for in vain")


def made(home: Path) -> Counter[tuple[str, str]]:
    """(title, status) of all shards that there ever were, joined ones too."""
    tracking = Tracking(home / "mlflow")
    runs = tracking._client.search_runs(
        [tracking.experiment_id(EXPERIMENT)], run_view_type=ViewType.ALL, max_results=1000
    )
    return Counter((str(run.info.run_name), str(run.info.status)) for run in runs)


@pytest.fixture
def home(empty_store: Path, base: Path, tmp_path: Path) -> Iterator[Path]:
    home = make_home(tmp_path / "home", empty_store, base)
    yield home
    waited_for(lambda: not workers_of(home))


def test_shards_in_processes_leave_what_one_process_leaves(home: Path, undisturbed: Ended) -> None:
    status, out, err = ran(home, *RUN, "--set", "run.shards=2")
    assert status == 0, err
    found = seen(home, json.loads(out))
    for title, mine in found.items():
        its = undisturbed.seen[title]
        assert mine["metrics"] == its["metrics"] and mine.get("rows") == its.get("rows"), title


def test_a_shard_that_is_killed_ends_the_stage_in_a_sentence_and_the_other_is_found_again(home: Path) -> None:
    child = started(home, *RUN, *TWO)
    waited_for(lambda: len(workers_of(home)) == 2 and workers_of(home))[1].send_signal(signal.SIGKILL)
    _, err = child.communicate(timeout=WAIT_S)
    assert child.returncode == 1
    last = err.strip().splitlines()[-1]
    assert "evaluate -1, shard 2 of 2: its process was killed (signal 9). The same command goes on" in last
    assert made(home) == {("evaluate -1, shard 1 of 2", "FINISHED"): 1}
    status, _, err = ran(home, *RUN, *TWO)
    assert status == 0, err
    done = made(home)
    # `evaluate base` and `evaluate start` have shards of the same name.
    assert done[("evaluate -1, shard 1 of 2", "FINISHED")] == done[("evaluate -1, shard 2 of 2", "FINISHED")] == 2
    assert {status for _, status in done} == {"FINISHED"}


def test_the_joining_run_is_killed_and_the_same_command_goes_on_with_what_is_finished(home: Path) -> None:
    child = started(home, *RUN, *TWO)
    waited_for(lambda: len(workers_of(home)) == 2 and workers_of(home))[1].send_signal(signal.SIGSTOP)
    waited_for(lambda: made(home)[("evaluate -1, shard 1 of 2", "FINISHED")])
    child.kill()
    child.communicate(timeout=WAIT_S)
    waited_for(lambda: not workers_of(home))
    status, out, err = ran(home, *RUN, *TWO)
    assert status == 0, err
    done = made(home)
    assert done[("evaluate -1, shard 1 of 2", "FINISHED")] == done[("evaluate -1, shard 2 of 2", "FINISHED")] == 2
    for run_id in (json.loads(out)["base"]["run_id"], json.loads(out)["final"]["run_id"]):
        assert Tracking(home / "mlflow").metrics(run_id)["evaluate/episodes"] == 4


def test_ctrl_c_leaves_no_process(home: Path) -> None:
    child = started(home, *RUN, *TWO)
    waited_for(lambda: len(workers_of(home)) == 2)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=WAIT_S)
    assert child.returncode == 1 and "interrupted; nothing is half-written" in err


def test_shards_and_processes_that_train_together(home: Path) -> None:
    status, out, err = ran(home, *RUN, *TWO, "--set", "train.processes=2")
    assert status == 0, err
    assert json.loads(out)["iterations"][1]["metrics"]["collect/episodes"] == 6
