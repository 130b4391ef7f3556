"""Targets, advantages and the value loss against loops over single episodes that share no code with them, and against
identities.

The loops follow the definitions with Python floats: a target is a walk from state k that adds rewards until it
bootstraps or the episode is over. Everything is float64, so that 1e-12 is rounding and nothing else.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.learn.returns import (
    KINDS,
    AdvantageKind,
    advantages,
    batch_deviation,
    gae,
    group_turn_advantages,
    monte_carlo,
    state_mask,
    td_mean_targets,
    td_targets,
    turn_mask,
    value_loss,
)

GAMMA = 0.9
Rows = tuple[Tensor, Tensor, Tensor, Tensor]


def make_rows(lengths: list[int], truncated: list[bool], m: int, seed: int = 0) -> Rows:
    """Random rows; padding holds NaN and infinity, which must never be read."""
    rng = random.Random(seed)
    rewards, values = torch.full((len(lengths), m), math.nan).double(), torch.full((len(lengths), m), math.inf).double()
    for i, n in enumerate(lengths):
        rewards[i, : n + 1] = torch.tensor([rng.uniform(-1, 1) for _ in range(n + 1)], dtype=torch.float64)
        values[i, : n + 1] = torch.tensor([rng.uniform(-1, 1) for _ in range(n + 1)], dtype=torch.float64)
        if truncated[i]:
            rewards[i, n] = 0.0
    return rewards, values, torch.tensor(lengths), torch.tensor(truncated)


LENGTHS, CUT = [1, 1, 2, 3, 4, 7, 7, 9], [False, True, True, False, True, False, True, False]
ROWS = R, V, N, T = make_rows(LENGTHS, CUT, 11)
PLAIN = make_rows(LENGTHS, [False] * 8, 10)


def slow_target(r: list[float], v: list[float], last: int, cut: bool, k: int, n: int) -> float:
    total, factor = 0.0, 1.0
    for _ in range(n):
        if cut and k == last:
            break
        if k > last:
            return total
        total += factor * r[k]
        factor *= GAMMA
        k += 1
    return total + factor * v[k] if k <= last else total


def slow_table(rows: Rows, n: int) -> list[list[float]]:
    """target_n of every state with a target, by row."""
    rewards, values, n_turns, truncated = (x.tolist() for x in rows)
    return [
        [slow_target(r, v, last, cut, k, n) for k in range(last if cut else last + 1)]
        for r, v, last, cut in zip(rewards, values, n_turns, truncated, strict=True)
    ]


def assert_rows(found: Tensor, expected: list[list[float]]) -> None:
    """Equal where there is something, 0 everywhere else."""
    for row, wanted in zip(found.tolist(), expected, strict=True):
        assert row == pytest.approx([*wanted, *[0.0] * (len(row) - len(wanted))], abs=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 9, 10, 11, 1000])
def test_td_targets_equal_a_walk_along_each_episode(n: int) -> None:
    assert_rows(td_targets(*ROWS, n=n, gamma=GAMMA), slow_table(ROWS, n))


def test_td_mean_targets_equal_the_mean_of_the_walks() -> None:
    tables = [slow_table(ROWS, n) for n in range(1, 6)]
    expected = [[sum(by_n) / 5 for by_n in zip(*by_table, strict=True)] for by_table in zip(*tables, strict=True)]
    assert_rows(td_mean_targets(*ROWS, gamma=GAMMA), expected)
    assert torch.equal(td_mean_targets(*ROWS, gamma=GAMMA, n_max=1), td_targets(*ROWS, n=1, gamma=GAMMA))


def test_targets_of_a_table_made_by_hand() -> None:
    """Two turns, gamma 1/2, V = 10, 20, 40, rewards 1, 2, 4; truncated: 0 at the end, and V_2 stands for it."""
    rewards, values = torch.tensor([[1.0, 2, 4], [1, 2, 0]]), torch.tensor([[10.0, 20, 40], [10, 20, 40]])
    rows = (rewards, values, torch.tensor([2, 2]), torch.tensor([False, True]))
    assert td_targets(*rows, n=1, gamma=0.5).tolist() == [[11, 22, 4], [11, 22, 0]]
    assert td_targets(*rows, n=2, gamma=0.5).tolist() == [[12, 4, 4], [12, 22, 0]]
    assert td_targets(*rows, n=3, gamma=0.5).tolist() == [[3, 4, 4], [12, 22, 0]]
    assert gae(*rows, gamma=0.5, lam=0.5).tolist() == [[1 + 2 / 4 - 36 / 16, 2 - 36 / 4, 0], [1 + 2 / 4, 2, 0]]
    assert advantages("td1", *rows, gamma=0.5).tolist() == [[1, 2, 0], [1, 2, 0]]
    assert advantages("td1", *rows, gamma=0.5, known_end=True).tolist() == [[1, 4 - 20, 0], [1, 2, 0]]


def test_target_past_the_end_is_the_return() -> None:
    """R_k = r_k + gamma R_{k+1}, R_N = r_N: backward, whereas the walks go forward. It holds whatever the values are."""
    expected = []
    for row, last in zip(PLAIN[0].tolist(), LENGTHS, strict=True):
        returns = [row[last]]
        for reward in row[last - 1 :: -1]:
            returns.insert(0, reward + GAMMA * returns[0])
        expected.append(returns)
    assert_rows(td_targets(*PLAIN, n=10, gamma=GAMMA), expected)
    assert_rows(monte_carlo(*PLAIN, gamma=GAMMA), expected)
    assert_rows(monte_carlo(PLAIN[0], torch.full_like(PLAIN[1], math.nan), *PLAIN[2:], gamma=GAMMA), expected)


def test_a_truncated_row_bootstraps_from_its_last_value_and_a_terminated_one_does_not() -> None:
    """d target / d V_N of the Monte-Carlo target: gamma^(N-k) where truncated, 0 where terminated."""
    moved = V.scatter_add(1, N[:, None], torch.ones_like(V))
    change = monte_carlo(R, moved, N, T, gamma=GAMMA) - monte_carlo(*ROWS, gamma=GAMMA)
    assert_rows(
        change, [[GAMMA ** (n - k) for k in range(n)] if cut else [] for n, cut in zip(LENGTHS, CUT, strict=True)]
    )


def test_masks_are_the_states_with_a_target_and_the_turns() -> None:
    n_turns, truncated = torch.tensor([1, 3, 3]), torch.tensor([False, False, True])
    assert state_mask(n_turns, truncated, 5).int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]
    assert turn_mask(n_turns, 5).int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_gae_equals_the_mean_of_targets_that_its_paper_writes(lam: float) -> None:
    """(1 - lam) sum_n lam^(n-1) target_n(k) - V_k, arXiv 1506.02438 eq. 16; the return has the rest of the weights."""
    tables, weights = [slow_table(ROWS, n) for n in range(1, 12)], [*((1 - lam) * lam**n for n in range(10)), lam**10]
    values = V.tolist()
    expected = [
        [sum(w * table[i][k] for w, table in zip(weights, tables, strict=True)) - values[i][k] for k in range(n)]
        for i, n in enumerate(LENGTHS)
    ]
    assert_rows(gae(*ROWS, gamma=GAMMA, lam=lam), expected)


def test_gae_of_1_is_return_minus_value_and_gae_of_0_is_the_td_error() -> None:
    for rows in (ROWS, PLAIN):
        assert torch.allclose(gae(*rows, lam=1.0, gamma=GAMMA), advantages("mc", *rows, gamma=GAMMA), atol=1e-12)
        assert torch.allclose(gae(*rows, lam=0.0, gamma=GAMMA), advantages("td1", *rows, gamma=GAMMA), atol=1e-12)
        assert torch.equal(gae(*rows, lam=0.7, gamma=GAMMA), advantages("gae", *rows, lam=0.7, gamma=GAMMA))


@pytest.mark.parametrize(("kind", "steps"), [("td1", [1]), ("td_mean", [1, 2, 3, 4, 5]), ("mc", [99])])
def test_advantages_are_targets_minus_values_on_turns_only(kind: Any, steps: list[int]) -> None:
    """Of every turn; the terminal state has a target and no turn."""
    tables = [slow_table(ROWS, n) for n in steps]
    expected = [
        [sum(table[i][k] for table in tables) / len(steps) - float(V[i, k]) for k in range(last)]
        for i, last in enumerate(LENGTHS)
    ]
    assert_rows(advantages(kind, *ROWS, gamma=GAMMA), expected)


COEFFICIENTS: dict[AdvantageKind, list[float]] = {
    "td1": [1.0],
    "td_mean": [1.0, 0.8, 0.6, 0.4, 0.2],
    "gae": [0.7**n for n in range(11)],
    "mc": [1.0] * 11,
}
"""c_l: 1 alone, (5 - l) / 5, lambda^l, 1."""


@pytest.mark.parametrize("known_end", [False, True])
@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_every_estimator_is_one_sum_of_td_errors_and_they_differ_in_its_coefficients(
    kind: AdvantageKind, known_end: bool
) -> None:
    """A_k = sum_l gamma^l c_l delta_{k+l}, delta_j = r_j + gamma V_{j+1} - V_j, and delta_N = r_N - V_N where the row is
    terminated, 0 where V_N is r_N or stands for the rest.
    """
    expected = []
    for rewards, values, last, cut in zip(R.tolist(), V.tolist(), LENGTHS, CUT, strict=True):
        v = [*values[:last], rewards[last] if known_end and not cut else values[last]]
        delta = [rewards[j] + GAMMA * v[j + 1] - v[j] for j in range(last)] + [0.0 if cut else rewards[last] - v[last]]
        ahead = [
            [c * GAMMA**n * d for n, (c, d) in enumerate(zip(COEFFICIENTS[kind], delta[k:], strict=False))]
            for k in range(last)
        ]
        expected.append([sum(terms) for terms in ahead])
    assert_rows(advantages(kind, *ROWS, gamma=GAMMA, lam=0.7, known_end=known_end), expected)


@pytest.mark.parametrize(
    ("kind", "by_reward", "by_value"),
    [
        ("td_mean", [0.4, 0.6, 0.8, 1.0], [0.2, 0.4, 0.6, 0.8]),
        ("gae", [0.7**3, 0.7**2, 0.7, 1.0], [0.7**4, 0.7**3, 0.7**2, 0.7]),
        ("mc", [1.0] * 4, [1.0] * 4),
    ],
)
def test_while_v_is_flat_a_turn_hears_of_the_end_by_the_targets_that_reach_it(
    kind: AdvantageKind, by_reward: list[float], by_value: list[float]
) -> None:
    """Four turns, won, V = 0: the first one has 2/5 of the last one's advantage with `known_end`, and 1/4 without it."""
    rewards, values = torch.tensor([[0.0, 0, 0, 0, 1]]), torch.zeros(1, 5)
    for known_end, expected in ((True, by_reward), (False, by_value)):
        rows = (rewards, values, torch.tensor([4]), torch.tensor([False]))
        found = advantages(kind, *rows, gamma=1.0, lam=0.7, known_end=known_end)
        assert found[0].tolist() == pytest.approx([*expected, 0.0], abs=1e-6)


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_divided_by_their_deviation_advantages_do_not_know_the_unit_of_reward(kind: AdvantageKind) -> None:
    """Rewards and values times 10, as of a task that pays in another coin: so one price on divergence is one price."""

    def divided(unit: float) -> Tensor:
        found = advantages(kind, unit * R, unit * V, N, T, gamma=GAMMA)[turn_mask(N, 11)]
        return found / batch_deviation(found)

    one = divided(1.0)
    assert torch.allclose(divided(10.0), one, atol=1e-12)
    mean = sum(one.tolist()) / len(one)
    assert sum((x - mean) ** 2 for x in one.tolist()) / len(one) == pytest.approx(1.0, abs=1e-12)
    assert abs(mean) > 0.01  # nothing was subtracted


def test_advantages_that_are_all_alike_are_divided_by_1() -> None:
    for alike in (torch.full((7,), 0.1), torch.zeros(3), torch.tensor([0.4])):
        assert batch_deviation(alike) == 1.0


def test_group_advantages_are_one_number_for_all_turns_of_an_episode() -> None:
    groups = torch.tensor([7, 3, 7, 3, 3, 7, 9, 9])
    totals = [
        sum(GAMMA**k * r for k, r in enumerate(row[: last + 1])) for row, last in zip(R.tolist(), LENGTHS, strict=True)
    ]
    expected = []
    for i, last in enumerate(LENGTHS):
        members = [totals[j] for j in range(8) if groups[j] == groups[i]]
        mean = sum(members) / len(members)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in members) / len(members))
        expected.append([(totals[i] - mean) / (deviation + 1e-6)] * last)
    assert_rows(group_turn_advantages(R, N, T, groups, gamma=GAMMA), expected)
    assert_rows(advantages("group", R, V * math.nan, N, T, gamma=GAMMA, groups=groups), expected)


def test_in_an_episode_of_one_turn_all_say_what_it_earned_once_the_end_is_known() -> None:
    """r_0 + gamma r_1 - V_0. Else V_1 is r_1 one turn ahead: all of td1, a fifth of td_mean, 1 - lam of gae."""
    rewards, values = torch.tensor([[0.5, 1.0]]).double(), torch.tensor([[0.2, 0.4]]).double()
    rows = (rewards, values, torch.tensor([1]), torch.tensor([False]))
    earned, guessed = 0.5 + GAMMA * 1.0 - 0.2, 0.5 + GAMMA * 0.4 - 0.2
    shares: dict[AdvantageKind, float] = {"td_mean": 0.2, "td1": 1.0, "gae": 0.3, "mc": 0.0}
    for kind, share in shares.items():
        assert advantages(kind, *rows, gamma=GAMMA, lam=0.7, known_end=True)[0].tolist() == pytest.approx([earned, 0.0])
        expected = share * guessed + (1 - share) * earned
        assert advantages(kind, *rows, gamma=GAMMA, lam=0.7)[0].tolist() == pytest.approx([expected, 0.0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_known_end_is_the_value_of_the_terminal_state_and_of_no_truncated_one(kind: Any) -> None:
    ends = V.clone()
    for i, last in enumerate(LENGTHS):
        ends[i, last] = V[i, last] if CUT[i] else R[i, last]
    groups = torch.tensor([0, 0, 1, 1, 0, 1, 0, 1])
    found = advantages(kind, *ROWS, gamma=GAMMA, known_end=True, groups=groups)
    assert torch.equal(found, advantages(kind, R, ends, N, T, gamma=GAMMA, groups=groups))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_row_order_change_nothing(kind: Any) -> None:
    groups, order = torch.tensor([0, 0, 1, 1, 0, 1, 0, 1]), torch.tensor([3, 0, 7, 1, 6, 2, 5, 4])
    before = advantages(kind, *ROWS, gamma=GAMMA, groups=groups)
    wider = make_rows(LENGTHS, CUT, 20)
    shuffled: Any = [x[order] for x in wider]
    after = advantages(kind, *shuffled, gamma=GAMMA, groups=groups[order])
    assert torch.allclose(after[:, :11], before[order], atol=1e-12)
    assert not after[:, 11:].any()
    if kind != "group":
        alone: Any = [x[5:6] for x in ROWS]
        assert torch.equal(advantages(kind, *alone, gamma=GAMMA), before[5:6])


def test_value_loss_and_its_gradient_equal_a_loop() -> None:
    values, twin = V.clone().requires_grad_(True), V.clone().requires_grad_(True)
    loss, metrics = value_loss(values, R, N, T, gamma=GAMMA)
    by_n = []
    for n in range(1, 6):  # the targets are numbers, so that only V_k itself has a gradient
        errors = [
            (twin[i, k] - target) ** 2 for i, row in enumerate(slow_table(ROWS, n)) for k, target in enumerate(row)
        ]
        by_n.append(torch.stack(errors).sum() / len(errors))
    slow = torch.stack(by_n).mean()
    assert float(loss.detach()) == pytest.approx(float(slow.detach()), abs=1e-12)
    assert [metrics[f"value_loss/n{n}"] for n in range(1, 6)] == pytest.approx(
        [float(x.detach()) for x in by_n], abs=1e-12
    )
    found, expected = torch.autograd.grad(loss, values)[0], torch.autograd.grad(slow, twin)[0]
    assert torch.allclose(found, expected, atol=1e-12)
    assert float(found.abs().max()) > 0.01
    assert not found[~state_mask(N, T, 11)].any()


def test_targets_and_advantages_carry_no_gradient() -> None:
    rows = (R.clone().requires_grad_(True), V.clone().requires_grad_(True), N, T)
    groups = torch.zeros(8, dtype=torch.long)
    found = [advantages(kind, *rows, gamma=GAMMA, groups=groups) for kind in KINDS]
    assert not any(
        x.requires_grad for x in [*found, td_targets(*rows, n=2, gamma=GAMMA), td_mean_targets(*rows, gamma=GAMMA)]
    )


def test_losses_of_parts_with_the_step_s_normaliser_add_up_to_the_loss_of_all() -> None:
    whole, _ = value_loss(V, R, N, T, gamma=GAMMA)
    states = float(state_mask(N, T, 11).sum())
    cuts = [slice(0, 3), slice(3, 8)]
    parts = [value_loss(V[c], R[c], N[c], T[c], gamma=GAMMA, normaliser=states)[0] for c in cuts]
    assert float(sum(parts)) == pytest.approx(float(whole), abs=1e-12)


def test_a_known_end_changes_the_targets_before_it_and_not_its_own_loss() -> None:
    """V_1 = 0.4 where r_1 = 1: state 0 is drawn to gamma instead of 0.4 gamma by n = 1, state 1 to 1 in both cases."""
    rewards, n_turns, truncated = torch.tensor([[0.0, 1.0]]), torch.tensor([1]), torch.tensor([False])
    for known_end, ahead in ((False, 0.4), (True, 1.0)):
        values = torch.tensor([[0.2, 0.4]], requires_grad=True)
        loss, _ = value_loss(values, rewards, n_turns, truncated, gamma=GAMMA, n_max=1, known_end=known_end)
        assert torch.autograd.grad(loss, values)[0][0].tolist() == pytest.approx([0.2 - GAMMA * ahead, 0.4 - 1.0])


WRONG = [
    ((R, V[:, :-1], N, T), "of shape"),
    ((R, V, N[:-1], T), "of shape"),
    ((R[0], V[0], N, T), "of shape"),
    ((R, V, N.float(), T), "must be long"),
    ((R, V, N, T.long()), "must be long"),
    ((torch.where(torch.arange(11) == 1, math.nan, R), V, N, T), "must be finite"),
    ((R, V, N, ~T), "reward 0"),
    ((R, V, N - 1, T), "1 to 10 turns"),
    ((R, V, N + 9, T), "1 to 10 turns"),
]


@pytest.mark.parametrize(("rows", "message"), WRONG)
def test_wrong_rows_are_refused_by_every_function(rows: Rows, message: str) -> None:
    groups = torch.zeros(8, dtype=torch.long)
    for kind in KINDS:
        with pytest.raises(ValueError, match=message):
            advantages(kind, *rows, gamma=GAMMA, groups=groups)
    with pytest.raises(ValueError, match=message):
        value_loss(rows[1], rows[0], *rows[2:], gamma=GAMMA)
    with pytest.raises(ValueError, match=message):
        td_mean_targets(*rows, gamma=GAMMA)


def test_wrong_arguments_are_refused() -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda: td_targets(*ROWS, n=0, gamma=GAMMA), "n must be >= 1"),
        (lambda: value_loss(V, R, N, T, gamma=GAMMA, n_max=0), "n must be >= 1"),
        (lambda: value_loss(V, R, N, T, gamma=GAMMA, normaliser=0.0), "normaliser must be > 0"),
        (lambda: td_targets(*ROWS, n=1, gamma=1.1), "gamma must be"),
        (lambda: gae(*ROWS, gamma=GAMMA, lam=-0.1), "lam must be"),
        (lambda: advantages("group", *ROWS, gamma=GAMMA), "group id"),
        (lambda: advantages("group", *ROWS, gamma=GAMMA, groups=torch.arange(7)), "one group id a row"),
        (lambda: advantages("group", *ROWS, gamma=GAMMA, groups=torch.arange(8)), "at least two returns"),
        (lambda: advantages("gea", *ROWS, gamma=GAMMA), "advantage must be"),  # type: ignore[arg-type]
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()
