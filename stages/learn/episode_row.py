"""Episodes as one row of tokens: all visible tokens first, then a shadow segment, the critic's prompt, for every state.

    [visible tokens of episode 1][of episode 2] ... [cp_0 cp_1 .. cp_N of episode 1][of episode 2] ...

Source: Self-AC slides, episode layout, which draws each |cp_k| before a_k. Explicit position ids make the order in a
row free, so here the shadows stand last [ours]. Visible tokens keep the plain causal kernel, and nothing is padded.
Token ids and log-probs come from the engine; text is never tokenised again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from stages.frame.types import TurnwiseError
from stages.learn.certificate import first_difference
from stages.learn.moving import moved
from stages.learn.tree import Branch, Tree, grow, trunk


class BadEpisode(TurnwiseError, ValueError):
    """An episode that cannot become a training row."""


class NotAPrefix(BadEpisode):
    """A state that does not begin with the state and the action before it, so the turns are no single row.

    turn: of the action that is not carried on. position: the first token that differs, from the episode's start.
    """

    def __init__(self, message: str, *, turn: int, position: int) -> None:
        super().__init__(message)
        self.turn, self.position = turn, position


class EpisodeTooLong(BadEpisode):
    """More positions than the model has. Nothing is cut: the caller drops the episode and counts it, or stops."""


@dataclass(frozen=True)
class EpisodeIds:
    """One episode of N turns as the engine produced it.

    ids: all visible tokens, those of the last state s_N. State k is ids[: prefix(k)], k in [0, N].
    action_start, action_end: (N,), first and last tokens. old_log_probs: (N,) tuples, one a token. rewards: (N + 1,).
    """

    ids: tuple[int, ...]
    action_start: tuple[int, ...]
    action_end: tuple[int, ...]
    old_log_probs: tuple[tuple[float, ...], ...]
    rewards: tuple[float, ...]
    truncated: bool
    key: tuple[Any, ...] = ()

    @property
    def n_turns(self) -> int:
        return len(self.action_start)

    @property
    def prefixes(self) -> tuple[int, ...]:
        """(N + 1,): the number of visible tokens of each state."""
        return (*self.action_start, len(self.ids))


def episode_ids(
    turns: Sequence[Mapping[str, Any]], final_ids: Sequence[int], *, truncated: bool, key: tuple[Any, ...] = ()
) -> EpisodeIds:
    """One episode from its rows of table `turns`, in order, and the ids of the state after the last turn.

    The final turn's reward is the terminal state's, r_N = R_N (slides). A truncated episode has r_N = 0 and keeps that
    reward at turn N - 1, so V_N can be bootstrapped [ours].
    Raises BadEpisode for what cannot be trained on, NotAPrefix if a state does not continue the one before.
    """
    if not turns:
        raise BadEpisode(
            f"episode {name(key)}: wanted at least one turn, found none; leave episodes without an action out of the batch"
        )
    states = [*(tuple(turn["prompt_ids"]) for turn in turns[1:]), tuple(final_ids)]
    for k, (turn, after) in enumerate(zip(turns, states, strict=True)):
        check_turn(turn, k, key)
        check_prefix((*turn["prompt_ids"], *turn["action_ids"]), after, k, key)
    starts = tuple(len(turn["prompt_ids"]) for turn in turns)
    ends = tuple(start + len(turn["action_ids"]) - 1 for start, turn in zip(starts, turns, strict=True))
    rewards = [float(turn["reward"]) for turn in turns]
    rewards = [*rewards, 0.0] if truncated else [*rewards[:-1], 0.0, rewards[-1]]
    log_probs = tuple(tuple(turn["log_probs"]) for turn in turns)
    return EpisodeIds(tuple(final_ids), starts, ends, log_probs, tuple(rewards), truncated, key)


def unbroken(
    turns: Sequence[Mapping[str, Any]], final: Sequence[int], truncated: bool, gamma: float, key: tuple[Any, ...]
) -> list[EpisodeIds]:
    """One row, or several: cut where a state does not begin with the ids before it, as after a cut reply.

    The row before a cut ends with its action. Its last state is the first state of the next row. So its final reward is
    R_0 of the next row, and the cut loses no credit. In a truncated episode that return is unknown. Then each row is
    truncated, and its last value stands for the rest. A row that begins later than its episode has that turn as the
    second part of its key. [ours]
    """
    try:
        return [episode_ids(turns, final, truncated=truncated, key=key)]
    except NotAPrefix as cut:
        before, after = turns[: cut.turn + 1], turns[cut.turn + 1 :]
    ids = (*before[-1]["prompt_ids"], *before[-1]["action_ids"])
    first = episode_ids(before, ids, truncated=truncated, key=key)
    if not after:
        return [first]
    rest = unbroken(after, final, truncated, gamma, (key[0], first_turn(key) + len(before)))
    if not truncated:
        told = sum(gamma**k * reward for k, reward in enumerate(rest[0].rewards))
        first = replace(first, rewards=(*(float(turn["reward"]) for turn in before), told))
    return [first, *rest]


def first_turn(key: Sequence[Any]) -> int:
    """The turn of its episode that a row of this key begins with."""
    return int(key[1]) if len(key) > 1 else 0


def check_turn(turn: Mapping[str, Any], k: int, key: tuple[Any, ...]) -> None:
    where = f"episode {name(key)}, turn {k}"
    n_tokens, log_probs = len(turn["action_ids"]), turn["log_probs"]
    if not len(turn["prompt_ids"]):
        raise BadEpisode(
            f"{where}: the prompt has no token. The first token of an action needs a context; have the engine return the prompt's ids"
        )
    if not n_tokens:
        raise BadEpisode(
            f"{where}: the action has no token. Have the engine return the end token too, or drop the episode"
        )
    if log_probs is None or len(log_probs) != n_tokens:
        found = "none" if log_probs is None or not len(log_probs) else f"{len(log_probs)}"
        raise BadEpisode(
            f"{where}: the action has {n_tokens} tokens and needs as many log-probs, found {found}. Collect with an engine that returns them"
        )
    if bad := [p for p in log_probs if p is None or not isfinite(p)]:
        raise BadEpisode(
            f"{where}: log-probs must be finite, found {bad[0]}. Without a ratio to the rollout policy it cannot be learned; drop the episode"
        )
    if turn["reward"] is None or not isfinite(turn["reward"]):
        raise BadEpisode(
            f"{where}: the reward must be finite, found {turn['reward']}. Fix the environment's reward and collect again"
        )


def check_prefix(before: tuple[int, ...], after: tuple[int, ...], k: int, key: tuple[Any, ...]) -> None:
    if (position := first_difference(before, after)) is None:
        return
    raise NotAPrefix(
        f"episode {name(key)}, turn {k}: the next state ({len(after)} tokens) must begin with this turn's prompt and action ({len(before)} tokens). It differs from position {position} on. Use a chat template that only appends, or train the turns as separate rows",
        turn=k, position=position,
    )  # fmt: skip


def name(key: tuple[Any, ...]) -> str:
    return "/".join(map(str, key)) or "?"


@dataclass(frozen=True)
class PackedRow:
    """B episodes in one row of T tokens. K: action tokens, M: the largest N + 1, Z: turns, all of the row; `turn`: one.

    Positions in the row count from 0; starts and ends are inclusive.
    """

    tree: Tree  # T tokens, 0 at the places of a soft prompt: a line an episode; cp_k is a branch after prefix(k) tokens
    episode: Tensor  # (T,) in [0, B)
    shadow: Tensor  # (T,): 0 visible, k + 1 in cp_k
    target_positions: Tensor  # (K,): where the action tokens stand
    source_positions: Tensor  # (K,): the last visible token before each, which predicts it
    turn_of_token: Tensor  # (K,) in [0, Z)
    old_log_probs: Tensor  # (K,) fp32, of the rollout policy
    value_positions: Tensor  # (B, M): the last token of cp_k, -1 past the episode's end
    state_places: Tensor  # (states,): where those that are not -1 stand, counted over B x M
    turn_places: Tensor  # (Z,): where the turns 0 .. N - 1 of each episode stand, counted over B x M
    rewards: Tensor  # (B, M) fp32, 0 past the end
    n_turns: Tensor  # (B,)
    truncated: Tensor  # (B,) bool
    soft_len: int  # length of the learned prompt whose places the shadows are; 0 where the critic's prompt is text
    host: PackedRow | None = None  # the same on the CPU, of a row that was moved

    @property
    def on_host(self) -> PackedRow:
        """The row where its numbers can be looked at without waiting for a device."""
        return self.host or self

    def to(self, device: Any) -> PackedRow:
        return moved(self, device)

    @property
    def ids(self) -> Tensor:
        """(T,)"""
        return self.tree.ids

    @property
    def position_ids(self) -> Tensor:
        """(T,): within the token's own episode; cp_k starts where the next visible token stands."""
        return self.tree.position_ids


def pack(
    episodes: Sequence[EpisodeIds], critic_ids: Sequence[int], *, max_positions: int | None, soft_len: int = 0
) -> PackedRow:
    """One row of the episodes, in their order.

    critic_ids: the critic's prompt; empty where a prompt of `soft_len` learned vectors stands in its place.
    max_positions: of the model, None = no limit. Raises EpisodeTooLong, and ValueError where there is no episode,
    or not exactly one kind of critic prompt.
    """
    if not episodes:
        raise ValueError("a row needs at least one episode, found none")
    if bool(critic_ids) == bool(soft_len):
        raise ValueError(
            f"give either the ids of a critic prompt or the length of a soft one, found {len(critic_ids)} ids and soft_len {soft_len}"
        )
    c, lengths = len(critic_ids) or soft_len, [len(e.ids) for e in episodes]
    for e in episodes:
        if max_positions is not None and len(e.ids) + c > max_positions:
            raise EpisodeTooLong(
                f"episode {name(e.key)}: the model has {max_positions} positions, the episode needs {len(e.ids)} tokens + {c} of the critic prompt. Give episodes fewer turns or tokens, or drop long ones (self_ac.unusable)"
            )
    starts = [0, *accumulate(lengths)][:-1]  # of each episode's visible tokens
    states = [(b, k, p) for b, e in enumerate(episodes) for k, p in enumerate(e.prefixes)]
    first_shadow = sum(lengths)
    cp_end = {(b, k): first_shadow + (i + 1) * c - 1 for i, (b, k, _) in enumerate(states)}
    turns = [(b, k) for b, e in enumerate(episodes) for k in range(e.n_turns)]
    actions = [range(episodes[b].action_start[k], episodes[b].action_end[k] + 1) for b, k in turns]
    targets = torch.tensor([starts[b] + t for (b, _), action in zip(turns, actions, strict=True) for t in action])
    width = max(e.n_turns for e in episodes) + 1

    def row(visible: Sequence[Sequence[int]], shadows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([*chain.from_iterable(visible), *chain.from_iterable(shadows)])

    prompt = critic_ids or [0] * c
    return PackedRow(
        # Every episode has all of its tokens: the checks of credit name each token's one turn.
        tree=grow([e.ids for e in episodes], [Branch(b, p, prompt) for b, _, p in states], shareable=0),
        episode=row([[b] * n for b, n in enumerate(lengths)], [[b] * c for b, _, _ in states]),
        shadow=row([[0] * n for n in lengths], [[k + 1] * c for _, k, _ in states]),
        target_positions=targets,
        # The label trap: the shadows stand elsewhere in the row, so the token before is the last visible one and never
        # cp_k's last.
        source_positions=targets - 1,
        turn_of_token=torch.tensor([z for z, action in enumerate(actions) for _ in action]),
        old_log_probs=torch.tensor([p for e in episodes for t in e.old_log_probs for p in t], dtype=torch.float32),
        value_positions=torch.tensor([[cp_end.get((b, k), -1) for k in range(width)] for b in range(len(episodes))]),
        state_places=torch.tensor([b * width + k for b, k, _ in states]),
        turn_places=torch.tensor([b * width + k for b, k in turns]),
        rewards=torch.tensor([[*e.rewards, *[0.0] * (width - e.n_turns - 1)] for e in episodes], dtype=torch.float32),
        n_turns=torch.tensor([e.n_turns for e in episodes]),
        truncated=torch.tensor([e.truncated for e in episodes]),
        soft_len=soft_len,
    )


def without_shadows(row: PackedRow) -> PackedRow:
    """The row's visible tokens alone, for a pass that reads no value; the indices of its values point nowhere."""
    n = row.tree.n_visible
    cut = {name: getattr(row, name)[:n] for name in ("episode", "shadow")}
    cut |= {"value_positions": torch.full_like(row.value_positions, -1), "state_places": row.state_places[:0]}
    return replace(row, tree=trunk(row.tree), **cut, host=row.host and without_shadows(row.host))


def bins(
    episodes: Sequence[EpisodeIds], critic_len: int, *, token_budget: int, max_padding: float = 0.25
) -> list[list[int]]:
    """Episodes shared out over rows: lists of indices, each once. First fit, longest first; no randomness.

    A row holds at most `token_budget` tokens, shadows included; a single episode that is longer gets one alone.
    Episodes of like length meet in a row: `padding_share` of each row is at most max_padding, in [0, 1). [ours]
    """
    rows: list[list[int]] = []
    for i in sorted(range(len(episodes)), key=lambda i: (-len(episodes[i].ids), -episodes[i].n_turns, i)):
        for row in rows:
            wider = [*row, i]
            if (
                n_tokens(episodes, wider, critic_len) <= token_budget
                and padding_share(episodes, [wider], critic_len) <= max_padding
            ):
                row.append(i)
                break
        else:
            rows.append([i])
    return rows


def n_tokens(episodes: Sequence[EpisodeIds], row: Sequence[int], critic_len: int) -> int:
    """Tokens of a row of `bins`: visible ones and shadows."""
    return sum(len(episodes[i].ids) + (episodes[i].n_turns + 1) * critic_len for i in row)


def padding_share(episodes: Sequence[EpisodeIds], rows: Sequence[Sequence[int]], critic_len: int) -> float:
    """Share of padding among the slots of attention, where a row's episodes are laid side by side; of it alone.

    1 - tokens / slots,   slots of a row = episodes x (longest visible part + most states x critic_len)
    """
    slots = sum(
        len(r) * (max(len(episodes[i].ids) for i in r) + (max(episodes[i].n_turns for i in r) + 1) * critic_len)
        for r in rows
    )
    return 1 - sum(n_tokens(episodes, r, critic_len) for r in rows) / slots if slots else 0.0
