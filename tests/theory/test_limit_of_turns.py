"""A limit of turns that scoring counts as a loss is learned as one only where it ends the episode.

One question, ten turns. In each the agent tries, which ends the episode and wins with chance .3, or waits, which looks
the same ever after. Never to try is no win. All 21 episodes are written down; values and gradients are the expected
ones of the project's own targets, advantages and loss, at ratio 1. Best: .3, by trying in time.

    truncated    the limit cuts the episode short, and V of the last state stands for what would have come
    terminated   the rollout ends it (task.at_limit), reward 0; the last state looks as the one before
    ended        the environment ends it, reward 0, as 20 Questions does, and says so
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor

from stages.learn.losses import turn_ppo_clip
from stages.learn.returns import AdvantageKind, advantages, state_mask, td_targets

Limit = Literal["truncated", "terminated", "ended"]

N, M, CHANCE, FIRST = 10, 11, 0.3, 0.1  # FIRST: how likely the untrained agent tries
OPEN, TRIED, OVER = range(3)  # what a value depends on: the verdict of a try does not show
KINDS: list[AdvantageKind] = ["td_mean", "td1", "gae", "mc"]


@dataclass(frozen=True)
class Episodes:
    """tries (I, N): whether turn k tries; rewards, nodes (I, M); n_turns, truncated, chance (I,): of the verdict alone."""

    tries: Tensor
    rewards: Tensor
    nodes: Tensor
    n_turns: Tensor
    truncated: Tensor
    chance: Tensor


def every_episode(limit: Limit) -> Episodes:
    """A try after 0 .. N - 1 waits, lost and won, and N waits."""
    found = Episodes(
        torch.zeros(2 * N + 1, N, dtype=torch.bool), torch.zeros(2 * N + 1, M, dtype=torch.float64), torch.full((2 * N + 1, M), OPEN),
        torch.full((2 * N + 1,), N), torch.zeros(2 * N + 1, dtype=torch.bool), torch.ones(2 * N + 1, dtype=torch.float64),
    )  # fmt: skip
    for waits in range(N):
        for won in (0, 1):
            i = 2 * waits + won
            found.tries[i, waits], found.n_turns[i] = True, waits + 1
            found.rewards[i, waits + 1], found.nodes[i, waits + 1] = won, TRIED
            found.chance[i] = CHANCE if won else 1 - CHANCE
    found.truncated[-1] = limit == "truncated"
    found.nodes[-1, N] = OVER if limit == "ended" else OPEN
    return found


def log_probs(e: Episodes, logit: Tensor) -> Tensor:
    """log pi(a_k), (I, N), 0 past the end."""
    each = torch.where(e.tries, torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit))
    return torch.where(torch.arange(N) < e.n_turns[:, None], each, torch.zeros_like(each))


def learned_values(e: Episodes, chance_I: Tensor, start_X: Tensor) -> Tensor:
    """V of every node where no target of TD(1) moves it any more, from `start_X`."""
    values_X, seen = start_X, state_mask(e.n_turns, e.truncated, M)
    weight = chance_I[:, None].expand(-1, M)[seen]
    total = torch.zeros(3, dtype=torch.float64).index_add(0, e.nodes[seen], weight)
    for _ in range(2000):
        targets = td_targets(e.rewards, values_X[e.nodes], e.n_turns, e.truncated, n=1, gamma=1.0)[seen]
        moved = torch.zeros(3, dtype=torch.float64).index_add(0, e.nodes[seen], weight * targets)
        new_X = torch.where(total > 0, moved / total.clamp(min=1e-300), values_X)
        if bool((new_X - values_X).abs().max() < 1e-12):
            break
        values_X = new_X
    return values_X


def win_rate(e: Episodes, logit: Tensor) -> float:
    """As scoring counts: what ran into the limit is no win, however it ended."""
    return float((e.chance * log_probs(e, logit).sum(1).exp() * e.rewards.sum(1)).sum())


def trained(limit: Limit, kind: AdvantageKind, steps: int = 300, lr: float = 1.0, *, known_end: bool = False) -> float:
    """The win rate after so many steps of the expected gradient, each with the values of its own policy."""
    e, logit, values_X = every_episode(limit), torch.tensor(FIRST, dtype=torch.float64).logit(), torch.zeros(3).double()
    real = torch.arange(N) < e.n_turns[:, None]
    for _ in range(steps):
        logit = logit.detach().requires_grad_(True)
        each = log_probs(e, logit)
        chance_I = (e.chance * each.sum(1).exp()).detach()
        values_X = learned_values(e, chance_I, values_X)
        found = advantages(
            kind, e.rewards, values_X[e.nodes], e.n_turns, e.truncated, gamma=1.0, lam=0.95, known_end=known_end
        )[:, :N]
        # A turn is one token; an episode counts by its chance, which is no part of the ratio.
        weighed = (found * chance_I[:, None])[real]
        turns = torch.arange(len(weighed))
        loss, _ = turn_ppo_clip(each[real], each[real].detach(), turns, weighed, clip=0.2, normaliser=1.0)
        logit = logit - lr * torch.autograd.grad(loss, logit)[0]
    return win_rate(e, logit.detach())


def test_the_chances_of_all_episodes_add_up_and_the_untrained_agent_wins_a_fifth() -> None:
    e, logit = every_episode("ended"), torch.tensor(FIRST, dtype=torch.float64).logit()
    assert float((e.chance * log_probs(e, logit).sum(1).exp()).sum()) == pytest.approx(1.0, abs=1e-12)
    assert (
        win_rate(e, logit)
        == pytest.approx(CHANCE * (1 - (1 - FIRST) ** N), abs=1e-12)
        == pytest.approx(0.195, abs=5e-4)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_that_cuts_short_teaches_nothing_about_waiting(kind: AdvantageKind) -> None:
    """V of waiting on is that of trying: every expected advantage is 0, and .195 stays .195."""
    assert trained("truncated", kind) == pytest.approx(0.195, abs=1e-3)


@pytest.mark.parametrize("known_end", [False, True])
@pytest.mark.parametrize("limit", ["terminated", "ended"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_that_ends_the_episode_is_learned_as_a_loss(kind: AdvantageKind, limit: Limit, known_end: bool) -> None:
    """Whether or not the last state shows that it is one."""
    assert trained(limit, kind, known_end=known_end) == pytest.approx(0.3, abs=2e-3)
