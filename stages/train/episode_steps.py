"""Pack stored episodes into the rows of Self-AC's steps. Token ids and log-probs come from the engine; nothing is
tokenised again.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from stages.frame.contract import Context
from stages.frame.types import MissingInput, Outcome, Row
from stages.judge.values import prompt_ids
from stages.learn import ranks
from stages.learn.certificate import certificates, shown
from stages.learn.credit import returns_of
from stages.learn.episode_row import BadEpisode, EpisodeIds, NotAPrefix, bins, n_tokens, pack, unbroken
from stages.learn.losses import loss_normaliser
from stages.learn.moving import moved
from stages.learn.value_head import ValueHead
from stages.llm.roles import roles_of
from stages.train.actor_critic import Part, SelfAcConfig, deviation_of
from stages.train.on_policy import by_scenario, relative_advantages

HEAD = ("episode_id", "scenario_id", "outcome", "total_reward", "messages")
TURN = ("episode_id", "turn", "prompt_ids", "action_ids", "log_probs", "reward")
"""Columns of `episodes` and `turns` that a row is made of."""


@dataclass(frozen=True)
class Trainable:
    """Episodes as rows (one each, unless it broke), the rewards' sums by row key, counts, a certificate a turn."""

    episodes: tuple[tuple[EpisodeIds, ...], ...]
    returns: Mapping[tuple[Any, ...], float]
    relative: Mapping[str, float] | None  # advantage by episode; None = by turn, from values
    counts: Mapping[str, float]
    certificates: tuple[Row, ...] = ()  # their gaps are still to come
    deviation: float = 1.0  # what advantages are divided by


def critic_prompt(context: Context) -> tuple[int, ...]:
    """Ids of the text that asks for a value; none where a learned prompt stands in its place."""
    if context.config.soft_prompt:
        return ()
    return prompt_ids(context.engine, roles_of(context.run.roles))


def trainable_rows(
    context: Context, heads: Sequence[Row], critic_ids: Sequence[int], max_positions: int | None
) -> Trainable:
    """What can be trained on. Raises BadEpisode, NotAPrefix, unless allowed, and MissingInput where nothing is left."""
    config: SelfAcConfig = context.config
    turns: dict[str, list[Row]] = defaultdict(list)
    for turn in context.replay.read("turns", context.inputs["collect"][-1:], TURN):
        turns[turn["episode_id"]].append(turn)
    roles = roles_of(context.run.roles)
    relative, counts = None, {"self_ac/split": 0.0, "self_ac/dropped": 0.0}
    if config.advantage == "group":
        relative = by_group(heads, divided=config.advantage_scale == "own")
        counts["self_ac/alone"] = float(len(heads) - len(relative))
        heads = [head for head in heads if head["episode_id"] in relative]
    episodes: list[tuple[EpisodeIds, ...]] = []
    returns: dict[tuple[Any, ...], float] = {}
    certified: list[Row] = []
    finals = context.engine.encode_all([roles.policy(head["messages"]) for head in heads])
    for head, final in zip(heads, finals, strict=True):
        mine = turns[head["episode_id"]]
        try:
            found = unbroken(mine, final, head["outcome"] == Outcome.TRUNCATED, config.gamma, (head["episode_id"],))
            # raises where one is too long
            pack(found, critic_ids, max_positions=max_positions, soft_len=config.soft_prompt)
        except BadEpisode:
            if config.unusable == "error":
                raise
            counts["self_ac/dropped"] += 1
            continue
        kept = certificates(mine, final, context.engine.decode)
        if config.broken == "error":
            check_unbroken(kept)
        certified += kept
        episodes.append(tuple(found))
        told = returns_of(found, head["total_reward"], [turn["reward"] for turn in mine], gamma=config.gamma)
        returns |= {row.key: one for row, one in zip(found, told, strict=True)}
        counts["self_ac/split"] += len(found) > 1
    if not episodes:
        raise MissingInput(
            f"self_ac found no usable one among {len(heads)} episodes of its last collect run; collect more"
        )
    return Trainable(tuple(episodes), returns, relative, counts, tuple(certified))


def check_unbroken(rows: Sequence[Row]) -> None:
    """Raises NotAPrefix at the first turn whose certificate says that the next state does not carry it on."""
    for row in rows:
        if not row["extended"]:
            where = f"episode {row['episode_id']}, turn {row['turn']}"
            found = f"one that differs from token {row['position']} on: produced {shown(row['produced'])}, rendered {shown(row['rendered'])}"
            raise NotAPrefix(
                f"{where}: the next state must begin with this turn's tokens, found {found}. Use a chat template that only appends, or set self_ac.broken to split",
                turn=row["turn"], position=row["position"],
            )  # fmt: skip


def by_group(heads: Sequence[Row], *, divided: bool) -> dict[str, float]:
    """Advantage of each episode relative to those of its scenario; one that is alone is left out."""
    groups = [members for members in by_scenario(heads).values() if len(members) > 1]
    if not groups:
        raise MissingInput(
            "advantage = group compares episodes of one scenario, found none with two; set collect.group to 4 or more"
        )
    return relative_advantages(groups, divided=divided)


def of_one_scale(
    found: Trainable, critic_ids: Sequence[int], config: SelfAcConfig, model: Any, head: ValueHead
) -> Trainable:
    """With the deviation of all its turns' advantages, at the weights that sampled. All steps use this one number, so
    neither a step's draw nor its rows change the scale. [ours]
    """
    if config.advantage_scale == "own":
        return found
    rows = parts(found.episodes, found, critic_ids, config, first=False, device=model.device)
    return replace(found, deviation=deviation_of(model, head, rows, config))


def steps(
    found: Trainable, critic_ids: Sequence[int], config: SelfAcConfig, *, rng: random.Random, device: Any
) -> Iterator[list[Part]]:
    """Each epoch's episodes in a new order, `batch` of them a step, packed by length into as few rows as hold them."""
    for epoch in range(config.epochs):
        order = rng.sample(found.episodes, len(found.episodes))
        n_steps = -(-len(order) // config.batch)
        # Steps of like size: a last one of a single episode would move the weights as far as any other.
        edges = [round(i * len(order) / n_steps) for i in range(n_steps + 1)]
        for start, end in pairwise(edges):
            # The rows of an episode that broke are learned from in one step, so "per episode" can count episodes.
            yield parts(order[start:end], found, critic_ids, config, first=epoch == start == 0, device=device)


def parts(
    episodes: Sequence[Sequence[EpisodeIds]],
    found: Trainable,
    critic_ids: Sequence[int],
    config: SelfAcConfig,
    *,
    first: bool,
    device: Any,
) -> list[Part]:
    """One step's rows."""
    chosen = [row for rows in episodes for row in rows]
    n_states = float(sum(e.n_turns + (not e.truncated) for e in chosen))
    normaliser = loss_normaliser(config.per, torch.tensor([sum(row.n_turns for row in rows) for rows in episodes]))
    made, critic_len = [], len(critic_ids) or config.soft_prompt
    budget = config.row_tokens
    if (n := ranks.count()) > 1:  # a row a rank at least
        budget = min(budget, -(-n_tokens(chosen, range(len(chosen)), critic_len) // n))
    for members in bins(chosen, critic_len, token_budget=budget):
        mine = tuple(chosen[i] for i in members)
        row = pack(mine, critic_ids, max_positions=None, soft_len=config.soft_prompt)
        relative = torch.tensor([found.relative[e.key[0]] for e in mine]) if found.relative else None
        told = tuple(found.returns[e.key] for e in mine)
        made.append(Part(row, mine, told, relative, n_states, normaliser, first, found.deviation))
    return moved(made, device)
