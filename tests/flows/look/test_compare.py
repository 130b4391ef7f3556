"""`turnwise compare RUN RUN`: what differs and what came of it, side by side; `turnwise presets`; what a dry run says first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from branching import Turnwise, finished_run, old, runs_of, turnwise

__all__ = ["finished_run", "old", "turnwise"]  # fixtures


def test_pipeline_runs_stand_side_by_side_with_what_differs_and_their_curves(
    turnwise: Turnwise, old: Any, stages: Any
) -> None:
    stages.win_rates[2] = 0.9
    new = turnwise("rerun", "critic", "--of", old["run_id"], "--set", "critic.lr=0.5", "--through", "evaluate")
    found = turnwise("compare", old["run_id"], new["run_id"])
    assert found["config"] == {"critic.lr": [0.1, 0.5]}
    assert found["curves"]["win rate, validation"] == [[0.1, 0.3, 0.5, 0.5], [0.1, 0.3, 0.5, 0.9]]
    assert [one["final"]["win_rate"] for one in found["results"]] == [0.5, 0.9]
    assert found["metrics"]["critic/lr"] == [0.1, 0.5]
    _, out, _ = turnwise("compare", old["run_id"], new["run_id"], raw=True)
    lines = [line.split() for line in out.splitlines()]
    assert [old["run_id"][:8], new["run_id"][:8]] in lines
    assert ["critic.lr", "0.1", "0.5"] in lines
    assert ["win", "rate,", "validation", "▁▂▅▅", "0.5", "▁▂▅█", "0.9"] in lines


def test_runs_of_one_stage_are_compared_by_their_metrics(turnwise: Turnwise, old: Any) -> None:
    one, other = (runs_of(old, i)["critic"] for i in (0, 1))
    found = turnwise("compare", one, other)
    assert found["config"] == {"iteration": [0, 1]}
    assert found["metrics"]["critic/lr"] == [0.1, 0.1]


@pytest.mark.parametrize(
    ("stage", "told"), [("", "wanted two runs or more"), ("critic", "or runs of one stage, found")]
)
def test_what_cannot_be_compared_is_one_sentence(turnwise: Turnwise, old: Any, stage: str, told: str) -> None:
    other = runs_of(old, 0)[stage] if stage else old["run_id"]
    status, _, err = turnwise("compare", old["run_id"], other, raw=True)
    assert (status, told in err, err.count("\n")) == (2, True, 1)


def test_presets_of_one_s_own_are_told_by_their_path(home: Path, turnwise: Turnwise) -> None:
    (home / "mine.toml").write_text("# Ours: nothing. And more.\n")
    found = turnwise("presets", "tiny", "mine.toml")
    assert [(one["name"], one["about"][:14]) for one in found] == [
        ("tiny", "The desk with "),
        ("mine.toml", "Ours: nothing."),
    ]
    status, _, err = turnwise("presets", "none.toml", raw=True)
    assert (status, "There is no preset file none.toml" in err) == (2, True)


def test_a_dry_run_says_first_what_differs_from_preset_and_defaults(turnwise: Turnwise) -> None:
    command = ("run", "preset.toml", "--set", "critic.lr=0.5", "--dry-run")
    _, out, _ = turnwise(*command, raw=True)
    assert out.splitlines()[:6] == [
        "Differs from the preset preset in:",
        "  critic.lr 0.1 -> 0.5",
        "Differs from the code's defaults in:",
        "  iterations 4 -> 3",
        "  critic.lr 0.1 -> 0.5",
        "{",
    ]
    found = turnwise(*command)
    assert (found["changed"], list(found["not_default"])) == ({"critic.lr": [0.1, 0.5]}, ["iterations", "critic.lr"])


def test_a_preset_of_one_s_own_extends_another_file_beside_it(home: Path, turnwise: Turnwise) -> None:
    (folder := home / "mine").mkdir()
    (folder / "below.toml").write_text("[critic]\nlr = 0.25\n")
    (folder / "above.toml").write_text('extends = "below.toml"\niterations = 1\n')
    config = turnwise("run", "mine/above.toml", "--dry-run")["config"]
    assert (config["critic"]["lr"], config["iterations"]) == (0.25, 1)
