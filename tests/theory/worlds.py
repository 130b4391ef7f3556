"""Many small random MDPs at once, solved exactly, and sampled.

The miniature of NLAC (arXiv 2512.04601, section 5). Text is exact: taking a in s, an event e is seen with probability
phi(s, a)_e and pays w_e, so the reward is linear in features, r = phi(s, a)^T w. A future is a pair (event, when); a
critic M(. | s, a) is a distribution over them. The discount lies in the futures: M names what happens at turn t with
weight (1 - gamma) gamma^t, so its events, times 1 / (1 - gamma), are the successor features psi.

Axes: W worlds, S states, A actions, E events, H turns until the event. Exact solutions go over states by linear
solves and share no code with the backups that the tests repeat.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Worlds:
    """transition (W, S, A, S), phi (W, S, A, E), w (W, E); gamma per turn."""

    transition: Floats
    phi: Floats
    w: Floats
    gamma: float

    @property
    def reward(self) -> Floats:
        """Expected reward, (W, S, A)."""
        return np.asarray(np.einsum("wsae,we->wsa", self.phi, self.w))


def random_worlds(seed: int, n: int, family: str = "shared", *, gamma: float = 0.9) -> Worlds:
    """6 states, 3 actions; next states ~ Dirichlet(0.3), so that a few of them dominate; w ~ Normal(0, 1).

    family "shared": 5 events, each action's ~ Dirichlet(0.3), so that rewards are random too and many actions share
    them.
    family "own": every (s, a) has an event of its own, so that rewards are certain and psi is the discounted occupancy.
    """
    states, actions = 6, 3
    rng = np.random.default_rng(seed)
    transition = rng.dirichlet(np.full(states, 0.3), size=(n, states, actions))
    if family == "own":
        phi = np.broadcast_to(
            np.eye(states * actions).reshape(states, actions, -1), (n, states, actions, states * actions)
        )
    else:
        phi = rng.dirichlet(np.full(5, 0.3), size=(n, states, actions))
    return Worlds(transition, phi, rng.normal(size=(n, phi.shape[-1])), gamma)


def random_policies(seed: int, worlds: Worlds) -> Floats:
    """Stochastic policies, every action possible: (W, S, A) ~ Dirichlet(1)."""
    n, states, actions, _ = worlds.phi.shape
    return np.random.default_rng(seed).dirichlet(np.ones(actions), size=(n, states))


def deterministic(choice: Ints, actions: int) -> Floats:
    """Policies (..., S, A) that take choice (..., S)."""
    return np.asarray(np.eye(actions)[choice])


def exact_values(worlds: Worlds, policy: Floats) -> Floats:
    """V_pi = (I - gamma P_pi)^(-1) r_pi, (W, S): over states, by a linear solve."""
    p_pi = np.einsum("wsat,wsa->wst", worlds.transition, policy)
    r_pi = (policy * worlds.reward).sum(-1)
    system = np.eye(p_pi.shape[-1]) - worlds.gamma * p_pi
    return np.asarray(np.linalg.solve(system, r_pi[..., None])[..., 0])


def exact_q(worlds: Worlds, policy: Floats) -> Floats:
    """Q_pi = r + gamma P V_pi, (W, S, A)."""
    return lookahead(worlds, exact_values(worlds, policy))


def lookahead(worlds: Worlds, values: Floats) -> Floats:
    """r + gamma P V, (W, S, A)."""
    return np.asarray(worlds.reward + worlds.gamma * np.einsum("wsat,wt->wsa", worlds.transition, values))


def optimal_values(worlds: Worlds) -> Floats:
    """V*, (W, S), by value iteration to an error below 1e-12: shares nothing with policy iteration."""
    values = np.zeros(worlds.phi.shape[:2])
    while True:
        new = lookahead(worlds, values).max(-1)
        if np.abs(new - values).max() < 1e-12 * (1 - worlds.gamma):
            return np.asarray(new)
        values = new


def pair_chain(worlds: Worlds, policy: Floats) -> Floats:
    """P((s, a) -> (s', a')) with a' ~ policy: (W, SA, SA)."""
    n, s, a, _ = worlds.phi.shape
    return np.asarray(np.einsum("wsat,wtb->wsatb", worlds.transition, policy).reshape(n, s * a, s * a))


def exact_features(worlds: Worlds, policy: Floats) -> Floats:
    """psi_pi(s, a) = E sum_t gamma^t phi_t, (W, S, A, E): over pairs, by a linear solve."""
    n, s, a, e = worlds.phi.shape
    system = np.eye(s * a) - worlds.gamma * pair_chain(worlds, policy)
    return np.asarray(np.linalg.solve(system, worlds.phi.reshape(n, s * a, e)).reshape(n, s, a, e))


def backup_features(worlds: Worlds, policy: Floats, psi: Floats) -> Floats:
    """The successor-feature backup: (T psi)(s, a) = phi(s, a) + gamma E psi(s', a'), a' ~ policy. psi: (W, S, A, E)."""
    ahead = np.einsum("wsat,wtb,wtbe->wsae", worlds.transition, policy, psi, optimize=True)
    return np.asarray(worlds.phi + worlds.gamma * ahead)


def backup_futures(worlds: Worlds, policy: Floats, futures: Floats) -> Floats:
    """The language Bellman backup on distributions of futures, (W, S, A, E, H).

    combine(s, a, e, s', f'): with weight 1 - gamma the immediate "e, now", with weight gamma "f', one turn later".
    What would lie H or more turns ahead is dropped: gamma^H of the mass.
    """
    ahead = np.einsum("wsat,wtb,wtbeh->wsaeh", worlds.transition, policy, futures[..., :-1], optimize=True)
    new = np.empty_like(futures)
    new[..., 0] = (1 - worlds.gamma) * worlds.phi
    new[..., 1:] = worlds.gamma * ahead
    return new


def read_value(worlds: Worlds, futures: Floats) -> Floats:
    """w^T psi from a distribution of futures: mean of w_e / (1 - gamma). (W, S, A, E, H) -> (W, S, A)."""
    return np.asarray(np.einsum("wsaeh,we->wsa", futures, worlds.w) / (1 - worlds.gamma))


def return_variance(worlds: Worlds, policy: Floats) -> Floats:
    """Variance of the discounted return from (s, a), following the policy: (W, S, A).

    Sobel 1982:  X(s, a) = Var[w_e] + gamma^2 (Var[Q(s', a')] + E[X(s', a')]), solved over pairs.
    """
    n, s, a, _ = worlds.phi.shape
    q = exact_q(worlds, policy).reshape(n, s * a, 1)
    chain = pair_chain(worlds, policy)
    var_event = np.einsum("wsae,we->wsa", worlds.phi, worlds.w**2) - worlds.reward**2
    var_ahead = (chain @ q**2 - (chain @ q) ** 2)[..., 0]
    noise = var_event.reshape(n, s * a) + worlds.gamma**2 * var_ahead
    solved = np.linalg.solve(np.eye(s * a) - worlds.gamma**2 * chain, noise[..., None])
    return np.maximum(solved.reshape(n, s, a), 0.0)  # rounding may leave -1e-16 where nothing is random


class Sampler:
    """Draws (event, next state) of many worlds by one binary search a step.

    Row i of the flat table holds the cumulative chances of (world, state, action) i, shifted by i: the cell of i + u is
    the outcome.
    """

    def __init__(self, worlds: Worlds) -> None:
        self.worlds = worlds
        n, s, a, e = worlds.phi.shape
        joint = np.einsum("wsae,wsat->wsaet", worlds.phi, worlds.transition).reshape(n * s * a, e * s)
        cumulative = np.cumsum(joint, axis=1)
        cumulative /= cumulative[:, -1:]
        self._flat = (cumulative + np.arange(n * s * a)[:, None]).ravel()

    def step(self, rng: np.random.Generator, world: Ints, state: Ints, action: Ints) -> tuple[Ints, Ints]:
        """(event, next state) of each of B rows."""
        _, s, a, e = self.worlds.phi.shape
        row = (world * s + state) * a + action
        cell = np.searchsorted(self._flat, row + rng.random(row.size), side="right") - row * (e * s)
        cell = np.clip(cell, 0, e * s - 1)  # u within 1e-12 of a row's end may fall into its neighbour
        return cell // s, cell % s

    def returns(
        self, rng: np.random.Generator, choice: Ints, world: Ints, state: Ints, action: Ints, turns: int = 44
    ) -> Floats:
        """Discounted return of each of B rollouts: `action` first, then the deterministic policy choice (W, S).

        Cut after `turns`: gamma^44 = 0.01 of a value is not seen.
        """
        total = np.zeros(world.size)
        for t in range(turns):
            event, state = self.step(rng, world, state, action)
            total += self.worlds.gamma**t * self.worlds.w[world, event]
            action = choice[world, state]
        return total
