"""`python -m benchmarks.evidence.differences`: one method less others, run by run, from a study's rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.evidence import differences


def _rows(path: Path) -> Path:
    """Two methods on two seeds: at the end on test .9 .8 and .6 .6; half-way, at 50 of 100 episodes, .4 .2 and .1 .1.
    Returns are .4 of that.
    """
    ends = {("fast", 1): (0.8, 0.9), ("fast", 2): (0.4, 0.8), ("slow", 1): (0.2, 0.6), ("slow", 2): (0.2, 0.6)}
    rows = [
        {
            "part": "table",
            "method": method,
            "task": "desk",
            "seed": seed,
            "final": final,
            "final_return": 0.4 * final,
            "curve": [
                {"iteration": -1, "episodes": 0.0, "cpu_s": 0.0, "win_rate": 0.0, "return": 0.0},
                {"iteration": 0, "episodes": 25.0, "cpu_s": 3.0, "win_rate": None, "return": None},
                {"iteration": 1, "episodes": 100.0, "cpu_s": 8.0, "win_rate": last, "return": 0.4 * last},
            ],
        }
        for (method, seed), (last, final) in ends.items()
    ]
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return path


def _run(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["differences", *map(str, words)])
    differences.main()


@pytest.mark.parametrize(
    ("more", "mean"),
    [
        ((), "+0.25"),
        (("--at", 50), "+0.20"),
        (("--axis", "cpu_s", "--at", 4), "+0.20"),
        (("--task", "desk"), "+0.25"),
        (("--measure", "return"), "+0.10"),
        (("--measure", "return", "--at", 50), "+0.08"),
    ],
)
def test_the_mean_of_pairs_at_the_end_and_half_way(
    more: tuple[object, ...],
    mean: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _run(monkeypatch, _rows(tmp_path / "cells.jsonl"), "fast", "slow", *more)
    assert f"| desk | slow | 2 | {mean} [" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fast", "slow", "--at", 200), "fast on seed 1 has 100 episodes: choose --at no later"),
        (("fast", "slow", "--axis", "cpu_s", "--at", 9), "fast on seed 1 has 8 CPU seconds: choose --at no later"),
        (("fast", "slow", "--task", "vault"), "has no task 'vault'; it has desk"),
        (("fast", "other"), "has no rows of 'other'; it has fast, slow"),
    ],
)
def test_what_cannot_be_answered_is_said(
    words: tuple[object, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        _run(monkeypatch, _rows(tmp_path / "cells.jsonl"), *words)
    assert said in capsys.readouterr().err


def test_a_cell_that_is_there_twice_is_no_second_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _rows(tmp_path / "cells.jsonl")
    text = path.read_text("utf-8")
    path.write_text(text + "\n" + text.splitlines()[0], "utf-8")
    with pytest.raises(SystemExit):
        _run(monkeypatch, path, "fast", "slow")
    assert "has fast / desk / seed 1 more than once: keep one run of it" in capsys.readouterr().err


def test_rows_of_before_returns_were_kept_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _rows(tmp_path / "cells.jsonl")
    path.write_text(path.read_text("utf-8").replace('"final_return"', '"other"'), "utf-8")
    with pytest.raises(SystemExit):
        _run(monkeypatch, path, "fast", "slow", "--measure", "return")
    assert "fast on seed 1 was kept before rows had a return: run it again" in capsys.readouterr().err


def test_what_a_win_rate_took_in_each_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On validation fast has .8 and .4 at its last evaluation, slow .2 twice."""
    rows = _rows(tmp_path / "rows.jsonl")
    _run(monkeypatch, rows, "fast", "slow", "--to", 0.3)
    assert capsys.readouterr().out.splitlines()[-1] == "| desk | slow | 100 | not reached | 2 of 2 | 0 |"
    _run(monkeypatch, rows, "fast", "slow", "--to", 0.1, "--axis", "cpu_s")
    assert capsys.readouterr().out.splitlines()[-1] == "| desk | slow | 8 | 8 | 0 of 2 | 2 |"
    with pytest.raises(SystemExit):
        _run(monkeypatch, rows, "fast", "slow", "--to", 0.1, "--measure", "return")
    assert "--to is of win rates" in capsys.readouterr().err
