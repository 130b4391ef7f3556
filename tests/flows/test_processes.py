"""`train.processes`: real commands whose training stages run in two processes, one of which is killed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import RUN, ended, make_home, started

from flows import presets, processes
from stages.frame.types import UsageError

pytestmark = pytest.mark.slow
TWO = ("--set", "train.processes=2")
WAIT_S = 300
HERE = Path(__file__).parents[2]
SAC = (
    "run", "desk+sac", "--plain", "--json", "--set", "iterations=1", "--set", "collect.episodes=24", "--set", "collect.first_episodes=24", "--set",
    "q_critic.transitions=24", "--set", "pick.states=16", "--set", "evaluate.episodes=8",
)  # fmt: skip


def ran(home: Path, *argv: str) -> tuple[int, str, str]:
    return ended(started(home, *argv), WAIT_S)


def ranks_of(home: Path) -> list[psutil.Process]:
    """The processes that train for a command of this folder, without their leashes."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        told = one.info["cmdline"] or []
        if "flows.rank" in told and "flows.leash" not in told and any(str(home) in part for part in told):
            found.append(one)
    return found


def waited_for(home: Path, n: int) -> list[psutil.Process]:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if len(found := ranks_of(home)) == n:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{n} ranks were wanted")


@pytest.fixture(scope="module")
def home(empty_store: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = make_home(tmp_path_factory.mktemp("ranks") / "home", empty_store, base)
    yield home
    assert not ranks_of(home)


def test_a_rank_that_is_killed_ends_the_stage_in_a_sentence_and_the_same_command_goes_on(home: Path) -> None:
    child = started(home, *RUN, *TWO)
    waited_for(home, 2)[1].send_signal(signal.SIGKILL)
    _, err = child.communicate(timeout=300)
    assert child.returncode == 1
    last = err.strip().splitlines()[-1]
    assert "critic: process " in last and "of the 2 that trained was killed (signal 9)" in last
    assert not ranks_of(home)
    status, out, err = ran(home, *RUN, *TWO)
    assert status == 0, err
    assert "targets 0: reused" in err and "critic 0: reused" not in err
    # The number of processes is in no fingerprint.
    status, again, err = ran(home, *RUN)
    assert status == 0, err
    told, theirs = json.loads(out), json.loads(again)
    assert [row["runs"] for row in told["iterations"]] == [row["runs"] for row in theirs["iterations"]]


def test_ctrl_c_leaves_no_process(home: Path) -> None:
    child = started(home, *RUN, *TWO, "--force")
    waited_for(home, 2)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 1 and "interrupted; nothing is half-written" in err
    assert not ranks_of(home)


def test_a_training_that_diverges_says_so_as_in_one_process(home: Path) -> None:
    wild = (*RUN, "--set", "critic.lr=1e30")
    found = [ran(home, *wild, *extra) for extra in ((), TWO)]
    assert [status for status, _, _ in found] == [1, 1]
    assert found[0][2].strip().splitlines()[-1] == found[1][2].strip().splitlines()[-1]


def test_what_a_training_stage_has_generated_comes_from_the_one_engine(tmp_path: Path) -> None:
    """q_critic samples before it trains. Its numbers, and those of later stages, are those of one process."""
    found: list[Any] = []
    for n in (1, 2):
        home = tmp_path / str(n)
        (home / "data").mkdir(parents=True)
        (home / "mlflow").mkdir()
        (home / "data" / "base").symlink_to(HERE / "data" / "base")
        status, out, err = ran(home, *SAC, "--set", f"train.processes={n}")
        assert status == 0, err
        found.append(json.loads(out))
    one, two = ([row["metrics"] for row in told["iterations"]] for told in found)
    assert len(one) == len(two) == 2
    for mine, its in zip(one, two, strict=True):
        assert mine.keys() == its.keys()
        for key, value in mine.items():
            if key.startswith("q_critic/") and "tokens" not in key and not key.endswith("_s"):
                assert its[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(UsageError, match=r"train\.processes: wanted at most one for each of the 4 GPUs, found 5"):
        processes._check_devices(5)


def test_a_process_less_than_one_is_refused() -> None:
    with pytest.raises(UsageError, match=r"train\.processes"):
        presets.load("tiny", ["train.processes=0"])
