"""Theorem 5.2: with an exact critic, refinement is policy iteration; with one that is still learning it arrives too,
not monotonically.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from stages.learn.statistics import wilson

from .worlds import (
    Floats,
    Ints,
    Worlds,
    backup_features,
    deterministic,
    exact_q,
    exact_values,
    optimal_values,
    random_worlds,
)

SEEDS = [0, 1, 2]
FAMILIES = ["own", "shared"]


def _critic(worlds: Worlds, policy: Floats, psi: Floats, backups: int) -> Floats:
    for _ in range(backups):
        psi = backup_features(worlds, policy, psi)
    return psi


def _refine(worlds: Worlds, psi: Floats, choice: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """(refined actions, verdicts): "yes", and the action kept, where none reads better; else the best reading."""
    reads = np.einsum("wsae,we->wsa", psi, worlds.w)
    own = np.take_along_axis(reads, choice[..., None], -1)[..., 0]
    yes = own >= reads.max(-1) - 1e-9
    return np.where(yes, choice, reads.argmax(-1)), yes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_refinement_on_an_exact_critic_is_policy_iteration_and_reaches_the_optimum(family: str, seed: int) -> None:
    """60 worlds from random policies: the same policies as Howard's iteration with linear solves, round by round;
    values never fall; V* of value iteration to 1e-8 once every verdict is yes: after 2 rounds on average, 4 at most.
    Without refinement the mean gap to V* stays about 9 (own) or 5 (shared).
    """
    worlds = random_worlds(seed, 60, family)
    n, s, a, _ = worlds.phi.shape
    choice = np.random.default_rng(seed + 10).integers(0, a, (n, s))
    howard, best = choice, optimal_values(worlds)
    values = exact_values(worlds, deterministic(choice, a))
    assert (best - values).mean() > 3
    rounds = np.zeros(n)
    for _ in range(8):
        psi = _critic(worlds, deterministic(choice, a), np.zeros_like(worlds.phi), 300)
        choice, yes = _refine(worlds, psi, choice)
        q = exact_q(worlds, deterministic(howard, a))
        kept = np.take_along_axis(q, howard[..., None], -1)[..., 0] >= q.max(-1) - 1e-9
        howard = np.where(kept, howard, q.argmax(-1))
        assert np.array_equal(choice, howard)
        new = exact_values(worlds, deterministic(choice, a))
        assert np.all(new >= values - 1e-10)
        values = new
        done = yes.all(1)
        assert np.all(np.abs(best - values)[done] < 1e-8)  # a verdict counts a lead below 1e-9 as none
        rounds += ~done
    assert np.abs(best - values).max() < 1e-8


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_refinement_on_an_unfinished_critic_reaches_the_optimum_but_values_can_fall(family: str, seed: int) -> None:
    """m backups before each refinement, the critic kept from round to round. m = 1 is value iteration: the error of w^T
    psi is at most gamma^n of the first at every round, and the policy is optimal in the end. On the way its value falls
    somewhere in 20 % of 200 worlds with m = 1, 2 % with 3, 0.5 % or fewer with 10. "Monotone" needs the finished critic
    (0 %, above).
    """
    worlds = random_worlds(seed, 200, family)
    n, s, a, _ = worlds.phi.shape
    best = optimal_values(worlds)
    best_q = worlds.reward + worlds.gamma * np.einsum("wsat,wt->wsa", worlds.transition, best)
    fell = {}
    for backups in (1, 3, 10):
        choice, psi, first = np.zeros((n, s), dtype=np.int64), np.zeros_like(worlds.phi), np.zeros(n)
        values, worst = exact_values(worlds, deterministic(choice, a)), np.zeros(n)
        for i in range(300 // backups + 30):
            if backups == 1 and i > 0:  # after the first refinement each backup maximises over a'
                reads = np.einsum("wsae,we->wsa", psi, worlds.w)
                assert np.all(np.abs(reads - best_q).max((1, 2)) <= worlds.gamma ** (i - 1) * first + 1e-10)
            psi = _critic(worlds, deterministic(choice, a), psi, backups)
            if i == 0:
                first = np.abs(np.einsum("wsae,we->wsa", psi, worlds.w) - best_q).max((1, 2))
            choice, _ = _refine(worlds, psi, choice)
            new = exact_values(worlds, deterministic(choice, a))
            worst, values = np.maximum(worst, (values - new).max(1)), new
        assert np.abs(best - values).max() < 1e-6
        fell[backups] = int((worst > 1e-6).sum())
    assert wilson(fell[1], n)[0] > wilson(fell[10], n)[1]
