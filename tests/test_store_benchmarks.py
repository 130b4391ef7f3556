"""The benchmarks of the replay and of the store run at a small size and print what they say; that their answers are
those of the obvious way, they check themselves.
"""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from commands import Ended

from benchmarks.speed import replay, store
from benchmarks.timed import Times, cells, ratio, timed
from flows.workspace import open_workspace
from stages.store.execute import lineage_inputs
from stages.store.replay import Replay

ROOT = Path(__file__).parent.parent


def test_times_are_told_by_their_medians() -> None:
    calls: list[int] = []
    _, times = timed(calls.append, 3)
    assert (calls, len(times.wall), len(times.cpu)) == ([0, 1, 2, 3], 3, 3)
    times = Times([0.002, 0.001, 4.0], [0.5, 1.5, 3.0])
    assert cells(times) == "2.0 ms (1.0 ms) | 1.5 s"
    assert ratio(times, Times([1.0], [0.5])) == 3


def test_the_replay_s_benchmark_prints_each_way_beside_the_obvious_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["replay", "--transitions", "3000", "--turns", "80", "--repeats", "1"])
    replay.main()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["what", "how", "time", "processor", "ratio", "a second"]
    whats = [line[0] for line in lines[2:] if line[0]]
    assert whats == ["draw 256 of 3,000", "256 new priorities", "80 new turns", "from the file to 256 in full"]
    assert [line[4] for line in lines[2:] if line[0]] == ["1.0"] * 4
    assert all(re.fullmatch(r"[\d.]+ m?s \([\d.]+ m?s\)", line[2]) for line in lines[2:])


def test_its_replay_has_the_rows_that_a_stage_would_have_written(tmp_path: Path) -> None:
    collects, critics = replay.fill(tmp_path / "replay.duckdb", 20_000)
    file = Replay(tmp_path / "replay.duckdb")
    assert [file.count("turns", [one]) for one in collects] == [10_000, 10_000]
    assert file.count("episodes", collects) == 2500
    assert file.count("priorities", critics) == 20_000
    assert file.verify([*collects, *critics, "empty"]) == []


def multiplied(home: Path, n: int) -> list[str]:
    """The ids of a pipeline run and of its stage runs, of which there are n more."""
    with closing(sqlite3.connect(home / "mlflow" / "mlflow.db")) as raw:
        ids = store.pipeline_of(raw)
        store.copies(raw, home / "mlflow" / "artifacts", ids, n)
    return ids


def test_a_store_that_was_multiplied_answers_as_mlflow_does(finished: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = multiplied(finished.home, 3)
    monkeypatch.chdir(finished.home)
    workspace = open_workspace(finished.home)
    critics = workspace.tracking.runs("critic", 100)
    assert len(workspace.tracking.runs("pipeline", 100)) == 4
    assert len(workspace.tracking.finished_runs()) == 4 * len(ids)
    assert len({info.tags["fingerprint"] for info in critics}) == len(critics) >= 4
    for info in critics:  # the inputs are those of the same copy
        assert {one[:8] for runs in lineage_inputs(workspace, info.run_id).values() for one in runs} <= {
            one.run_id[:8] for one in workspace.tracking.children(info.tags["pipeline"])
        }
    for what, mine, theirs in store.questions(workspace, critics[0].run_id):
        assert mine(0) == theirs(0), what


@pytest.mark.slow
def test_the_store_s_benchmark_prints_both_tables(finished: Ended) -> None:
    command = [sys.executable, "-m", "benchmarks.speed.store", "--runs", "20", "--home", str(finished.home)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| fingerprint that is there |" in done.stdout and "| turnwise runs |" in done.stdout


def test_a_folder_without_a_run_is_one_sentence(home: Path) -> None:
    with (
        closing(sqlite3.connect(home / "mlflow" / "mlflow.db")) as raw,
        pytest.raises(SystemExit, match="--home: wanted"),
    ):
        store.pipeline_of(raw)
