"""Draw transitions of the replay, and others in place of what was dropped.

Source: NLAC (arXiv 2512.04601), "Replay": the critic's loss decides the draw. Drawing again is ours: otherwise every
unreadable reply would cost gradient steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

import numpy as np

from stages.learn.priorities import priorities, sample_without_replacement
from stages.play.transitions import Drawable

Key = tuple[str, int]
Draw = Literal["turn", "episode"]
"""What is drawn, or meets in a step: turns one by one, or episodes with all of their turns, which share what was said before."""
R = TypeVar("R")
D = TypeVar("D", bound=Drawable)


def by_priority(
    pool: Sequence[D],
    losses: Mapping[Key, float],
    alpha: float,
    eps: float,
    rng: np.random.Generator,
    draw: Draw = "turn",
) -> list[D]:
    """The whole pool in a random order, each next one drawn from those left with p ~ (loss + eps)^alpha. alpha = 0: all
    orders alike. draw: one by one, or episode by episode.

    A transition that the critic has not met counts with the largest loss. One that it never will, since no target is
    made of it, with the mean: it would be new for ever.
    """
    mean = sum(losses.values()) / len(losses) if losses else math.nan
    known = [losses.get(t.key, math.nan if t.has_target else mean) for t in pool]
    p = priorities(np.array(known), alpha, eps)
    if draw == "episode" and pool:
        return [pool[i] for i in by_episode(pool, p, len(pool), rng)[0]]
    order = sample_without_replacement(rng, p, len(pool))
    return [pool[i] for i in order]


def by_episode(
    pool: Sequence[D], p: Sequence[float] | np.ndarray, n: int, rng: np.random.Generator
) -> tuple[list[int], list[float], list[int]]:
    """At least n of the pool (all, if it has no more), episode by episode, as indices in turn order. Episodes come
    without replacement, with all their turns, in proportion to the sum of their turns' p.

    Also the probability of every episode of the pool, and which of them each index is of. [ours]
    """
    turns: dict[str, list[int]] = {}
    for i in sorted(range(len(pool)), key=lambda i: pool[i].key):
        turns.setdefault(pool[i].key[0], []).append(i)
    episodes = list(turns)
    p_E = np.array([sum(p[i] for i in turns[episode]) for episode in episodes])
    p_E = p_E / p_E.sum()
    found: list[int] = []
    of: list[int] = []
    for e in sample_without_replacement(rng, p_E, len(episodes)):
        if len(found) >= n:
            break
        found += turns[episodes[e]]
        of += [int(e)] * len(turns[episodes[e]])
    return found, p_E.tolist(), of


def until_enough(
    order: Sequence[D], wanted: int, tries: int, ask: Callable[[Sequence[D], int], list[R]], done: Callable[[Sequence[R]], set[Key]],
    lost: Callable[[Sequence[R]], set[Key]],
) -> list[list[R]]:  # fmt: skip
    """Results of `ask` on the first `wanted` of `order`, then on as many more as are missing: one list a try.

    ask: (transitions, number of the try from 0) -> results. done and lost, from all results so far: keys of transitions
    that succeeded, and of those that never can. After the end of `order` it takes those that did neither. It ends when
    enough are done, after `tries`, or when nothing is left. It also ends if the first try brought nothing: an engine
    that returns garbage is not asked again.
    """
    found: list[list[R]] = []
    queue, n_done = list(order), 0
    while queue and len(found) < tries and n_done < wanted:
        drawn, queue = queue[: wanted - n_done], queue[wanted - n_done :]
        found.append(ask(drawn, len(found)))
        every = [one for results in found for one in results]
        settled, never = done(every), lost(every)
        if not settled:
            break
        n_done = len(settled)
        queue += [t for t in drawn if t.key not in settled | never]
    return found
