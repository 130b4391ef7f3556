"""Theorem 5.1, the critic: repeated language Bellman backups reach the successor features, whoever starts them."""

from __future__ import annotations

import numpy as np
import pytest

from .worlds import (
    Floats,
    Worlds,
    backup_features,
    backup_futures,
    exact_features,
    exact_q,
    pair_chain,
    random_policies,
    random_worlds,
    read_value,
)

SEEDS = [0, 1, 2]
FAMILIES = ["own", "shared"]


def _max(x: Floats) -> Floats:
    """Largest absolute entry of each world."""
    return np.asarray(np.abs(x).reshape(len(x), -1).max(1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_repeated_backups_reach_the_successor_features(family: str, seed: int) -> None:
    """300 backups from random tables, 100 worlds: at most gamma^n of the first error at every n, so 2e-14 of it at the
    end (rounding: 1e-12). Without backups the error is that of the start: 4 to 5 on average, above 2 in every world.
    """
    worlds = random_worlds(seed, 100, family)
    policy = random_policies(seed + 10, worlds)
    psi = exact_features(worlds, policy)
    learnt = np.random.default_rng(seed + 20).normal(size=psi.shape)
    start = _max(learnt - psi)
    assert start.min() > 2
    for n in range(1, 301):
        learnt = backup_features(worlds, policy, learnt)
        assert np.all(_max(learnt - psi) <= worlds.gamma**n * start + 1e-12)
    assert _max(learnt - psi).max() < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_features_times_w_are_q(family: str, seed: int) -> None:
    """w^T psi, psi by backups from 0, equals Q_pi by a solve over states, to 1e-10 in 100 worlds.
    After one backup instead of 400 the mean error is that of seeing only the immediate: gamma |P V|, above 1."""
    worlds = random_worlds(seed, 100, family)
    policy = random_policies(seed + 10, worlds)
    q = exact_q(worlds, policy)
    learnt = backup_features(worlds, policy, np.zeros_like(worlds.phi))
    assert np.abs(np.einsum("wsae,we->wsa", learnt, worlds.w) - q).mean() > 1
    for _ in range(399):
        learnt = backup_features(worlds, policy, learnt)
    assert np.abs(np.einsum("wsae,we->wsa", learnt, worlds.w) - q).max() < 1e-10


def _law_of_futures(worlds: Worlds, policy: Floats, turns: int) -> Floats:
    """(1 - gamma) gamma^t P(event e at turn t | s, a), forward in time by powers of the chain: (W, S, A, E, H)."""
    n, s, a, e = worlds.phi.shape
    chain, at = pair_chain(worlds, policy), np.broadcast_to(np.eye(s * a), (n, s * a, s * a))
    events, law = worlds.phi.reshape(n, s * a, e), np.empty((n, s * a, e, turns))
    for t in range(turns):
        law[..., t] = (1 - worlds.gamma) * worlds.gamma**t * (at @ events)
        at = at @ chain
    return law.reshape(n, s, a, e, turns)


@pytest.mark.parametrize("seed", SEEDS)
def test_futures_become_the_true_law_of_what_happens_and_when(seed: int) -> None:
    """300 backups from "event 0, now" everywhere reach the law that is computed forward in time (H = 300 turns, 1e-13 a
    cell); its value is Q_pi to 1e-10; "when" is geometric. Before: the total variation distance is above 0.5 in every
    world.
    """
    worlds = random_worlds(seed, 8)
    policy = random_policies(seed + 10, worlds)
    law = _law_of_futures(worlds, policy, turns=300)
    futures = np.zeros_like(law)
    futures[..., 0, 0] = 1.0
    assert (0.5 * np.abs(futures - law).sum((-1, -2))).max((1, 2)).min() > 0.5
    for _ in range(300):
        futures = backup_futures(worlds, policy, futures)
    assert np.abs(futures - law).max() < 1e-13
    assert np.abs(read_value(worlds, futures) - exact_q(worlds, policy)).max() < 1e-10
    geometric = (1 - worlds.gamma) * worlds.gamma ** np.arange(300)
    assert np.abs(futures.sum(-2) - geometric).max() < 1e-13


@pytest.mark.parametrize("seed", SEEDS)
def test_the_backup_contracts_by_gamma_and_no_faster(seed: int) -> None:
    """Two critics come closer by gamma or more in the largest difference, and by exactly gamma where they differ by a
    constant.
    Random pairs: about 0.5 on average, since the mean over s', a' cancels; without the discount a constant would stay
    (ratio 1).
    """
    worlds = random_worlds(seed, 200)
    policy = random_policies(seed + 10, worlds)
    first, second = np.random.default_rng(seed).normal(size=(2, *worlds.phi.shape))

    def ratio(x: Floats, y: Floats) -> Floats:
        return _max(backup_features(worlds, policy, x) - backup_features(worlds, policy, y)) / _max(x - y)

    assert np.all(ratio(first, second) <= worlds.gamma + 1e-12)
    assert np.allclose(ratio(first, first + 1.0), worlds.gamma, rtol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_futures_contract_by_gamma_in_total_variation(seed: int) -> None:
    """At most gamma for random critics, exactly gamma for two that always say different things."""
    worlds = random_worlds(seed, 50)
    policy = random_policies(seed + 10, worlds)
    n, s, a, e = worlds.phi.shape
    rng = np.random.default_rng(seed)
    first, second = rng.dirichlet(np.ones(e * 10), size=(2, n, s, a)).reshape(2, n, s, a, e, 10)
    first[..., -1] = second[..., -1] = 0.0  # nothing at the horizon, or the cut would add to the contraction

    def ratio(x: Floats, y: Floats) -> Floats:
        after = backup_futures(worlds, policy, x) - backup_futures(worlds, policy, y)
        return np.asarray(np.abs(after).sum((-1, -2)).max((1, 2)) / np.abs(x - y).sum((-1, -2)).max((1, 2)))

    assert np.all(ratio(first, second) <= worlds.gamma + 1e-12)
    always_0, always_1 = np.zeros_like(first), np.zeros_like(first)
    always_0[..., 0, 0] = always_1[..., 1, 0] = 1.0
    assert np.allclose(ratio(always_0, always_1), worlds.gamma, rtol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_action_that_the_data_lack_is_never_learnt_and_spoils_the_rest(seed: int) -> None:
    """ "Data everywhere" is needed: one action of state 0 is never backed up. Its row stays at the start (0), and pairs
    that lead to it converge to wrong values: largest error at another pair 1.2 (median), never 0. With all data: below
    1e-12 (above).
    """
    worlds = random_worlds(seed, 100)
    policy = random_policies(seed + 10, worlds)
    psi = exact_features(worlds, policy)
    learnt = np.zeros_like(psi)
    for _ in range(300):
        learnt = backup_features(worlds, policy, learnt)
        learnt[:, 0, 0] = 0.0
    error = np.abs(learnt - psi).max(-1)
    assert np.all(learnt[:, 0, 0] == 0.0)
    elsewhere = np.delete(error.reshape(len(error), -1), 0, axis=1).max(1)
    assert np.all(elsewhere > 1e-6)
