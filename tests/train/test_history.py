"""What is logged of a clipped loss is a mean over its ratios, turns or tokens, however they came in passes and steps;
against a loop over all ratios.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from self_ac_play import keep_episodes, run

from stages.learn.later import Later
from stages.learn.losses import Ratio, turn_ppo_clip
from stages.train import history, step_metrics
from stages.train.history import fit_metrics

Turns = list[list[float]]
"""log pi - log pi_old of each token of each turn."""
Merge = Callable[[Sequence[Mapping[str, float]]], dict[str, float]]

RATIOS: list[Ratio] = ["turn", "turn_mean", "token"]
NO_VALUES = {"value_loss": 0.0, "actor_loss": 0.0, **dict.fromkeys(step_metrics.MOMENTS, 0.0)}
MERGES: list[Merge] = [history.of_step, step_metrics.of_step]


def of_pass(turns: Turns, ratio: Ratio) -> Later:
    """The metrics of one pass, with what a pass of Self-AC says besides."""
    moved = torch.tensor([x for turn in turns for x in turn], dtype=torch.float64)
    turn_of_K = torch.arange(len(turns)).repeat_interleave(torch.tensor([len(turn) for turn in turns]))
    advantages = torch.ones(len(turns), dtype=torch.float64)
    options: dict[str, Any] = {"clip": 0.2, "ratio": ratio, "normaliser": 1.0}
    _, found = turn_ppo_clip(moved, torch.zeros_like(moved), turn_of_K, advantages, **options)
    return found | NO_VALUES | step_metrics.of_turns(advantages) | {"tokens": float(len(moved))}


def slow(turns: Turns, ratio: Ratio) -> dict[str, float]:
    """(mean ratio, share clipped) over all of them at once."""
    ratios = []
    for turn in turns:
        if ratio == "token":
            ratios += [math.exp(x) for x in turn]
        else:
            ratios.append(math.exp(sum(turn) / (len(turn) if ratio == "turn_mean" else 1)))
    clipped = [rho for rho in ratios if rho < 0.8 or rho > 1.2]
    return {"ratio_mean": sum(ratios) / len(ratios), "clip_frac": len(clipped) / len(ratios)}


@pytest.mark.parametrize("merge", MERGES)
def test_one_clipped_turn_of_ten_is_a_tenth_however_long_it_is(merge: Merge) -> None:
    passes = [[[0.01] * 60], [[0.0]] * 9]
    assert merge([of_pass(turns, "turn") for turns in passes])["clip_frac"] == pytest.approx(0.1)


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("ratio", RATIOS)
def test_metrics_of_a_step_and_of_a_stage_equal_a_loop_over_all_ratios(ratio: Ratio, merge: Merge) -> None:
    """Seven steps of one to four passes of one to five turns of one to six tokens."""
    rng = random.Random(0)
    steps: list[list[Turns]] = [
        [
            [[rng.gauss(0, 0.15) for _ in range(rng.randint(1, 6))] for _ in range(rng.randint(1, 5))]
            for _ in range(rng.randint(1, 4))
        ]
        for _ in range(7)
    ]
    steps_of = [merge([of_pass(turns, ratio) for turns in step]) for step in steps]
    for step, found in zip(steps, steps_of, strict=True):
        wanted = slow([turn for turns in step for turn in turns], ratio)
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-9)
    stage = fit_metrics("x", steps_of)
    last = slow([turn for step in steps[-5:] for turns in step for turn in turns], ratio)
    assert 0 < last["clip_frac"] < 1
    assert {name: stage[f"x/{name}"] for name in last} == pytest.approx(last, rel=1e-9)
    assert not [name for name in stage if "count" in name]


@pytest.mark.parametrize("ratio", RATIOS)
def test_how_a_step_of_self_ac_is_packed_changes_no_metric_of_its_ratios(
    base: Path, tmp_path: Path, ratio: Ratio
) -> None:
    """Four episodes in a row each, and all in one row; the rows have 1 to 3 turns of different lengths."""
    bench = models.Bench(base, tmp_path)
    keep_episodes(bench)
    whole, many = (
        run(bench, name=str(row_tokens), ratio=ratio, row_tokens=row_tokens, epochs=1).metrics
        for row_tokens in (10**6, 1)
    )
    for name in ("ratio_mean", "ratio_max", "clip_frac", "kl_old", "gap_mean", "entropy", "tokens"):
        assert many[f"self_ac/{name}"] == pytest.approx(whole[f"self_ac/{name}"], rel=1e-4), name


def test_fit_metrics_are_first_values_and_means_of_the_last_five() -> None:
    history = [{"loss": float(i), **({"kl": 1.0} if i else {})} for i in range(8)]
    found = fit_metrics("x", history)
    assert found == {"x/steps": 8.0, "x/loss_first": 0.0, "x/loss": 5.0, "x/kl_first": 1.0, "x/kl": 1.0}
    assert fit_metrics("x", []) == {"x/steps": 0.0}
