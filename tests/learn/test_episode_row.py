"""Episodes from their turns, the packed row's indices against a walk over its tokens, and how episodes are shared out
over rows.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import shadows
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.frame.types import TurnwiseError
from stages.learn.episode_row import (
    BadEpisode,
    EpisodeTooLong,
    NotAPrefix,
    PackedRow,
    bins,
    episode_ids,
    n_tokens,
    pack,
    padding_share,
)

CRITIC = (90, 91, 92)
KEY = ("run", "e1")


def turn(prompt: list[int], action: list[int], reward: float = 0.0, **changes: Any) -> dict[str, Any]:
    return {"prompt_ids": prompt, "action_ids": action, "log_probs": [-0.5] * len(action), "reward": reward} | changes


def two_turns(**changes: Any) -> list[dict[str, Any]]:
    """sp up = 1 2, a_0 = 3 4, o_0 = 5, a_1 = 6; the changes go to the second turn."""
    return [turn([1, 2], [3, 4], 0.25), turn([1, 2, 3, 4, 5], [6], 1.0) | changes]


def test_an_episode_carries_the_ids_and_log_probs_of_its_turns() -> None:
    turns = two_turns(log_probs=[-1.25])
    e = episode_ids(turns, [1, 2, 3, 4, 5, 6, 7], truncated=False, key=KEY)
    assert e.ids == (1, 2, 3, 4, 5, 6, 7) and e.key == KEY and e.n_turns == 2
    assert (e.action_start, e.action_end) == ((2, 5), (3, 5))
    assert [e.ids[s : t + 1] for s, t in zip(e.action_start, e.action_end, strict=True)] == [(3, 4), (6,)]
    assert e.prefixes == (2, 5, 7)
    assert e.old_log_probs == ((-0.5, -0.5), (-1.25,))


def test_the_last_turns_reward_is_the_terminal_states_unless_the_episode_was_cut_short() -> None:
    ids = [1, 2, 3, 4, 5, 6]
    assert episode_ids(two_turns(), ids, truncated=False).rewards == (0.25, 0.0, 1.0)
    assert episode_ids(two_turns(), ids, truncated=True).rewards == (0.25, 1.0, 0.0)
    assert episode_ids(two_turns()[:1], ids[:4], truncated=False).rewards == (0.0, 0.25)


FINE = [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ([], "episode run/e1: wanted at least one turn, found none; leave"),
        (
            two_turns(action_ids=[], log_probs=[]),
            "turn 1: the action has no token. Have the engine",
        ),
        (
            two_turns(log_probs=None),
            "turn 1: the action has 1 tokens and needs as many log-probs, found none. Collect with an engine",
        ),
        (
            two_turns(log_probs=[]),
            "turn 1: the action has 1 tokens and needs as many log-probs, found none. Collect with an engine",
        ),
        (
            two_turns(log_probs=[-1.0, -1.0]),
            "turn 1: the action has 1 tokens and needs as many log-probs, found 2. Collect with an engine",
        ),
        (two_turns(log_probs=[math.nan]), "turn 1: log-probs must be finite, found nan. "),
        (two_turns(log_probs=[-math.inf]), "turn 1: log-probs must be finite, found -inf. "),
        (two_turns(log_probs=[None]), "turn 1: log-probs must be finite, found None. "),
        (two_turns(reward=math.nan), "turn 1: the reward must be finite, found nan. Fix"),
        (two_turns(reward=math.inf), "turn 1: the reward must be finite, found inf. Fix"),
        (two_turns(reward=None), "turn 1: the reward must be finite, found None. Fix"),
        ([turn([], [3])], "turn 0: the prompt has no token. "),
    ],
)
def test_what_cannot_be_trained_on_is_told_in_one_sentence(turns: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(BadEpisode) as caught:
        episode_ids(turns, FINE, truncated=False, key=KEY)
    assert said in str(caught.value) and "episode run/e1" in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, TurnwiseError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("second", "final", "at", "position"),
    [
        ([1, 2, 3, 9, 5], FINE, 0, 3),  # the action was rewritten
        ([8, 2, 3, 4, 5], FINE, 0, 0),  # the prompt was
        ([1, 2, 3], FINE, 0, 3),  # shorter than what came before
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 7], 1, 5),  # the last action is not in the final state
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 1, 5),
    ],
)
def test_a_state_that_does_not_carry_on_the_one_before_names_turn_and_position(
    second: list[int], final: list[int], at: int, position: int
) -> None:
    with pytest.raises(
        NotAPrefix, match=f"episode run/e1, turn {at}: .* differs from position {position} on. .* as separate rows"
    ) as caught:
        episode_ids(two_turns(prompt_ids=second), final, truncated=False, key=KEY)
    assert (caught.value.turn, caught.value.position) == (at, position)


def walk(packed: PackedRow) -> list[tuple[int, int, int, int]]:
    """(episode, shadow, position, id) of every token of a row."""
    columns = (packed.episode, packed.shadow, packed.position_ids, packed.ids)
    return list(zip(*(c.tolist() for c in columns), strict=True))


@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.integers(1, 5), min_size=1, max_size=4), critic_len=st.integers(1, 4), seed=st.integers(0, 99))
def test_a_row_holds_each_token_once_where_its_indices_say(turns: list[int], critic_len: int, seed: int) -> None:
    episodes = [shadows.make_episode(n, seed + i, truncated=i % 2 == 1) for i, n in enumerate(turns)]
    critic = tuple(range(100, 100 + critic_len))
    packed = pack(episodes, critic, max_positions=None)
    tokens = walk(packed)
    n_visible = sum(len(e.ids) for e in episodes)
    assert tokens[:n_visible] == [(b, 0, t, token) for b, e in enumerate(episodes) for t, token in enumerate(e.ids)]
    wanted = [
        (b, k + 1, p + i, token)
        for b, e in enumerate(episodes)
        for k, p in enumerate(e.prefixes)
        for i, token in enumerate(critic)
    ]
    assert tokens[n_visible:] == wanted
    sees = packed.tree.branch_prefix.repeat_interleave(packed.tree.branch_length)
    assert sees.tolist() == [p for e in episodes for p in e.prefixes for _ in critic]
    for b, e in enumerate(episodes):
        for k, position in enumerate(packed.value_positions[b].tolist()):
            assert (
                position == -1
                if k > e.n_turns
                else tokens[position] == (b, k + 1, e.prefixes[k] + critic_len - 1, critic[-1])
            )
        assert packed.rewards[b, : e.n_turns + 1].tolist() == pytest.approx(e.rewards)
        assert packed.rewards[b, e.n_turns + 1 :].eq(0).all()
    assert packed.n_turns.tolist() == turns
    assert packed.truncated.tolist() == [e.truncated for e in episodes]


@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_an_action_token_comes_from_the_visible_token_before_it_and_belongs_to_its_turn(
    turns: list[int], seed: int
) -> None:
    episodes = [shadows.make_episode(n, seed + i) for i, n in enumerate(turns)]
    packed = pack(episodes, CRITIC, max_positions=None)
    tokens = walk(packed)
    wanted = []
    z = 0
    for b, e in enumerate(episodes):
        for k in range(e.n_turns):
            start, end = e.action_start[k], e.action_end[k]
            for t, log_prob in zip(range(start, end + 1), e.old_log_probs[k], strict=True):
                wanted.append((z, log_prob))
                target = int(packed.target_positions[len(wanted) - 1])
                source = int(packed.source_positions[len(wanted) - 1])
                assert tokens[target] == (b, 0, t, e.ids[t])
                assert tokens[source] == (b, 0, t - 1, e.ids[t - 1])  # for t = start: before cp_k, and not cp_k's last
            last = int(packed.value_positions[b, k])
            assert tokens[last - len(CRITIC) + 1] == (b, k + 1, start, CRITIC[0])
            assert tokens[last] == (b, k + 1, start + len(CRITIC) - 1, CRITIC[-1])
            z += 1
    assert packed.turn_of_token.tolist() == [turn for turn, _ in wanted]
    assert packed.old_log_probs.tolist() == pytest.approx([p for _, p in wanted])


def test_a_soft_prompt_gets_places_of_its_length() -> None:
    episode = shadows.make_episode(2)
    soft, text = pack([episode], (), max_positions=None, soft_len=3), pack([episode], CRITIC, max_positions=None)
    assert soft.soft_len == 3 and text.soft_len == 0
    assert soft.ids[soft.shadow > 0].eq(0).all()
    for field in ("position_ids", "shadow", "value_positions"):
        assert torch.equal(getattr(soft, field), getattr(text, field))


def test_an_episode_that_outgrows_the_model_is_an_error_of_its_own() -> None:
    episode = shadows.make_episode(3)
    longest = len(episode.ids) + len(CRITIC)
    pack([episode], CRITIC, max_positions=longest)
    with pytest.raises(
        EpisodeTooLong,
        match=f"episode 0: the model has {longest - 1} positions, the episode needs {len(episode.ids)} tokens \\+ 3 of the critic",
    ):
        pack([shadows.make_episode(1), episode], CRITIC, max_positions=longest - 1)


def test_a_row_without_episodes_or_with_no_or_two_kinds_of_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one episode"):
        pack([], CRITIC, max_positions=None)
    for critic, soft_len in (((), 0), (CRITIC, 2)):
        with pytest.raises(ValueError, match=f"found {len(critic)} ids and soft_len {soft_len}"):
            pack([shadows.make_episode(1)], critic, max_positions=None, soft_len=soft_len)


def test_a_row_moves_as_a_whole() -> None:
    packed = pack([shadows.make_episode(2)], CRITIC, max_positions=None)
    moved = packed.to("meta")
    assert moved.ids.device.type == moved.rewards.device.type == "meta" and packed.ids.device.type == "cpu"


@settings(max_examples=40, deadline=None)
@given(
    turns=st.lists(st.integers(1, 12), max_size=20),
    budget=st.integers(1, 300),
    limit=st.floats(0, 0.9),
    seed=st.integers(0, 99),
)
def test_bins_hold_every_episode_once_within_budget_and_padding(
    turns: list[int], budget: int, limit: float, seed: int
) -> None:
    episodes = [shadows.make_episode(n, seed + i) for i, n in enumerate(turns)]
    rows = bins(episodes, 3, token_budget=budget, max_padding=limit)
    assert sorted(i for row in rows for i in row) == list(range(len(turns)))
    for row in rows:
        assert n_tokens(episodes, row, 3) == len(pack([episodes[i] for i in row], CRITIC, max_positions=None).ids)
        assert len(row) == 1 or n_tokens(episodes, row, 3) <= budget
        assert padding_share(episodes, [row], 3) <= limit
    assert rows == bins(episodes, 3, token_budget=budget, max_padding=limit)


def test_padding_share_counts_the_slots_of_attention() -> None:
    long, short = shadows.make_episode(6, 1), shadows.make_episode(1, 2)
    slots = 2 * (len(long.ids) + 7 * 3)
    assert padding_share([long, short], [[0, 1]], 3) == pytest.approx(
        1 - (len(long.ids) + 7 * 3 + len(short.ids) + 2 * 3) / slots
    )
    assert padding_share([long, short], [[0], [1]], 3) == 0
    assert padding_share([], [], 3) == 0


def test_episodes_of_like_length_share_a_row() -> None:
    episodes = [shadows.make_episode(n, n) for n in (2, 30, 2, 30)]
    assert sorted(sorted(row) for row in bins(episodes, 3, token_budget=10_000)) == [[0, 2], [1, 3]]
