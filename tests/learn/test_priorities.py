"""Prioritised sampling: equation by hand, the drawing rule against a loop, and what the weights undo."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest

from stages.learn import priorities as rules
from stages.learn.priorities import by_clocks, few_of_many, importance_weights, priorities, sample_without_replacement

Draw = Callable[[np.random.Generator, np.ndarray, int], np.ndarray]


def test_priorities_follow_the_equation() -> None:
    p = priorities(np.array([0.0, 3.0, 8.0]), alpha=0.5, eps=1.0)
    assert np.allclose(p, np.array([1.0, 2.0, 3.0]) / 6, atol=1e-15)  # roots of 1, 4, 9


def test_alpha_0_is_uniform() -> None:
    assert np.allclose(priorities(np.array([0.1, 5.0, 0.0]), alpha=0.0, eps=0.1), 1 / 3)


def test_new_transitions_get_the_largest_priority() -> None:
    p = priorities(np.array([0.5, np.nan, 2.0, np.nan]), alpha=0.6, eps=0.01)
    assert p[1] == p[2] == p[3] == p.max()
    assert np.allclose(priorities(np.array([np.nan, np.nan]), alpha=0.6, eps=0.01), 0.5)


@pytest.mark.parametrize("losses", [[], [-0.1, 1.0], [np.inf, 1.0], [[1.0]]])
def test_losses_that_are_no_losses_are_refused(losses: list[float]) -> None:
    with pytest.raises(ValueError, match="losses must be"):
        priorities(np.array(losses), alpha=0.6, eps=0.01)


@pytest.mark.parametrize(("alpha", "eps"), [(-0.1, 0.01), (0.6, 0.0)])
def test_settings_out_of_range_are_refused(alpha: float, eps: float) -> None:
    with pytest.raises(ValueError, match="alpha must be"):
        priorities(np.ones(3), alpha=alpha, eps=eps)


def _ordered_probability(p: np.ndarray, order: tuple[int, ...]) -> float:
    """Chance of this order when each draw is in proportion to p among those that are left (the loop twin)."""
    chance, left = 1.0, float(p.sum())
    for i in order:
        chance *= p[i] / left
        left -= p[i]
    return chance


@pytest.mark.parametrize("draw", [by_clocks, few_of_many])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_draws_are_one_after_the_other_in_proportion_to_p(seed: int, draw: Draw) -> None:
    """Every ordered pair comes as often as the loop says: chi-square of 12 cells, 11 degrees: mean 11, above 44.6 once
    in 1e5.
    Without priorities (uniform draws, same numbers): over 1000.
    """
    p = np.array([0.1, 0.2, 0.3, 0.4])
    rng = np.random.default_rng(seed)

    def chi_square(weights: np.ndarray) -> float:
        counts: dict[tuple[int, ...], int] = {}
        for _ in range(8000):
            pair = tuple(int(i) for i in draw(rng, weights, 2))
            counts[pair] = counts.get(pair, 0) + 1
        pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
        expected = {pair: 8000 * _ordered_probability(p, pair) for pair in pairs}
        return sum((counts.get(pair, 0) - n) ** 2 / n for pair, n in expected.items())

    assert chi_square(p) < 44.6
    assert chi_square(np.ones(4)) > 1000


@pytest.mark.parametrize("tries", [0, 1, 3])
def test_draws_that_the_clocks_end_have_the_same_chances(tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All orders of three of four, one of which has nearly all of p: chi-square of 24 cells, above 57.6 once in 1e4."""
    monkeypatch.setattr(rules, "TRIES", tries)
    p, rng, counts = np.array([0.94, 0.01, 0.02, 0.03]), np.random.default_rng(0), dict[tuple[int, ...], int]()
    for _ in range(20000):
        order = tuple(int(i) for i in few_of_many(rng, p, 3))
        counts[order] = counts.get(order, 0) + 1
    expected = {order: 20000 * _ordered_probability(p, order) for order in permutations(range(4), 3)}
    assert sum((counts.get(order, 0) - n) ** 2 / n for order, n in expected.items()) < 57.6


def test_a_place_in_the_sum_is_that_of_a_linear_search() -> None:
    """Entries of probability 0 and a last block that is not full among them."""
    rng = np.random.default_rng(0)
    p = np.where(rng.random(3 * rules.BLOCK + 17) < 0.5, 0.0, rng.integers(1, 9, 3 * rules.BLOCK + 17)).astype(float)
    ends = np.cumsum(np.add.reduceat(p, np.arange(0, p.size, rules.BLOCK)))
    places = np.arange(0, p.sum(), 0.5)  # whole numbers: nothing is rounded
    assert rules._at(places, p, ends).tolist() == [int(i) for i in np.repeat(np.arange(p.size), (2 * p).astype(int))]
    assert rules._at(np.array([p.sum()]), p, ends).size == 0


def test_few_of_many_are_drawn_by_one_sum_and_fewer_or_more_by_clocks() -> None:
    p = np.random.default_rng(0).random(rules.MANY)
    for draw, entries, n in ((few_of_many, p, 1000), (by_clocks, p, 1001), (by_clocks, p[1:], 256)):
        first, second = np.random.default_rng(1), np.random.default_rng(1)
        assert np.array_equal(sample_without_replacement(first, entries, n), draw(second, entries, n))


@pytest.mark.parametrize("draw", [by_clocks, few_of_many, sample_without_replacement])
def test_a_batch_holds_no_index_twice_and_none_of_probability_0(draw: Draw) -> None:
    p = np.array([0.0, 1.0, 1e-12, 5.0, 0.0, 2.0])
    drawn = draw(np.random.default_rng(0), p, 4)
    assert sorted(drawn) == [1, 2, 3, 5]
    assert draw(np.random.default_rng(0), p, 0).size == 0


def test_the_same_seed_draws_the_same_batch() -> None:
    p = np.random.default_rng(0).random(1000)
    first, second = (sample_without_replacement(np.random.default_rng(7), p, 64) for _ in range(2))
    assert np.array_equal(first, second)


@pytest.mark.parametrize(("p", "n"), [([1.0, 0.0], 2), ([1.0, -1.0], 1), ([np.nan, 1.0], 1), ([1.0, 1.0], -1)])
def test_impossible_draws_are_refused(p: list[float], n: int) -> None:
    with pytest.raises(ValueError, match=r"p must be|different indices"):
        sample_without_replacement(np.random.default_rng(0), np.array(p), n)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_importance_weights_restore_the_uniform_mean(seed: int) -> None:
    """Mean over a replay whose priority is the value itself: 0.5 wanted; within 5 standard errors (and 1 % for what
    drawing 32 of 2000 without replacement adds to first order). Without weights: E[x^1.6]/E[x^0.6] = 0.615 in the limit
    of many rows.
    """
    rng = np.random.default_rng(seed)
    values = (np.arange(2000) + 0.5) / 2000
    p = priorities(values, alpha=0.6, eps=1e-3)
    batches = [sample_without_replacement(rng, p, 32) for _ in range(400)]
    weighted = np.array([np.mean(importance_weights(p, i, 1.0) * values[i]) for i in batches])
    plain = np.array([np.mean(importance_weights(p, i, 0.0) * values[i]) for i in batches])
    assert abs(weighted.mean() - 0.5) < 5 * weighted.std() / 20 + 0.005
    assert abs(plain.mean() - 1.6 / 2.6) < 5 * plain.std() / 20 + 0.005


def test_weights_have_mean_1_under_p() -> None:
    p = priorities(np.array([0.2, 1.0, 4.0, np.nan]), alpha=0.6, eps=0.01)
    assert abs(float(p @ importance_weights(p, np.arange(4), 1.0)) - 1) < 1e-15


def test_weights_of_something_else_than_probabilities_are_refused() -> None:
    with pytest.raises(ValueError, match="sum to 1"):
        importance_weights(np.array([1.0, 1.0]), np.array([0]), 1.0)
    with pytest.raises(ValueError, match="probability 0"):
        importance_weights(np.array([1.0, 0.0]), np.array([1]), 1.0)
    with pytest.raises(ValueError, match="beta"):
        importance_weights(np.array([1.0]), np.array([0]), 1.5)
