"""The clipped loss over turns against a loop over turns and tokens, with the gradient worked out by hand, and where it
meets its limits.

By hand: d min(rho A, clip(rho) A) / dl = rho A where the unclipped term is the smaller one, else 0; and d rho_j / dlog
pi_t = rho_j for `turn`, rho_j / |a_j| for `turn_mean`, rho_t for `token`. All in float64: 1e-12 is rounding.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.learn.losses import Ratio, loss_normaliser, turn_ppo_clip

RATIOS: list[Ratio] = ["turn", "turn_mean", "token"]
LENGTHS = [1, 4, 2, 3, 1, 5, 2, 6]
TURNS = torch.arange(8).repeat_interleave(torch.tensor(LENGTHS))
ADVANTAGES = torch.tensor([1.5, -0.5, 2.0, -1.0, -0.7, 0.3, -2.0, 0.0], dtype=torch.float64)


def log_probs(seed: int = 0, spread: float = 0.2) -> tuple[Tensor, Tensor]:
    """New and old, 24 tokens."""
    rng = random.Random(seed)
    old = torch.tensor([rng.uniform(-3, -0.1) for _ in TURNS], dtype=torch.float64)
    moved = torch.tensor([rng.gauss(0, spread) for _ in TURNS], dtype=torch.float64)
    return (old + moved).requires_grad_(True), old


def slow(
    new: list[float], old: list[float], turns: list[int], advantages: list[float], ratio: Ratio
) -> tuple[float, list[float], list[float]]:
    """(sum of the minima, its gradient by token, ratios), clip 0.2."""
    total, gradient, ratios = 0.0, [0.0] * len(new), []
    for j, advantage in enumerate(advantages):
        tokens = [t for t, turn in enumerate(turns) if turn == j]
        for members in [[t] for t in tokens] if ratio == "token" else [tokens]:
            share = 1 / len(members) if ratio == "turn_mean" else 1.0
            rho = math.exp(share * sum(new[t] - old[t] for t in members))
            bounded = min(max(rho, 0.8), 1.2)
            total += min(rho * advantage, bounded * advantage)
            ratios.append(rho)
            for t in members:
                gradient[t] = share * rho * advantage if rho * advantage <= bounded * advantage else 0.0
    return total, gradient, ratios


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_turn_ppo_clip_and_its_gradient_equal_a_loop(ratio: Ratio, seed: int) -> None:
    new, old = log_probs(seed)
    loss, metrics = turn_ppo_clip(new, old, TURNS, ADVANTAGES, clip=0.2, ratio=ratio, normaliser=3.0)
    total, gradient, ratios = slow(new.tolist(), old.tolist(), TURNS.tolist(), ADVANTAGES.tolist(), ratio)
    assert float(loss.detach()) == pytest.approx(-total / 3, abs=1e-12)
    assert torch.autograd.grad(loss, new)[0].tolist() == pytest.approx([-g / 3 for g in gradient], abs=1e-12)
    clipped = sum(not 0.8 <= rho <= 1.2 for rho in ratios)
    assert 0 < clipped < len(ratios)
    logs = (new.detach() - old).tolist()
    expected = {
        "ratio_mean": sum(ratios) / len(ratios),
        "ratio_max": max(ratios),
        "clip_frac": clipped / len(ratios),
        "kl_old": sum(math.exp(x) - 1 - x for x in logs) / len(logs),
        "gap_mean": sum(abs(x) for x in logs) / len(logs),
        "gap_max": max(abs(x) for x in logs),
        **{f"count/{name}": len(ratios) for name in ("ratio_mean", "clip_frac")},
        **{f"count/{name}": len(logs) for name in ("kl_old", "gap_mean")},
    }
    assert metrics == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("ratio", RATIOS)
def test_at_ratio_1_the_gradient_is_that_of_minus_a_log_pi(ratio: Ratio) -> None:
    """log pi of a turn being the sum over its tokens; `turn_mean` has 1/|a_j| of it, so long actions count less."""
    new, _ = log_probs()
    loss, metrics = turn_ppo_clip(new, new.detach(), TURNS, ADVANTAGES, clip=0.2, ratio=ratio, normaliser=5.0)
    share = torch.tensor(LENGTHS).double() if ratio == "turn_mean" else torch.ones(8).double()
    assert torch.allclose(torch.autograd.grad(loss, new)[0], (-ADVANTAGES / share / 5)[TURNS], atol=1e-12)
    assert {name: value for name, value in metrics.items() if not name.startswith("count/")} == {
        "ratio_mean": 1.0,
        "ratio_max": 1.0,
        "clip_frac": 0.0,
        "kl_old": 0.0,
        "gap_mean": 0.0,
        "gap_max": 0.0,
    }


def test_for_turns_of_one_token_the_three_ratios_are_one() -> None:
    new, old = log_probs()
    everyone, advantages = torch.arange(24), torch.linspace(-2, 2, 24).double()
    found = [turn_ppo_clip(new, old, everyone, advantages, clip=0.2, ratio=ratio, normaliser=24.0) for ratio in RATIOS]
    rho = (new - old).exp()
    expected = -torch.minimum(rho * advantages, rho.clamp(0.8, 1.2) * advantages).mean()
    wanted = torch.autograd.grad(expected, new)[0]
    for loss, metrics in found:
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
        assert torch.allclose(torch.autograd.grad(loss, new)[0], wanted, atol=1e-12)
        assert metrics == pytest.approx(found[0][1], abs=1e-7)


@pytest.mark.parametrize("ratio", RATIOS)
def test_order_of_tokens_and_of_turns_changes_nothing(ratio: Ratio) -> None:
    """Tokens in any order, turns under other numbers: what counts is which turn a token names."""
    new, old = log_probs()
    tokens, names = list(range(24)), list(range(8))
    random.Random(0).shuffle(tokens)
    random.Random(1).shuffle(names)
    renamed = torch.empty(8, dtype=torch.float64)
    renamed[names] = ADVANTAGES
    before, metrics = turn_ppo_clip(new, old, TURNS, ADVANTAGES, clip=0.2, ratio=ratio, normaliser=8.0)
    after, others = turn_ppo_clip(
        new[tokens], old[tokens], torch.tensor(names)[TURNS][tokens], renamed, clip=0.2, ratio=ratio, normaliser=8.0
    )
    assert float(after.detach()) == pytest.approx(float(before.detach()), abs=1e-12)
    assert torch.allclose(torch.autograd.grad(after, new)[0], torch.autograd.grad(before, new)[0], atol=1e-12)
    assert others == pytest.approx(metrics, abs=1e-7)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("per", ["turn", "episode"])
def test_parts_divided_by_the_step_s_normaliser_add_up_to_the_whole_step(ratio: Ratio, per: Any) -> None:
    """Three episodes of 3, 1 and 4 turns, cut after the second: 8 turns or 3 episodes, whichever part it is."""
    new, old = log_probs()
    normaliser = loss_normaliser(per, torch.tensor([3, 1, 4]))
    assert normaliser == {"turn": 8.0, "episode": 3.0}[per]
    whole, _ = turn_ppo_clip(new, old, TURNS, ADVANTAGES, clip=0.2, ratio=ratio, normaliser=normaliser)
    parts = []
    for first, last in ((0, 4), (4, 8)):
        inside = (first <= TURNS) & (last > TURNS)
        args = (new[inside], old[inside], TURNS[inside] - first, ADVANTAGES[first:last])
        parts.append(turn_ppo_clip(*args, clip=0.2, ratio=ratio, normaliser=normaliser)[0])
    total = torch.stack(parts).sum()
    assert float(total.detach()) == pytest.approx(float(whole.detach()), abs=1e-12)
    assert torch.allclose(torch.autograd.grad(total, new)[0], torch.autograd.grad(whole, new)[0], atol=1e-12)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("advantage", [2.0, 0.0])
@pytest.mark.parametrize(("log_ratio", "expected"), [(89.0, 1.2), (1e3, 1.2), (-math.inf, 0.0)])
def test_a_ratio_beyond_fp32_makes_no_nan_where_the_advantage_is_not_negative(
    ratio: Ratio, advantage: float, log_ratio: float, expected: float
) -> None:
    """exp(89) is infinite: the clipped term is smaller, its gradient 0, the other turn's untouched. So at 0."""
    new = torch.tensor([log_ratio - 1, -1.0], requires_grad=True)
    turns = torch.arange(2)
    advantages = torch.tensor([advantage, 0.5])
    loss, metrics = turn_ppo_clip(new, -torch.ones(2), turns, advantages, clip=0.2, ratio=ratio, normaliser=1.0)
    assert float(loss.detach()) == pytest.approx(-expected * advantage - 0.5)
    assert torch.autograd.grad(loss, new)[0].tolist() == pytest.approx([0.0, -0.5])
    assert metrics["ratio_max"] == (math.inf if log_ratio > 0 else 1.0)
    assert not any(math.isnan(x) for x in metrics.values())


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_ratio_that_overflows_with_a_negative_advantage_is_an_infinite_loss_for_fit_to_refuse(ratio: Ratio) -> None:
    new = torch.tensor([999.0, -1.0], requires_grad=True)
    loss, _ = turn_ppo_clip(
        new, -torch.ones(2), torch.tensor([0, 1]), torch.tensor([-0.1, 0.5]), clip=0.2, ratio=ratio, normaliser=1.0
    )
    assert float(loss.detach()) == math.inf


def test_the_guard_against_overflow_changes_no_gradient_near_the_clip() -> None:
    """A > 0, ratios just below and above 1 + c and far above it: rho A, then 0."""
    ratios = torch.tensor([1.199, 1.201, 2.0, 3.2, 3.4, 100.0], dtype=torch.float64)
    new = ratios.log().requires_grad_(True)
    loss, _ = turn_ppo_clip(
        new, torch.zeros_like(ratios), torch.arange(6), torch.ones(6).double(), clip=0.2, normaliser=1.0
    )
    assert torch.autograd.grad(loss, new)[0].tolist() == pytest.approx([-1.199, 0, 0, 0, 0, 0])


def test_no_gradient_reaches_the_old_policy_or_the_advantages() -> None:
    new, old = log_probs()
    old, advantages = old.requires_grad_(True), ADVANTAGES.clone().requires_grad_(True)
    loss, _ = turn_ppo_clip(new, old, TURNS, advantages, clip=0.2, normaliser=1.0)
    assert [*torch.autograd.grad(loss, [old, advantages], allow_unused=True)] == [None, None]


def test_wrong_arguments_are_refused() -> None:
    new, old = log_probs()
    missing = old.clone()
    missing[3] = math.nan
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ((new, old[:-1], TURNS, ADVANTAGES), {}, "of shape"),
        ((new, old, TURNS[:-1], ADVANTAGES), {}, "of shape"),
        ((new, old, TURNS, ADVANTAGES[:, None]), {}, "of shape"),
        ((new, missing, TURNS, ADVANTAGES), {}, "old log-probs must be finite"),
        ((new, old, TURNS.float(), ADVANTAGES), {}, "must be long"),
        ((new, old, TURNS, ADVANTAGES[:-1]), {}, r"in \[0, 7\)"),
        ((new, old, TURNS - 1, ADVANTAGES), {}, r"in \[0, 8\)"),
        ((new, old, TURNS.clamp(max=6), ADVANTAGES), {}, "at least one action token"),
        ((new[:0], old[:0], TURNS[:0], ADVANTAGES[:0]), {}, "at least one action token"),
        ((new, old, TURNS, ADVANTAGES), {"normaliser": 0.0}, "normaliser must be > 0"),
        ((new, old, TURNS, ADVANTAGES), {"ratio": "tokens"}, "ratio must be"),
    ]
    for args, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            turn_ppo_clip(*args, **({"clip": 0.2, "normaliser": 1.0} | options))
