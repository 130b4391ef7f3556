"""`python -m benchmarks.checks.plan_check`: the means that it takes from a run, and the plan that they make."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.checks import plan_check
from flows import presets
from flows.cost.workload import workload

ROOT = Path(__file__).parents[2]


def test_the_system_message_ends_where_episodes_differ() -> None:
    """Two episodes of two turns: 3 ids that both begin with, then 2 and 4 ids of the customer's, 2 of an action, 5 of an
    observation.
    """
    turns: list[dict[str, Any]] = []
    for episode, first in (("a", [11, 12]), ("b", [21, 12, 13, 14])):
        state = [1, 2, 3, *first]
        for k in range(2):
            turns.append({"run_id": "r", "episode_id": episode, "turn": k, "prompt_ids": state, "action_ids": [7, 8]})
            state = [*state, 7, 8, *range(5)]
    workspace: Any = SimpleNamespace(replay=SimpleNamespace(rows=lambda table, runs: turns))
    runs: Any = {"collect": [SimpleNamespace(run_id="r")]}
    found = plan_check.means(presets.load("desk+grpo"), workspace, runs)
    assert found == ["turns=2.0", "system=3", "first=3", "observation=5", "action=2"]


@pytest.mark.slow
def test_trained_tokens_of_the_demo_are_planned_right_with_the_run_s_own_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 7 %, with draws by the turn: visits share half of their first prompt. As if they shared all, it is 18 % low."""
    monkeypatch.chdir(ROOT)
    sets = ["iterations=1", "critic.epochs=1", "distill.epochs=1", "evaluate.episodes=8", "evaluate.audit_turns=0"]
    run, counts, lengths = plan_check.played("demo", sets, tmp_path / "home")
    works = {work.stage: work for work in workload(run, lengths)}
    for stage in ("critic", "distill"):
        assert works[stage].steps == counts[stage]["steps"]
        assert works[stage].predicted == pytest.approx(counts[stage]["predicted"], rel=0.05)
        assert works[stage].trained_tokens == pytest.approx(counts[stage]["trained"], rel=0.07)
