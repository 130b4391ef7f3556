"""The invariants of credit: rows as they are packed keep them, and every way in which one vector can be wrong breaks
one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import shadows
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.learn.credit import LostCredit, check_credit, returns_of
from stages.learn.episode_row import EpisodeIds, PackedRow, pack, unbroken
from stages.learn.returns import turn_mask

CRITIC = (90, 91, 92)
# Actions 2 3, 5 and 8 9 of episode "a", whose last observation is empty; 1 and 3 4 of "b".
A = EpisodeIds(
    (10, 11, 12, 13, 14, 15, 16, 17, 18, 19),
    (2, 5, 8),
    (3, 5, 9),
    ((-0.1, -0.2), (-0.3,), (-0.4, -0.5)),
    (0.5, 0.0, 0.0, 1.0),
    False,
    ("a",),
)
B = EpisodeIds((20, 21, 22, 23, 24, 25), (1, 3), (1, 4), ((-0.6,), (-0.7, -0.8)), (0.25, 2.0, 0.0), True, ("b",))
ADVANTAGES = torch.tensor([[1.0, 2.0, 3.0, 0.0], [4.0, 5.0, 0.0, 0.0]])
ROW = pack([A, B], CRITIC, max_positions=None)


def check(
    row: PackedRow = ROW,
    by_turn: Tensor | None = None,
    episodes: Sequence[EpisodeIds] = (A, B),
    by_state: Tensor = ADVANTAGES,
) -> None:
    told = ADVANTAGES[turn_mask(torch.tensor([3, 2]), 4)] if by_turn is None else by_turn
    check_credit(row, episodes, by_state, told, returns=[1.5, 2.25])


def put(x: Tensor, *pairs: tuple[int, float]) -> Tensor:
    found = x.clone()
    for i, value in pairs:
        found.view(-1)[i] = value
    return found


def only(row: PackedRow, chosen: Sequence[int]) -> PackedRow:
    """The row with these of its action tokens, in all vectors of action tokens."""
    names = ("target_positions", "source_positions", "turn_of_token", "old_log_probs")
    return replace(row, **{name: getattr(row, name)[list(chosen)] for name in names})


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 99), st.booleans()), min_size=1, max_size=4), st.integers(0, 2)
)
def test_credit_of_random_rows_is_right(kinds: list[tuple[int, int, bool]], soft_len: int) -> None:
    episodes = [shadows.make_episode(n, seed, truncated=truncated) for n, seed, truncated in kinds]
    row = pack(episodes, () if soft_len else CRITIC, max_positions=None, soft_len=soft_len)
    by_state = torch.randn(row.rewards.shape, generator=torch.Generator().manual_seed(0))
    by_turn = by_state[turn_mask(row.n_turns, row.rewards.shape[1])]
    check_credit(row, episodes, by_state, by_turn, returns=[sum(e.rewards) for e in episodes])


Change = Callable[[PackedRow], PackedRow]
WRONG: dict[str, tuple[Change, str]] = {
    "targets one later": (
        lambda r: replace(r, target_positions=r.target_positions + 1),
        r"episode a, turn 0, token 2 \(id 12\): wanted its turn's credit for the token of an action, found none",
    ),
    "targets one earlier": (
        lambda r: replace(r, target_positions=r.target_positions - 1),
        r"episode a, outside of its turns, token 1 \(id 11\): wanted no credit outside of an action, found that of episode a, turn 0",
    ),
    "a token dropped": (lambda r: only(r, [0, 2, 3, 4, 5, 6, 7]), r"episode a, turn 0, token 3 \(id 13\): .* found none; the row"),
    "the end of an action dropped": (lambda r: only(r, range(7)), r"episode b, turn 1, token 4 \(id 24\): .* found none; the row"),
    "only the first turns": (
        lambda r: only(r, [0, 1, 5]),
        r"episode a, turn 1, token 5 \(id 15\): .* found none, so credit is lost across the observation before it",
    ),
    "an episode without credit": (lambda r: only(r, range(5)), r"episode b, turn 0, token 1 \(id 21\): .* found none"),
    "turns that do not go on after an observation": (
        lambda r: replace(r, turn_of_token=put(r.turn_of_token, (2, 0))),
        r"episode a, turn 1, token 5 \(id 15\): .* found that of episode a, turn 0, so credit is lost across the observation",
    ),
    "turns one later": (
        lambda r: replace(r, turn_of_token=r.turn_of_token + 1),
        r"episode a, turn 0, token 2 \(id 12\): .* found that of episode a, turn 1; the row",
    ),
    "turns one earlier": (lambda r: replace(r, turn_of_token=r.turn_of_token - 1), r"episode a, turn 0, token 2 .* found that of no turn of the row"),
    "turns swapped across episodes": (
        lambda r: replace(r, turn_of_token=put(r.turn_of_token, (3, 3), (4, 3), (5, 2))),
        r"episode a, turn 2, token 8 \(id 18\): .* found that of episode b, turn 0",
    ),
    "an observation's token in place of an action's": (
        lambda r: replace(r, target_positions=put(r.target_positions, (1, 4))),
        r"episode a, turn 0, token 3 \(id 13\): .* found none",
    ),
    "a token twice": (
        lambda r: replace(r, target_positions=put(r.target_positions, (1, 2))),
        r"episode a, turn 0, token 2 \(id 12\): wanted the token of an action counted once, found it 2 times",
    ),
    "a token of a critic prompt": (
        lambda r: replace(only(r, [0, 1, 2, 3, 4, 5, 6, 7, 7]), target_positions=torch.cat([r.target_positions, r.value_positions[0, :1]])),
        r"episode a, outside of its turns, token 4 \(id 92\): wanted no credit outside of an action, found that of episode b, turn 1",
    ),
    "a place that the row does not have": (lambda r: replace(r, target_positions=r.target_positions + 99), "two places in a row of 37 tokens"),
    "one turn too few": (lambda r: replace(r, turn_of_token=r.turn_of_token[:-1]), r"found vectors \[\(8,\), \(8,\), \(7,\)\]"),
    "predicted by itself": (
        lambda r: replace(r, source_positions=r.target_positions),
        r"episode a, turn 0, token 2 \(id 12\): wanted it predicted by the visible token before it, found entry 2",
    ),
    "predicted by the end of the critic prompt": (
        lambda r: replace(r, source_positions=put(r.source_positions, (2, int(r.value_positions[0, 1])))),
        r"episode a, turn 1, token 5 \(id 15\): wanted it predicted by the visible token before it, found entry 21",
    ),
    "predicted by a token of the critic prompt that has the right position": (
        lambda r: replace(r, source_positions=put(r.source_positions, (1, int(r.value_positions[0, 0]) - len(CRITIC) + 1))),
        r"episode a, turn 0, token 3 \(id 13\): wanted it predicted by the visible token before it, found entry 16",
    ),
    "predicted by the other episode": (
        lambda r: replace(r, source_positions=put(r.source_positions, (5, 0))),
        r"episode b, turn 0, token 1 \(id 21\): wanted it predicted by the visible token before it, found entry 0",
    ),
    "another token": (lambda r: replace(r, tree=replace(r.tree, ids=put(r.ids, (2, 13)))), "every token of its episodes a, b once"),
    "a token missing": (lambda r: replace(r, shadow=put(r.shadow, (0, 1))), "every token of its episodes a, b once"),
    "the token of another episode": (lambda r: replace(r, episode=put(r.episode, (0, 1))), "every token of its episodes a, b once"),
    "turns of the other episode": (lambda r: replace(r, n_turns=r.n_turns.flip(0)), r"episodes of \[3, 2\] turns, found \[2, 3\]"),
    "a reward moved to the next turn": (lambda r: replace(r, rewards=put(r.rewards, (0, 0), (1, 0.5))), r"episode a, turn 0: wanted the reward 0.5, found 0;"),
    "a reward moved across episodes": (
        lambda r: replace(r, rewards=put(r.rewards, (3, 0), (6, 1))),
        r"episode a, turn 3: wanted the reward 1, found 0;",
    ),
    "a reward past the end": (lambda r: replace(r, rewards=put(r.rewards, (7, 1))), r"episode b, turn 3: wanted the reward 0, found 1;"),
}  # fmt: skip


def test_the_row_of_the_corruptions_is_right_without_them() -> None:
    check()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_vector_of_the_row_is_named_by_episode_turn_and_token(name: str) -> None:
    change, said = WRONG[name]
    with pytest.raises(LostCredit, match=said) as told:
        check(change(ROW))
    assert "\n" not in str(told.value)


def test_equal_advantages_do_not_hide_swapped_turns() -> None:
    swapped = replace(ROW, turn_of_token=put(ROW.turn_of_token, (0, 1), (1, 1), (2, 0)))
    with pytest.raises(LostCredit, match=r"episode a, turn 0, token 2"):
        check(swapped, torch.ones(5), by_state=torch.ones(2, 4))


def test_a_row_that_was_packed_from_wrong_ends_is_found_by_the_engines_log_probs() -> None:
    """Episode and row agree; only the number of log-probs tells that the action of turn 0 has two tokens and not three."""
    wrong = replace(A, action_end=(4, 5, 9))
    with pytest.raises(LostCredit, match=r"token 4 \(id 14\): wanted no credit outside of an action"):
        check(replace(pack([wrong, B], CRITIC, max_positions=None), old_log_probs=torch.zeros(9)), episodes=[wrong, B])


@pytest.mark.parametrize(
    ("by_turn", "said"),
    [
        (
            ADVANTAGES.T[turn_mask(torch.tensor([3, 2]), 4).T],
            r"episode a, turn 1, its first token 5: wanted the advantage 2, found 4",
        ),
        (
            torch.tensor([2.0, 3.0, 4.0, 5.0, 1.0]),
            "episode a, turn 0, its first token 2: wanted the advantage 1, found 2",
        ),
        (
            torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0]),
            "episode b, turn 0, its first token 1: wanted the advantage 4, found 1",
        ),
        (torch.tensor([2.0, 4.5]), r"shape \(5,\) and \(2, 4\), by turn, found \(2,\) and \(2, 4\)"),
        (
            torch.tensor([1.0, 2.0, 3.0, 4.0, torch.nan]),
            "episode b, turn 1, its first token 3: wanted the advantage 5, found nan",
        ),
    ],
    ids=["states before episodes", "shifted by one", "the first episode's for all", "one an episode", "nan"],
)
def test_advantages_that_are_not_those_of_the_turns_are_named(by_turn: Tensor, said: str) -> None:
    with pytest.raises(LostCredit, match=said):
        check(by_turn=by_turn)


def test_one_advantage_an_episode_is_no_table_by_turn() -> None:
    with pytest.raises(LostCredit, match=r"found \(5,\) and \(2, 1\)"):
        check(by_state=ADVANTAGES[:, :1])


def test_rewards_that_do_not_sum_to_the_return_are_named_though_row_and_episode_agree() -> None:
    poor = replace(A, rewards=(0.5, 0.0, 0.0, 0.0))
    with pytest.raises(
        LostCredit, match=r"episode a: wanted rewards over its turns that sum to its return 1.5, found 0.5"
    ):
        check(pack([poor, B], CRITIC, max_positions=None), episodes=[poor, B])


def test_a_row_that_begins_later_counts_turns_from_the_start_of_its_episode() -> None:
    later = replace(A, key=("a", 4))
    with pytest.raises(LostCredit, match=r"episode a, turn 5, token 5 .* found that of episode a, turn 4,"):
        check(replace(ROW, turn_of_token=put(ROW.turn_of_token, (2, 0))), episodes=[later, B])


def test_a_value_that_is_not_finite_is_left_to_the_training_loop() -> None:
    by_state = put(ADVANTAGES, (0, torch.nan))
    check(by_turn=by_state[turn_mask(torch.tensor([3, 2]), 4)], by_state=by_state)


def turn(prompt: list[int], action: list[int], reward: float) -> dict[str, Any]:
    return {"prompt_ids": prompt, "action_ids": action, "log_probs": [-0.5] * len(action), "reward": reward}


def test_a_row_that_breaks_twice_has_three_rows_whose_rewards_are_the_return_from_there_on() -> None:
    turns = [turn([5], [6], 0.5), turn([4], [3], 0.25), turn([4, 3], [2], 0.125), turn([7], [8], 1.0)]
    rows = unbroken(turns, [7, 8, 9], False, 0.5, ("e",))
    assert [e.key for e in rows] == [("e",), ("e", 1), ("e", 3)]
    # From the last row back: .5 x 1, as its reward is the terminal state's; .25 + .5 x .125 + .25 x .5; and so on.
    assert [sum(e.rewards) for e in rows] == [0.5 + 0.4375, 0.25 + 0.125 + 0.5, 1.0]
    assert returns_of(rows, 1.875, [0.5, 0.25, 0.125, 1.0], gamma=0.5) == [sum(e.rewards) for e in rows]
    whole = unbroken(turns, [7, 8, 9], False, 1.0, ("e",))
    assert returns_of(whole, 1.875, [0.5, 0.25, 0.125, 1.0], gamma=1.0) == [1.875, 1.375, 1.0]
