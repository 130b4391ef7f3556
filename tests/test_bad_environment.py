"""An environment of one's own that breaks its contract, through the command: one sentence, and nothing of it is stored."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pytest
from commands import RUN, Commands, Ended, stage_runs

from stages.frame.types import MissingInput
from stages.store.replay import Replay
from stages.store.tracking import Tracking

HERE = Path(__file__).parent
SLOW = pytest.mark.slow  # tests/envs/test_hostile.py has each kind without a store
WRONG = [
    ("step", "NaN", 2, "step of my.hostile (my/hostile.py) wants a finite number as reward, found float nan;"),
    pytest.param("step", "infinity", 2, "step of my.hostile (my/hostile.py) wants a finite number as reward, found float inf;", marks=SLOW),
    pytest.param("step", "no reward", 2, "step of my.hostile (my/hostile.py) wants a number as reward, found NoneType None;", marks=SLOW),
    pytest.param("step", "both ends", 2, "step of my.hostile (my/hostile.py) wants terminated or truncated, never both, found both;", marks=SLOW),
    ("reset", "half a character", 2, "reset of my.hostile (my/hostile.py) wants valid Unicode as content of a message,"),
    pytest.param("reset", "a text", 2, "reset of my.hostile (my/hostile.py) wants a tuple of messages, found str 'Hello.';", marks=SLOW),
    ("reset", "exit", 1, "first error: EnvironmentLeft: reset wanted to end the program (SystemExit: 3)"),
]  # fmt: skip


@pytest.fixture
def lab(fresh: Path) -> Path:
    """A project folder with the environment that misbehaves."""
    (fresh / "my").mkdir()
    shutil.copy(HERE / "hostile.py", fresh / "my" / "hostile.py")
    return fresh


def misbehaving(at: str, kind: str) -> list[str]:
    return [
        part
        for one in ("env=my.hostile", f"options.at={at}", f"options.kind={kind}")
        for part in ("--set", f"task.{one}")
    ]


@pytest.mark.parametrize(("at", "kind", "status", "said"), WRONG)
def test_a_run_tells_it_once_and_keeps_no_row(
    at: str, kind: str, status: int, said: str, lab: Path, command: Commands
) -> None:
    done = command(lab, *RUN, *misbehaving(at, kind))
    assert (done.status, len(done.told)) == (status, 1)
    assert said in done.told[0]
    assert "Traceback" not in done.err
    tracking = Tracking(lab / "mlflow")
    runs = tracking.runs("evaluate", 9)
    assert [run.status for run in runs] == ["FAILED"]
    with pytest.raises(MissingInput, match="it never committed any"):
        Replay(lab / "data" / "turnwise.duckdb").rows("turns", [runs[0].run_id])
    # The same command tries it again: what failed is never reused.
    assert command(lab, *RUN, *misbehaving(at, kind)).status == status
    assert len(tracking.runs("evaluate", 9)) == 2


def test_what_it_prints_is_none_of_the_results(lab: Path, command: Commands) -> None:
    done = command(lab, *RUN, *misbehaving("reset", "print"), "--set", "iterations=1")
    assert done.status == 0
    assert "a line of the environment" in done.err
    assert done.json["iterations"]


def test_verify_finds_rows_that_no_environment_may_leave(finished: Ended, command: Commands) -> None:
    """As stores of before hold them: a reward of NaN, and a turn with both ends."""
    run_id = stage_runs(finished.done.json)["collect 1"]
    with duckdb.connect(str(finished.home / "data" / "turnwise.duckdb")) as store:
        store.execute("update turns set reward = 'nan', truncated = true where run_id = ? and terminated", [run_id])
    found = command(finished.home, "verify")
    assert found.status == 1
    told = [line for line in found.out.splitlines() if run_id in line]
    assert [line.split(": ", 1)[1].split(" ", 1)[1] for line in told] == [
        f"turns {what}; to have it made again: turnwise verify --mend"
        for what in ("with a reward that is no finite number", "both terminated and truncated")
    ]
    assert command(finished.home, "verify", "--mend", "--json").json["impossible"].keys() == {run_id}
    assert "Every reward is a finite number" in command(finished.home, "verify").out
    again = command(finished.home, *RUN)
    assert again.status == 0 and "collect 1" in again.ran and "collect 0" in again.reused


def test_check_says_which_claims_are_broken(lab: Path, command: Commands) -> None:
    good = command(lab, "check", "my.hostile")
    assert (good.status, good.err) == (0, "")
    assert (
        good.out.splitlines()[-1]
        == "my.hostile: 14 of 15 claims hold, 1 left out. Next: turnwise run PRESET --set task.env=my.hostile"
    )
    bad = command(lab, "check", "my.hostile", "--set", "task.options.at=step", "--set", "task.options.kind=NaN")
    assert bad.status == 1
    assert (
        "BROKEN    step gives messages, a finite reward, and one end at most: task.env: step of my.hostile" in bad.out
    )
    found = json.loads(command(lab, "check", "my.hostile", "--json").out)
    assert [one["claim"] for one in found["findings"] if one["status"] != "ok"] == [
        "readable accepts what step can read, and nothing else"
    ]
    mute = command(lab, "check", "my.hostile", "--reply", "nobody reads this")
    assert mute.status == 0 and "left out" in mute.out and "wants replies that can be read" in mute.out
    assert command(lab, "check", "my.nobody").status == 2


@pytest.mark.slow
def test_a_thread_that_is_left_behind_does_not_keep_the_command(lab: Path) -> None:
    script = [sys.executable, "-m", "turnwise"]
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    call = [*script, "check", "my.hostile", "--set", "task.options.at=reset", "--set", "task.options.kind=a thread"]
    started = time.monotonic()
    done = subprocess.run(call, cwd=lab, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert time.monotonic() - started < 25  # its thread sleeps for 30 s
    assert done.returncode == 1
    assert "BROKEN    no thread is left behind: the thread 'left' goes on" in done.stdout
    assert "the thread 'left'" in done.stderr and "was left" in done.stderr
