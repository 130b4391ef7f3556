"""The base model that ships: it loads like any other, it knows its roles, and it knows nothing of the desk."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import models
import pytest
from probes import answered

from stages import evaluate
from stages.evaluate import EvaluateConfig
from stages.frame.sections import RolesConfig, TaskConfig
from stages.llm.hf import HfEngine

BASE = Path(__file__).parent.parent / "data" / "base"


@pytest.fixture(scope="module")
def engine() -> HfEngine:
    return HfEngine(str(BASE))


def test_it_knows_its_roles_as_its_card_says(engine: HfEngine) -> None:
    """20 held-out prompts a role, greedily: of combine, evaluator and corrector 18 exactly; untrained 0."""
    roles = ("combine", "evaluator", "corrector")
    right = Counter(row["role"] for row, reply in answered(engine, BASE, roles) if reply == row["reply"])
    assert all(right[role] >= 18 for role in roles), right


@pytest.mark.parametrize(("options", "wins"), [({}, 27), ({"steps": 4}, 15)], ids=["default", "log"])
def test_it_acts_readably_and_wins_no_more_than_chance(
    engine: HfEngine, tmp_path: Path, options: dict[str, Any], wins: int
) -> None:
    """288 visits where a random policy wins 1 in 24, or with the fourth step 1 in 72: 12 and 4 wins are expected.

    27 and 15 come by chance about once in 10,000 times. Its own habits make some customers likelier to be served right
    than others, so a few more or less are no sign of knowledge.
    """
    bench = models.Bench(
        BASE, tmp_path, engine=engine, task=TaskConfig(options=options), roles=RolesConfig(max_action_tokens=24)
    )
    metrics = bench.run(evaluate.STAGE, EvaluateConfig(episodes=288, audit_turns=0), {}).metrics
    assert metrics["evaluate/malformed_frac"] < 0.1
    assert metrics["evaluate/win_rate"] * 288 < wins


def test_its_weights_are_small_enough_to_ship() -> None:
    assert sum(file.stat().st_size for file in BASE.iterdir()) < 6_000_000
    assert not [file.name for file in BASE.iterdir() if file.suffix in (".bin", ".pt", ".pkl")]
