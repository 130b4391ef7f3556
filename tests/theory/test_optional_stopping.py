"""Which advantages and normalisations are unbiased where the agent decides when to stop, on the MDP of stopping.py.

Expected gradients are those of the project's own loss at ratio 1, summed over all episodes, or over all pairs of them.
The bias of what is biased is predicted by another road, over nodes and without episodes, and must be met to 1e-10.
Sizes are |mean gradient - exact gradient| / |exact gradient|; the angle between the two is what no learning rate mends.
`python -m benchmarks.evidence.optional_stopping` prints them all.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stages.learn.returns import AdvantageKind

from .stopping import (
    GO,
    LAM,
    LOGITS,
    MOVE,
    PAY,
    STOP,
    WIN,
    Episodes,
    H,
    Normalisation,
    S,
    advantages_of,
    angle_deg,
    episode_gradients,
    every_episode,
    exact_values,
    expected_gradient,
    policy_gradient,
    probabilities,
    relative_error,
    sampled_group_gradient,
    spread,
    turn_normalised_gradient,
    wrong_values,
)

EPISODES = every_episode()
EXACT = policy_gradient(EPISODES)
VALUES = exact_values(LOGITS)
POLICY = LOGITS.softmax(1)
BOOTSTRAPPED: list[AdvantageKind] = ["td_mean", "td1", "gae"]
FROM_VALUES: list[AdvantageKind] = [*BOOTSTRAPPED, "mc"]


def gradients(kind: AdvantageKind, values: Tensor, known_end: bool = False, episodes: Episodes = EPISODES) -> Tensor:
    """g_i of every episode, (I, S, 2)."""
    everyone = torch.arange(len(episodes.n_turns))
    return episode_gradients(episodes, advantages_of(episodes, everyone, kind, values, 1.0, everyone, known_end))


def ahead(error: Tensor, k: int, s: int, action: int, n: int) -> float:
    """E[error of the node n turns after (s, action) of turn k], 0 past the end."""
    if action == STOP:
        return float(error[(H + 1) * S + s]) if n == 1 else 0.0
    if n == 1:
        return float(MOVE[s] @ error[(k + 1) * S : (k + 2) * S])
    if k + 1 == H:
        return 0.0
    after = [sum(float(POLICY[t, a]) * ahead(error, k + 1, t, a, n - 1) for a in (STOP, GO)) for t in range(S)]
    return float(MOVE[s] @ torch.tensor(after, dtype=torch.float64))


def along(weight: Tensor) -> Tensor:
    """sum_k E[weight(k, s_k, a_k) dlog pi(a_k | s_k) / dlogits] by being in s after k turns. weight: (H, S, 2)."""
    here, total = torch.eye(S, dtype=torch.float64)[0], torch.zeros_like(LOGITS)
    for k in range(H):
        both = here[:, None] * POLICY * weight[k]
        total += both - both.sum(1, keepdim=True) * POLICY
        here = (here * POLICY[:, GO]) @ MOVE
    return total


def bootstrap_bias(kind: AdvantageKind, error: Tensor) -> Tensor:
    """What values off by `error` (X,) add to the gradient: only the one n turns ahead depends on the action."""
    shares = {"td1": [1.0], "td_mean": [0.2] * 5, "gae": [(1 - LAM) * LAM**n for n in range(H + 1)]}[kind]
    by_n = [
        [[[share * ahead(error, k, s, a, n) for a in (STOP, GO)] for s in range(S)] for k in range(H)]
        for n, share in enumerate(shares, 1)
    ]
    return along(torch.tensor(by_n, dtype=torch.float64).sum(0))


def test_the_episodes_are_all_that_can_happen_and_their_gradient_is_the_backward_recursion_s() -> None:
    """53 episodes of 1 to 3 turns; J and its gradient by V of the first node, gamma 1 and 0.9."""
    chance = probabilities(EPISODES, LOGITS)
    assert (len(chance), sorted(set(EPISODES.n_turns.tolist()))) == (53, [1, 2, 3])
    assert float(chance.sum()) == pytest.approx(1.0, abs=1e-12)
    assert float(chance @ EPISODES.rewards.sum(1)) == pytest.approx(float(VALUES[0]), abs=1e-12)
    for gamma in (1.0, 0.9):
        logits = LOGITS.clone().requires_grad_(True)
        (by_values,) = torch.autograd.grad(exact_values(logits, gamma)[0], logits)
        assert relative_error(policy_gradient(EPISODES, gamma), by_values) < 1e-10


@pytest.mark.parametrize("kind", FROM_VALUES)
def test_a_sum_over_turns_per_episode_is_unbiased_for_every_advantage_with_exact_values(kind: AdvantageKind) -> None:
    """Direction and size. Without the last term of GAE, or with r_N dropped, this would fail."""
    for known_end in (False, True):
        assert relative_error(expected_gradient(EPISODES, kind, VALUES, known_end=known_end), EXACT) < 1e-10


def test_mc_is_unbiased_with_any_values() -> None:
    assert relative_error(expected_gradient(EPISODES, "mc", wrong_values()), EXACT) < 1e-10


@pytest.mark.parametrize(
    ("kind", "by_value", "by_reward"),
    [("td1", (3.34, 134), (1.55, 88)), ("td_mean", (0.97, 67), (0.36, 20)), ("gae", (0.47, 25), (0.18, 9))],
)
def test_wrong_values_bias_what_bootstraps_by_their_error_ahead(
    kind: AdvantageKind, by_value: tuple[float, float], by_reward: tuple[float, float]
) -> None:
    """Size and angle with values that know nothing, predicted from their error n turns ahead:
    V_N at the end    td1 3.34, 134 degrees    td_mean 0.97, 67    gae(0.9) 0.47, 25
    r_N at the end    td1 1.55,  88 degrees    td_mean 0.36, 20    gae(0.9) 0.18,  9"""
    for known_end, (size, angle) in ((False, by_value), (True, by_reward)):
        error = wrong_values() - VALUES
        if known_end:
            error[H * S :] = 0.0  # the terminal nodes, where r_N is V_N on average
        found = expected_gradient(EPISODES, kind, wrong_values(), known_end=known_end)
        predicted = EXACT + bootstrap_bias(kind, error)
        assert relative_error(found, predicted) < 1e-10
        assert relative_error(found, EXACT) == pytest.approx(size, abs=0.005)
        assert angle_deg(found, EXACT) == pytest.approx(angle, abs=0.5)


def test_with_exact_values_the_value_of_the_end_has_less_variance_than_its_reward() -> None:
    """Standard deviation of one episode's gradient, exact gradient = 1:
    V_N    td1 2.39    td_mean 3.52    gae 3.86    mc 4.22
    r_N    td1 3.33    td_mean 3.88    gae 4.04    mc 4.22"""
    found = {
        end: [spread(EPISODES, gradients(kind, VALUES, end)) / float(EXACT.norm()) for kind in FROM_VALUES]
        for end in (False, True)
    }
    assert found[False] == pytest.approx([3.52, 2.39, 3.86, 4.22], abs=0.005)
    assert found[True] == pytest.approx([3.88, 3.33, 4.04, 4.22], abs=0.005)


@pytest.mark.parametrize(
    ("count", "normalisation", "size", "angle"),
    [(1, "turn, one episode", 0.495, 24), (2, "turn, two episodes", 0.477, 13)],
)
def test_a_mean_over_turns_is_biased_with_exact_values(
    count: int, normalisation: Normalisation, size: float, angle: float
) -> None:
    """td_mean, 24 degrees off within an episode and 13 in a batch of two. The bias is size E[g_1 / (N_1 + n)] - exact,
    by convolution.

    The size has a harmless part, the number of turns it divides by; the angle has not."""
    found = expected_gradient(EPISODES, "td_mean", VALUES, normalisation)
    assert relative_error(found, turn_normalised_gradient(EPISODES, gradients("td_mean", VALUES), count)) < 1e-10
    assert relative_error(found, EXACT) == pytest.approx(size, abs=0.001)
    assert angle_deg(found, EXACT) == pytest.approx(angle, abs=0.5)


def test_the_direction_of_a_mean_over_turns_is_mended_by_large_batches_and_worst_with_wrong_values() -> None:
    """Degrees off in batches of 1, 2, 8, 64 episodes, mc:  exact values 24, 14, 3.3, 0.4;  wrong values 38, 28, 9.9,
    1.4.

    So a baseline, harmless in a sum, is not in a mean over turns: how many turns there are depends on the action."""
    for values, expected in ((VALUES, [24.1, 13.5, 3.35, 0.41]), (wrong_values(), [37.6, 27.8, 9.93, 1.39])):
        its = gradients("mc", values)
        found = [turn_normalised_gradient(EPISODES, its, size) for size in (1, 2, 8, 64)]
        assert [angle_deg(x, EXACT) for x in found] == pytest.approx(expected, abs=0.06)
        mean_turns = float(probabilities(EPISODES, LOGITS) @ EPISODES.n_turns.double())
        assert relative_error(found[-1] * mean_turns, EXACT) < 0.04


def test_group_advantage_of_two_climbs_the_rank_not_the_return() -> None:
    """Divided by its deviation an advantage of two is +-1, whatever the difference: 53 degrees from the gradient of the
    return.

    Predicted: the gradient of E[P(R' < R) - P(R' > R)], R' of another episode drawn from the fixed policy."""
    found = expected_gradient(EPISODES, "group", VALUES)
    chance, returns = probabilities(EPISODES, LOGITS), (EPISODES.rewards.sum(1) * 1e6).round()
    rank = (torch.sign(returns[:, None] - returns) * chance).sum(1)
    logits = LOGITS.clone().requires_grad_(True)
    (climbed,) = torch.autograd.grad(probabilities(EPISODES, logits) @ rank, logits)
    assert relative_error(found, climbed) < 1e-4  # the advantage is 1 / (1 + eps / std), eps = 1e-6, std 0.05 at least
    assert angle_deg(found, EXACT) == pytest.approx(53, abs=0.5)
    assert relative_error(found, EXACT) == pytest.approx(0.863, abs=0.001)


def test_larger_groups_of_one_start_bring_the_direction_back() -> None:
    """Degrees off, sampled: groups of 2 53 (as computed), of 8 4, of 64 below 1.5. With one start state; several have
    each their own deviation.
    """
    angles = [
        angle_deg(sampled_group_gradient(EPISODES, size, 1_000_000 // size, seed=0), EXACT) for size in (2, 8, 64)
    ]
    assert angles[0] == pytest.approx(53, abs=1.5)
    assert angles[1] == pytest.approx(4, abs=1.5)
    assert angles[2] < 1.5


def test_token_and_turn_ratios_are_unbiased_and_turn_mean_is_not() -> None:
    """`turn_mean` halves the gradient of "go", two tokens, and not of "stop": 0.29 and 7 degrees off with exact values,
    1.42 and 20 with wrong ones, predicted by (Q - V) / |a|. A baseline is no longer harmless.
    """
    lengths = torch.tensor([1.0, 2.0], dtype=torch.float64)
    stay = torch.stack([WIN.expand(H, S), torch.stack([MOVE @ VALUES[(k + 1) * S : (k + 2) * S] for k in range(H)])], 2)
    paid = torch.stack([PAY * (k > 0) for k in range(H)])
    for values, size, angle in ((VALUES, 0.288, 7), (wrong_values(), 1.418, 20)):
        for ratio in ("turn", "token"):
            assert relative_error(expected_gradient(EPISODES, "mc", values, ratio=ratio), EXACT) < 1e-10
        found = expected_gradient(EPISODES, "mc", values, ratio="turn_mean")
        advantage = (stay + paid[:, :, None] - values[: H * S].reshape(H, S, 1)) / lengths
        assert relative_error(found, along(advantage)) < 1e-10
        assert relative_error(found, EXACT) == pytest.approx(size, abs=0.002)
        assert angle_deg(found, EXACT) == pytest.approx(angle, abs=0.5)


def test_discounting_is_a_bias_unless_turn_k_weighs_gamma_to_the_k() -> None:
    """gamma 0.9, exact values, td_mean: 0.13 and 4 degrees from the gradient of the discounted return, 0.21 and 8 from
    that of the total reward. With every advantage times gamma^k it is the first, to 1e-10.
    """
    values, discounted = exact_values(LOGITS, 0.9), policy_gradient(EPISODES, 0.9)
    found = expected_gradient(EPISODES, "td_mean", values, gamma=0.9)
    assert (relative_error(found, discounted), angle_deg(found, discounted)) == pytest.approx((0.126, 4.09), abs=0.005)
    assert (relative_error(found, EXACT), angle_deg(found, EXACT)) == pytest.approx((0.211, 8.14), abs=0.005)
    weighed = expected_gradient(EPISODES, "td_mean", values, gamma=0.9, discount_turns=True)
    assert relative_error(weighed, discounted) < 1e-10
