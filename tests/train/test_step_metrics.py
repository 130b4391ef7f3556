"""The variances of a Self-AC step are those over all of its states, however its rows came."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.learn.returns import monte_carlo
from stages.learn.value_use import explained_variance
from stages.train import step_metrics

REWARDS = torch.tensor([[0.0, 0.5, 1.0], [0.0, 0.25, -1.0], [0.125, 0.0, 0.0]])
N_TURNS, TRUNCATED = torch.full((3,), 2), torch.tensor([False, False, True])


def of_step(values: Tensor, rewards: Tensor, parts: list[list[int]]) -> dict[str, float]:
    """Of the episodes in these rows; of losses and advantages there is nothing that matters here."""
    rest = {"value_loss": 0.0, "actor_loss": 0.0, "tokens": 0.0, "advantage_mean": 0.0, "advantage_square": 0.0}
    found: list[dict[str, float]] = []
    for rows in parts:
        row: Any = SimpleNamespace(rewards=rewards[rows], n_turns=N_TURNS[rows], truncated=TRUNCATED[rows])
        row.on_host = row
        found.append({**step_metrics.moments(values[rows], row, gamma=1.0), **rest})
    return step_metrics.of_step(found)


@pytest.mark.parametrize("parts", [[[0], [1], [2]], [[0, 1, 2]], [[2, 0], [1]]])
def test_explained_variance_is_1_for_the_returns_0_for_their_mean_and_left_out_where_nothing_varies(
    parts: list[list[int]],
) -> None:
    returns = monte_carlo(REWARDS, torch.zeros(3, 3), N_TURNS, TRUNCATED, gamma=1.0)
    mean = torch.full_like(returns, float(returns[:2].mean()))
    for values, expected in ((returns, 1.0), (mean, 0.0), (mean + 5, 0.0), (-returns, -3.0)):
        assert of_step(values, REWARDS, parts)["explained_variance"] == pytest.approx(expected, abs=1e-6)
    assert "explained_variance" not in of_step(mean, torch.zeros(3, 3), parts)
    assert "explained_variance" not in of_step(mean, REWARDS, [[2]])  # that of a cut episode is unknown


def test_explained_variance_is_that_of_value_use() -> None:
    values = torch.tensor([[0.1, -0.7, 0.3], [0.9, 0.2, -0.4], [9.0, 9.0, 9.0]])
    returns = monte_carlo(REWARDS, values, N_TURNS, TRUNCATED, gamma=1.0)[:2]
    wanted = explained_variance(values[:2].flatten().numpy(), returns.flatten().numpy())
    assert of_step(values, REWARDS, [[0, 2], [1]])["explained_variance"] == pytest.approx(wanted, abs=1e-6)
