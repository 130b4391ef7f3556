"""The same work asked for by two processes at once: one works, the other waits; neither disturbs the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from toys import toy_workspace

from stages.store.equal_work import held
from stages.store.upkeep import recover

HERE = Path(__file__).parents[1]
LIMIT_S = 60.0  # far more than any of these waits takes
Start = Callable[..., int]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Start the stage in a process of its own; gives its id."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [sys.executable, str(HERE / "equal_child.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        stdin, stdout = child.stdin, child.stdout

        def begin(home: Path, name: str, *, force: bool = False) -> int:
            stdin.write(json.dumps({"home": str(home), "name": name, "force": force}) + "\n")
            stdin.flush()
            return int(stdout.readline())

        yield begin
        stdin.close()


def there(path: Path) -> str:
    """The text of a file, as soon as there is one."""
    until = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < until, (
            f"{path.name} was waited for; there are {sorted(file.name for file in path.parent.iterdir())}"
        )
        time.sleep(0.02)
    return path.read_text()


def result(home: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(there(home / f"{name}.json"))
    return found


def both(start: Start, home: Path, *, force: bool = False) -> tuple[int, int]:
    """Two processes: the first is in the middle of its work, the second has said that it waits. Gives their ids."""
    first = start(home, "first")
    there(home / "first.working")
    second = start(home, "second", force=force)
    there(home / "second.said")
    return first, second


def statuses(home: Path) -> list[str]:
    return [info.status for info in toy_workspace(home).tracking.runs("source", 9)]


def assert_the_second_waits_and_reuses(one: Path, two: Path, pid: int) -> None:
    """The first command works in folder `one`, as process pid; the second one has said in `two` for whom it waits."""
    (working,) = toy_workspace(one).tracking.running()
    assert (
        there(two / "second.said") == f"waiting for run {working.run_id[:8]} (process {pid}), which does the same work"
    )
    (one / "first.go").touch()
    first, second = result(one, "first"), result(two, "second")
    assert (first["run_id"], first["reused"]) == (working.run_id, False)
    assert second == {**first, "reused": True}


def test_of_two_one_works_and_the_other_waits_and_reuses(start: Start, home: Path) -> None:
    pid, _ = both(start, home)
    assert_the_second_waits_and_reuses(home, home, pid)
    assert statuses(home) == ["FINISHED"]
    assert list((home / "data" / "locks").iterdir()) == []


def test_who_waits_for_a_process_that_dies_works_itself_and_goes_on_from_its_checkpoint(
    start: Start, home: Path
) -> None:
    pid, _ = both(start, home)
    os.kill(pid, signal.SIGKILL)
    there(home / "second.working")
    recover(toy_workspace(home))  # as any other command does
    (home / "second.go").touch()
    second = result(home, "second")
    assert (second["reused"], second["metrics"]) == (False, {"source/went_on": 1.0, "source/mine": 1.0})
    assert statuses(home) == ["FINISHED", "KILLED"]


def test_a_forced_run_beside_a_running_one_leaves_it_its_checkpoints_and_then_begins_anew(
    start: Start, home: Path
) -> None:
    both(start, home, force=True)
    (home / "first.go").touch()
    (home / "second.go").touch()
    first, second = result(home, "first"), result(home, "second")
    for found in (first, second):
        assert (found["reused"], found["metrics"]) == (False, {"source/went_on": 0.0, "source/mine": 1.0})
    assert statuses(home) == ["FINISHED", "FINISHED"]
    assert toy_workspace(home).tracking.runs("source", 1)[0].run_id == second["run_id"] != first["run_id"]


def test_who_waits_can_be_interrupted_and_leaves_nothing(start: Start, home: Path) -> None:
    _, waiting = both(start, home)
    os.kill(waiting, signal.SIGINT)
    assert result(home, "second") == {"error": "KeyboardInterrupt: "}
    (home / "first.go").touch()
    assert result(home, "first")["metrics"] == {"source/went_on": 0.0, "source/mine": 1.0}
    assert statuses(home) == ["FINISHED"]


def test_a_lock_can_be_taken_again_and_leaves_no_file(tmp_path: Path) -> None:
    path, waited = tmp_path / "locks" / "key.lock", []
    for _ in range(2):
        with held(path, lambda: waited.append(1)):
            assert path.exists()
    with pytest.raises(ZeroDivisionError), held(path, lambda: waited.append(1)):
        _ = 1 / 0
    assert (list(path.parent.iterdir()), waited) == ([], [])
