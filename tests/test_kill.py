"""kill -9 at every point of a stage's execution, then the same command again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.store import sqlite

HERE = Path(__file__).parent
STAGES = ("source", "double", "total")
POINTS = ("start", "run", "artifacts", "metrics", "rows", "commit", "committed", "finished")
Drive = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def drive() -> Iterator[Drive]:
    """Run the command in a process of its own, killed at `point` of `stage` if one is named."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    script = [sys.executable, str(HERE / "kill_child.py")]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        stdin, stdout = child.stdin, child.stdout

        def ask(home: Path, stage: str = "", point: str = "") -> dict[str, Any]:
            stdin.write(json.dumps({"home": str(home), "stage": stage, "point": point}) + "\n")
            stdin.flush()
            answer: dict[str, Any] = json.loads(stdout.readline())
            return answer

        yield ask
        stdin.close()


@pytest.fixture(scope="module")
def undisturbed(drive: Drive, empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What readers see after a run that nobody killed."""
    home = tmp_path_factory.mktemp("undisturbed")
    (home / "mlflow").mkdir()
    sqlite.copy(empty_store, home / "mlflow" / "mlflow.db")
    answer = drive(home)
    assert answer["signal"] == 0
    result = answer["result"]
    assert result["reused"] == result["recovered"] == result["orphans"] == result["scratch"] == []
    assert result["statuses"] == {stage: ["FINISHED"] for stage in STAGES}
    visible: str = result["visible"]
    assert len(json.loads(visible)["turns"]) == 5
    assert len(json.loads(visible)["priorities"]) == 5
    return visible


@pytest.mark.parametrize(
    ("stage", "point"), [*(("double", point) for point in POINTS), ("source", "run"), ("total", "committed")]
)
def test_a_killed_command_resumes_and_readers_see_what_they_would_have_seen(
    stage: str, point: str, drive: Drive, home: Path, undisturbed: str
) -> None:
    killed = drive(home, stage, point)
    assert killed == {"signal": signal.SIGKILL, "result": None}
    result = drive(home)["result"]
    assert result["visible"] == undisturbed
    done = STAGES.index(stage) + (point == "finished")
    assert result["reused"] == list(STAGES[:done])  # nothing that was finished runs twice
    died = [] if point == "finished" else ["KILLED"]
    assert result["statuses"] == {name: ["FINISHED", *(died if name == stage else [])] for name in STAGES}
    assert len(result["recovered"]) == len(died)
    assert result["orphans"] == (result["recovered"] if point == "committed" else [])
    assert result["scratch"] == []


def test_killed_at_one_point_after_another_it_still_ends_with_the_same_result(
    drive: Drive, home: Path, undisturbed: str
) -> None:
    for point in POINTS:
        assert drive(home, "double", point)["signal"] == signal.SIGKILL
    result = drive(home)["result"]
    assert result["visible"] == undisturbed
    assert result["statuses"]["double"] == ["FINISHED", *["KILLED"] * (len(POINTS) - 1)]
    assert len(result["orphans"]) == 1
