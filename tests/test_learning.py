"""Every method of the demo learns a world whose optimum is known: a desk of one step, on which the base model wins half of
the visits and the right option all of them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flows import cli

pytestmark = pytest.mark.slow

BASE = Path(__file__).parents[1] / "data" / "base"
SMALL = {
    "task.options.steps": 1, "task.options.rules_seed": 5, "seed": 3, "collect.first_episodes": 128, "collect.episodes": 64,
    "targets.transitions": 192, "q_critic.transitions": 192, "refine.states": 96, "pick.states": 96, "rft.epochs": 5,
    "evaluate.episodes": 64, "evaluate.audit_turns": 0, "evaluate.probe_path": '""',
}  # fmt: skip
ITERATIONS = {
    "demo": 3, "demo_relabel": 3, "demo_rft": 3, "demo_grpo": 4, "demo_ppo": 3, "demo_hindsight": 3, "demo_nlrl": 3, "demo_nlql": 4, "demo_sac": 5,
}  # fmt: skip


@pytest.mark.parametrize("preset", ITERATIONS)
def test_it_comes_to_the_optimum(
    preset: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From half to .9 or more of 64 visits on the test split."""
    (home / "data").mkdir(exist_ok=True)
    shutil.copytree(BASE, home / "data" / "base")
    monkeypatch.chdir(home)
    sets = {**SMALL, "iterations": ITERATIONS[preset]}
    argv = [f"--set={key}={value}" for key, value in sets.items()]
    assert cli.main(["run", preset, "--plain", "--quiet", "--json", *argv]) == 0
    run: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert run["base"]["win_rate"] < 0.7
    assert run["final"]["win_rate"] >= 0.9
