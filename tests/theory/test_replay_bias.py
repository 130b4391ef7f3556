"""What the replay does to the fixed point: stored next actions (SARSA bias), and priorities without importance weights."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stages.learn.priorities import importance_weights, priorities, sample_without_replacement

from .worlds import Floats, Ints, Sampler, Worlds, deterministic, exact_q, pair_chain, random_policies, random_worlds

SEEDS = [0, 1, 2]
RESTART = 0.1  # chance that an episode ends and the next one starts in a uniform state


def _visits(worlds: Worlds, policy: Floats) -> Floats:
    """Long-run share of the states under a policy with restarts: (W, S)."""
    s = policy.shape[1]
    chain = (1 - RESTART) * np.einsum("wsat,wsa->wst", worlds.transition, policy) + RESTART / s
    share = np.full((len(chain), 1, s), 1 / s)
    for _ in range(400):  # contracts by 0.9 at least: 0.9^400 = 5e-19
        share = share @ chain
    return share[:, 0]


def _fixed_point(worlds: Worlds, ahead: Floats) -> Floats:
    """Q = r + gamma A Q over pairs, `ahead` (W, SA, SA) = P((s', a') | s, a) as the targets see it."""
    n, s, a, _ = worlds.phi.shape
    solved = np.linalg.solve(np.eye(s * a) - worlds.gamma * ahead, worlds.reward.reshape(n, s * a, 1))
    return np.asarray(solved.reshape(n, s, a))


def _stored_chain(worlds: Worlds, behaviours: list[Floats]) -> Floats:
    """P((s', a') | s, a) in a replay of several policies' episodes, a' as stored.

    Who was acting is known a little from (s, a): a' ~ sum_j P(j | s, a) mu_j(a' | s'), P(j | s, a) ~ visits_j(s) mu_j(a
    | s).
    """
    n, s, a, _ = worlds.phi.shape
    weights = np.stack([_visits(worlds, mu)[..., None] * mu for mu in behaviours])
    weights /= weights.sum(0)
    ahead = sum(
        np.einsum("wsa,wsat,wtb->wsatb", p, worlds.transition, mu) for p, mu in zip(weights, behaviours, strict=True)
    )
    return np.asarray(ahead).reshape(n, s * a, s * a)


def _mixture(worlds: Worlds, behaviours: list[Floats]) -> Floats:
    """The one policy that acts in each state as the replay does on average."""
    weights = np.stack([_visits(worlds, mu)[..., None] for mu in behaviours])
    return np.asarray(sum(w * mu for w, mu in zip(weights, behaviours, strict=True)) / weights.sum(0))


def _misordered(estimate: Floats, q: Floats) -> Floats:
    """Share of the action pairs in the wrong order, one a world."""
    first, second = [0, 0, 1], [1, 2, 2]
    agree = np.sign(estimate[..., first] - estimate[..., second]) * np.sign(q[..., first] - q[..., second])
    return np.asarray((0.5 * (1 - agree)).mean((1, 2)))


def _better_policy(worlds: Worlds, behaviours: list[Floats]) -> Floats:
    """The policy to be evaluated: the mixture's greedy refinement, so newer and better than what filled the replay."""
    q = exact_q(worlds, _mixture(worlds, behaviours))
    return deterministic(q.argmax(-1), q.shape[-1])


def _z(per_world: Floats) -> float:
    return float(per_world.mean() / per_world.std(ddof=1) * math.sqrt(len(per_world)))


@pytest.mark.parametrize("seed", SEEDS)
def test_stored_next_actions_evaluate_who_acted_not_the_current_policy(seed: int) -> None:
    """Fixed points of the backup on a replay of two old policies, exact, 100 worlds, the current policy being better
    than both.
    Fresh a': Q_pi itself (1e-10). Stored a': 4.2 too low on average (root mean square 4.6), 0.10 of the action pairs
    misordered.
    With one old policy stored a' gives exactly that policy's Q. With two it is close to the Q of their mixture, but not
    equal to it (root mean square 0.08, largest difference above 0.01 in every world): a pair tells a little about who
    was acting.
    """
    worlds = random_worlds(seed, 100)
    behaviours = [random_policies(seed + 10, worlds), random_policies(seed + 20, worlds)]
    policy = _better_policy(worlds, behaviours)
    q = exact_q(worlds, policy)
    assert np.abs(_fixed_point(worlds, pair_chain(worlds, policy)) - q).max() < 1e-10
    stored = _fixed_point(worlds, _stored_chain(worlds, behaviours))
    mixture = exact_q(worlds, _mixture(worlds, behaviours))
    # The current policy is greedy for the mixture, so its Q is above the mixture's everywhere: the bias has a sign.
    assert np.all(q >= mixture - 1e-10)
    assert _z((q - stored).mean((1, 2))) > 5
    assert _z(_misordered(stored, q)) > 5
    apart = np.abs(stored - mixture).max((1, 2))
    assert np.all(apart < np.abs(stored - q).max((1, 2)))
    assert np.all(apart > 1e-6)
    one = _fixed_point(worlds, _stored_chain(worlds, behaviours[:1]))
    assert np.abs(one - exact_q(worlds, behaviours[0])).max() < 1e-10


def _sampled_fixed_points(seed: int, worlds: Worlds, behaviours: list[Floats], policy: Floats) -> tuple[Floats, Floats]:
    """The fixed points of TD on one sampled replay a world, stored and fresh a', rewards known: (W, S, A) each.

    Episodes of both policies, 10 at once of 400 turns; TD on fixed rows ends where the rows' own averages put it.
    """
    rng, sampler = np.random.default_rng(seed), Sampler(worlds)
    n, s, a, _ = worlds.phi.shape
    stored, fresh = np.zeros((2, n, s * a, s * a))
    world = np.repeat(np.arange(n), 10)

    def act(mu: Floats, state: Ints) -> Ints:
        return np.asarray((rng.random(world.size)[:, None] > mu[world, state].cumsum(1)[:, :-1]).sum(1))

    for mu in behaviours:
        state = rng.integers(0, s, world.size)
        action = act(mu, state)
        for _ in range(400):
            _, after = sampler.step(rng, world, state, action)
            following = act(mu, after)
            np.add.at(stored, (world, state * a + action, after * a + following), 1.0)
            np.add.at(fresh, (world, state * a + action, after * a + act(policy, after)), 1.0)
            again = rng.random(world.size) < RESTART
            state = np.where(again, rng.integers(0, s, world.size), after)
            action = np.where(again, act(mu, state), following)
    points = [_fixed_point(worlds, counts / counts.sum(-1, keepdims=True)) for counts in (stored, fresh)]
    return points[0], points[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_sampled_replays_show_the_bias_that_was_computed(seed: int) -> None:
    """3 worlds, 40 replays of 8000 transitions each: mean over pairs of the sampled fixed point minus the computed one
    is 0 within 5 standard errors, for stored and fresh a'. Stored against Q_pi, where the bias would be absent: above
    20 standard errors.
    """
    one = random_worlds(seed, 3)
    worlds = Worlds(
        np.repeat(one.transition, 40, axis=0), np.repeat(one.phi, 40, axis=0), np.repeat(one.w, 40, axis=0), one.gamma
    )
    # A tenth of each action at least, so that every pair is seen.
    behaviours = [np.repeat(0.7 * random_policies(seed + x, one) + 0.1, 40, axis=0) for x in (10, 20)]
    policy = _better_policy(worlds, behaviours)
    q, expected = exact_q(worlds, policy), _fixed_point(worlds, _stored_chain(worlds, behaviours))
    stored, fresh = _sampled_fixed_points(seed + 30, worlds, behaviours, policy)

    def z(difference: Floats) -> Floats:
        """Of each world, over its replays."""
        per_replay = difference.mean((1, 2)).reshape(3, 40)
        return np.asarray(per_replay.mean(1) / per_replay.std(1, ddof=1) * math.sqrt(40))

    assert np.all(np.abs(z(stored - expected)) < 5)
    assert np.all(np.abs(z(fresh - q)) < 5)
    assert np.all(z(q - stored) > 20)


def _fixed_probability(truth: float, alpha: float, eps: float) -> float:
    """Prioritised rows without weights end at q / (1 - q) = odds(truth) (l(q) / l(1 - q))^alpha, l = eps - log."""
    low, high = 1e-9, 1 - 1e-9
    for _ in range(100):
        q = (low + high) / 2
        preference = ((eps - math.log(q)) / (eps - math.log(1 - q))) ** alpha
        low, high = (q, high) if q / (1 - q) < truth / (1 - truth) * preference else (low, q)
    return q


@pytest.mark.parametrize("truth", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_priorities_without_weights_make_rare_outcomes_look_likely(seed: int, truth: float) -> None:
    """One situation, two outcomes, a replay of 4000 rows of which `truth` won; a batch of 32 by p ~ (NLL + 0.01)^0.6,
    fresh NLL of the drawn rows back as their losses. Predicted chance to win:
        truth            0.02    0.1     0.5
        without weights  0.105   0.233   0.5        (the root of its own equation)
        weights, beta 1  0.02    0.1     0.5        (uniform batches: the same)
    within 5 standard errors, and the share n max(p) by which a row's chance to be in a batch of n falls short of n p.
    """
    alpha, eps, rate = 0.6, 0.01, 0.01
    won = np.arange(4000) < truth * 4000
    for beta, expected in ((0.0, _fixed_probability(truth, alpha, eps)), (1.0, truth)):
        rng = np.random.default_rng(seed)
        losses, predicted, history = np.full(4000, np.nan), 0.5, []
        for _ in range(2000):
            p = priorities(losses, alpha, eps)
            rows = sample_without_replacement(rng, p, 32)
            losses[rows] = -np.log(np.where(won[rows], predicted, 1 - predicted))
            weights = importance_weights(p, rows, beta)
            predicted += rate * float((weights * (won[rows] - predicted)).mean())
            history.append(predicted)
        late = np.array(history[1000:]).reshape(10, -1).mean(1)
        tolerance = 5 * late.std(ddof=1) / math.sqrt(10) + 32 * priorities(losses, alpha, eps).max() * expected
        assert abs(late.mean() - expected) < tolerance < 0.04
