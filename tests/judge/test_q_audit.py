"""The audit of a critic that is a number: planted numbers, and what must come out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import models
import pytest
from evaluate_play import OPTIONS, Play, bench_of

from stages import evaluate
from stages.evaluate import EvaluateConfig
from stages.judge import q_audit
from stages.judge.q_values import QCritic

INPUTS = {"distill": ["distill0"], "q_critic": ["q0"]}


@pytest.fixture(params=["right", "upside down", "flat"])
def sign(request: pytest.FixtureRequest) -> float:
    return {"right": 1.0, "upside down": -1.0, "flat": 0.0}[request.param]


def test_planted_numbers_have_the_order_that_they_were_planted_with(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: float
) -> None:
    """The policy is right for gold customers and wrong for others, in all steps; the base's actions, read beside them, are
    wrong. So 1 for a right action and 0 for a wrong one is the return of every own action.
    """
    bench = bench_of(base, tmp_path, Play())
    bench.memory.files["q0", "adapter"] = tmp_path

    def numbers(model: Any, head: Any, prompts: Any) -> list[float]:
        found = []
        for text in (bench.engine.decode(ids) for ids in prompts):
            action, state = text.rsplit("Action: ", 1)[1].splitlines()[0], text.rsplit("<user>", 1)[0]
            found.append(sign * float(action == models.right_action(state, OPTIONS)))
        return found

    monkeypatch.setattr(q_audit, "open_q", lambda context: QCritic(None, None))  # type: ignore[arg-type]
    monkeypatch.setattr(q_audit, "q_values", numbers)
    outputs = bench.run(evaluate.STAGE, EvaluateConfig(episodes=48, audit_turns=60, value=False), INPUTS)
    metrics = outputs.metrics
    if sign:
        assert metrics["audit/future_return_spearman"] == pytest.approx(sign)
        assert metrics["audit/future_return_auroc"] == (sign > 0)
        assert metrics["audit/future_q_spearman"] * sign > 0.8
    else:
        assert metrics["audit/future_return_auroc"] == 0.5
        assert {"audit/future_return_spearman", "audit/future_q_spearman"}.isdisjoint(metrics)
    assert not any(math.isnan(value) for value in metrics.values())
    rows = [dict(row) for row in outputs.rows["judgements"]]
    assert len(rows) == 120 and {row["verdict"] for row in rows} == {"none"}
    for row in (row for row in rows if row["info"]["own"]):
        assert row["critique"] == f"Q = {sign * row['info']['return']:.3f}"
