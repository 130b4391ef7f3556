"""The uses of a value function against slow twins that play them out, and cases by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from stages.learn.episode_row import episode_ids, pack
from stages.learn.returns import monte_carlo
from stages.learn.value_use import (
    abort_table,
    abort_thresholds,
    best_of_n,
    binned_returns,
    choose_threshold,
    explained_variance,
    returns_to_go,
)


@pytest.mark.parametrize("gamma", [0.5, 1.0])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_returns_to_go_are_those_of_the_training_row(gamma: float, n: int) -> None:
    """Rewards on their states by `episode_ids`, returns by `monte_carlo`: what the critic was trained towards."""
    rewards = np.random.default_rng(n).normal(size=n).tolist()
    turns = [
        {"prompt_ids": [5] * (k + 1), "action_ids": [5], "log_probs": [-1.0], "reward": r}
        for k, r in enumerate(rewards)
    ]
    row = pack([episode_ids(turns, [5] * (n + 1), truncated=False)], (7,), max_positions=None)
    wanted = monte_carlo(row.rewards, torch.zeros_like(row.rewards), row.n_turns, row.truncated, gamma=gamma)
    assert returns_to_go(rewards, gamma=gamma) == pytest.approx(wanted[0].tolist(), abs=1e-5)


def test_without_a_turn_there_is_no_return() -> None:
    with pytest.raises(ValueError, match="at least one reward"):
        returns_to_go([], gamma=1.0)


def test_explained_variance_knows_its_edges() -> None:
    assert explained_variance([3.0, 4.0, 5.0], [0.0, 1.0, 2.0]) == 1  # a constant error costs nothing
    assert explained_variance([7.0, 7.0], [0.0, 1.0]) == 0
    assert explained_variance([1.0, 0.0], [0.0, 1.0]) == -3
    assert math.isnan(explained_variance([0.0, 1.0], [1.0, 1.0])) and math.isnan(explained_variance([], []))
    for values_, returns_ in (([1.0], [1.0, 2.0]), ([math.nan, 1.0], [0.0, 1.0])):
        with pytest.raises(ValueError, match="finite lists of one length"):
            explained_variance(values_, returns_)


def slow_best_of(wins: Any, values: Any) -> dict[str, float]:
    won: dict[str, list[float]] = {"random": [], "oracle": [], "value": []}
    for scenario, found in zip(wins, values, strict=True):
        chosen = 0
        for i in range(len(found)):
            if found[i] > found[chosen]:
                chosen = i
        won["value"].append(scenario[chosen])
        won["random"].append(sum(scenario) / len(scenario))
        won["oracle"].append(float(any(scenario)))
    return {name: sum(shares) / len(shares) for name, shares in won.items()}


def test_best_of_n_equals_a_loop_with_ties() -> None:
    rng = np.random.default_rng(1)
    for n in (1, 2, 5):
        wins, values = rng.integers(0, 2, (40, n)), rng.integers(0, 3, (40, n)) / 2
        assert best_of_n(wins, values) == pytest.approx(slow_best_of(wins.tolist(), values.tolist()))


def test_a_perfect_value_chooses_as_the_oracle_and_a_contrary_one_loses_what_can_be_lost() -> None:
    wins = np.array([[0, 1, 0], [0, 0, 0], [1, 0, 1], [1, 1, 1]])
    assert best_of_n(wins, wins) == {"random": 0.5, "oracle": 0.75, "value": 0.75}
    assert best_of_n(wins, -wins)["value"] == 0.25
    assert best_of_n(wins, np.zeros_like(wins))["value"] == 0.5  # all tied: the first of each
    assert best_of_n(wins) == {"random": 0.5, "oracle": 0.75}


def test_best_of_n_refuses_what_it_cannot_read() -> None:
    for wins in ([0, 1], [[0, 2]], []):
        with pytest.raises(ValueError, match="wins must be 0 or 1"):
            best_of_n(wins)
    for values in ([[0.0]], [[0.0, math.nan]]):
        with pytest.raises(ValueError, match="values must be numbers"):
            best_of_n([[0, 1]], values)


def slow_abort(values: Any, tokens: Any, wins: Any, threshold: float, first: int) -> dict[str, float]:
    """Plays every episode again, turn by turn."""
    spent = aborted = lost = 0
    for episode, counts, won in zip(values, tokens, wins, strict=True):
        over = False
        for k in range(len(episode)):
            if k >= first and episode[k] < threshold:
                over = True
                break
            spent += counts[k]
        aborted += over
        lost += over and won
    whole = sum(sum(counts) for counts in tokens)
    return {
        "threshold": threshold,
        "aborted": aborted / len(wins),
        "tokens_saved": (whole - spent) / whole,
        "wins_lost": lost / max(sum(wins), 1),
    }


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_abort_table_equals_playing_again(first: int) -> None:
    rng = np.random.default_rng(first)
    lengths = rng.integers(1, 7, 50)
    values = [(rng.integers(0, 10, n) / 10).tolist() for n in lengths]  # ties with the thresholds, too
    tokens = [rng.integers(1, 30, n).tolist() for n in lengths]
    wins = [bool(x) for x in rng.integers(0, 2, 50)]
    thresholds = abort_thresholds(values, n=8, first=first)
    found = abort_table(values, tokens, wins, thresholds, first=first)
    assert len(found) == 9
    for row in found:
        assert row == pytest.approx(slow_abort(values, tokens, wins, row["threshold"], first))
    assert found[0]["tokens_saved"] == found[0]["wins_lost"] == 0  # nothing lies below the lowest value
    assert found[-1]["tokens_saved"] > 0.3


def test_abort_by_hand() -> None:
    """Lost: low from its second state on, 20 of 60 tokens. Won: falls to .3 before its last action."""
    values, tokens = [[0.9, 0.1, 0.8], [0.0, 0.7, 0.3]], [[10, 10, 10], [10, 10, 10]]
    low, high = abort_table(values, tokens, [False, True], [0.2, 0.5])
    assert low == {"threshold": 0.2, "aborted": 0.5, "tokens_saved": 20 / 60, "wins_lost": 0.0}
    assert high == {"threshold": 0.5, "aborted": 1.0, "tokens_saved": 30 / 60, "wins_lost": 1.0}
    assert choose_threshold([low, high], 0.1) == 0.2 and choose_threshold([low, high], 1.0) == 0.5
    assert choose_threshold([high], 0.1) == -math.inf


def test_episodes_of_one_turn_cannot_be_aborted_after_their_first_state() -> None:
    assert abort_thresholds([[0.5], [0.2]]) == []
    assert abort_table([[0.1]], [[5]], [False], [1.0]) == [
        {"threshold": 1.0, "aborted": 0.0, "tokens_saved": 0.0, "wins_lost": 0.0}
    ]
    for values, tokens, wins in (([], [], []), ([[0.1]], [[5, 5]], [True]), ([[0.1]], [[5]], [])):
        with pytest.raises(ValueError, match="abort_table wants"):
            abort_table(values, tokens, wins, [0.5])


def test_binned_returns_part_the_states_evenly_and_lose_none() -> None:
    rng = np.random.default_rng(2)
    values, returns = rng.normal(size=100), rng.normal(size=100)
    rows = binned_returns(values, returns, 5)
    assert [row["n"] for row in rows] == [20] * 5
    order = np.argsort(values)
    for i, row in enumerate(rows):
        mine = order[20 * i : 20 * i + 20]
        assert (row["low"], row["high"]) == (values[mine].min(), values[mine].max())
        assert (row["mean_value"], row["mean_return"]) == pytest.approx((values[mine].mean(), returns[mine].mean()))
    tied = binned_returns([1.0] * 9 + [2.0], list(range(10)), 5)
    assert [(row["mean_value"], row["n"], row["mean_return"]) for row in tied] == [(1.0, 9, 4.0), (2.0, 1, 9.0)]
    assert binned_returns([0.5], [1.0], 4) == [{"low": 0.5, "high": 0.5, "n": 1, "mean_value": 0.5, "mean_return": 1.0}]
    assert binned_returns([], [], 4) == []
    with pytest.raises(ValueError, match="bins >= 1"):
        binned_returns([0.5], [1.0], 0)
