"""The parts of a stage's work: requests, and rows of training in trees.

Lengths are means. A shared part of prompts or rows counts once, as in prefix caches and trees. [ours]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flows.cost.lengths import Lengths


@dataclass(frozen=True)
class Prompts:
    """n requests of one kind: the tokens that each reads and writes, and how many of those read it shares with the
    request before it.

    lived: the tokens that replies of episodes share with other episodes, since those of one episode follow each other;
    None = all that is shared is so with requests under way. together: most requests at once, whatever the engine.
    """

    n: float
    read: float
    written: float
    shared: float = 0.0
    lived: float | None = None
    together: float = math.inf

    @property
    def beside(self) -> float:
        """Of those shared: with requests that are under way at the same time."""
        return self.shared if self.lived is None else self.lived

    @property
    def length(self) -> float:
        return max(self.read + self.written, 1.0)


@dataclass(frozen=True)
class Rows:
    """n rows of `length` tokens in training passes. `predicted` tokens go through the vocabulary projection. Only the
    last `own` tokens go through the model: another row of the pass brings those before them.
    """

    n: float
    length: float
    predicted: float
    own: float | None = None  # None = all

    @property
    def fresh(self) -> float:
        return self.length if self.own is None else self.own


@dataclass(frozen=True)
class Work:
    """One execution of a stage. asked: calls of whoever answers inside the environment. passes, branches: of training,
    and the rows in them.
    """

    stage: str
    episodes: float = 0.0
    prompts: tuple[Prompts, ...] = ()
    trained: tuple[Rows, ...] = ()
    forward: tuple[Rows, ...] = ()  # passes without a gradient
    steps: int = 0
    asked: float = 0.0
    passes: float = 0.0
    branches: float = 0.0

    @property
    def generated(self) -> float:
        return sum(p.n * p.written for p in self.prompts)

    @property
    def read(self) -> float:
        return sum(p.n * p.read for p in self.prompts)

    @property
    def cached(self) -> float:
        return sum(p.n * p.shared for p in self.prompts)

    @property
    def trained_tokens(self) -> float:
        return sum(r.n * r.fresh for r in self.trained)

    @property
    def predicted(self) -> float:
        return sum(r.n * r.predicted for r in self.trained)


@dataclass(frozen=True)
class At:
    """A stage's place in a run: the iteration, the turns collected so far, and the config."""

    run: Any
    lengths: Lengths
    iteration: int
    pool: float


def policy_prompts(at: At, n: float, k: float, draw: str = "turn") -> Prompts:
    size = at.lengths
    return Prompts(n, size.state(k), size.action + size.thought, shared_prefix(at, k, draw))


def lived_prompts(at: At, episodes: float) -> Prompts:
    """The replies of whole episodes, of which `collect.slots` are under way at once."""
    found = policy_prompts(at, episodes * at.lengths.turns, at.lengths.middle, "episode")
    return replace(found, lived=at.lengths.system, together=min(at.run.collect.slots, episodes))


def seen_by_roles(at: At, k: float) -> float:
    """The conversation in front of a role's own words, at reply k."""
    size = at.lengths
    return size.state(k) if at.run.roles.history == "chat" else size.system + size.history(k)


def role_prompts(
    at: At, n: float, k: float, fields: float, written: float, draw: str = "turn", times: float = 1
) -> Prompts:
    """A role's at reply k, each asked so many times. fields: tokens of what it is told besides; written: of its reply."""
    size = at.lengths
    read = seen_by_roles(at, k) + size.template + fields
    shared = (shared_prefix(at, k, draw) + (times - 1) * read) / times
    return Prompts(n * times, read, written + size.thought, shared)


def shared_prefix(at: At, k: float, draw: str) -> float:
    """Tokens at the front that sorted prompts at reply k share with earlier ones: the system message, and an episode's
    turns so far. Other roles of the stage share the conversation, too. This is left out: roles are asked one after the
    other, and no cache holds a whole stage of the paper's size.
    """
    size = at.lengths
    return size.system if draw == "turn" else max(size.system, seen_by_roles(at, k - 1))


def merged(prompts: Sequence[Prompts]) -> tuple[Prompts, ...]:
    """One entry for all: its means are weighted by n, so that sums stay what they are."""
    n = sum(p.n for p in prompts)

    def mean(value: Callable[[Prompts], float]) -> float:
        return sum(p.n * value(p) for p in prompts) / n

    return (Prompts(n, mean(lambda p: p.read), mean(lambda p: p.written), mean(lambda p: p.shared)),) if n else ()


def successor_rows(at: At, n: float) -> Rows:
    size = at.lengths
    return Rows(n, seen_by_roles(at, size.middle) + size.template + size.act + size.future, size.future)


def q_rows(at: At, n: float) -> Rows:
    """The successor's prompt without a reply; of its last token a policy row's projection is made, too."""
    size = at.lengths
    return Rows(n, seen_by_roles(at, size.middle) + size.template + size.act, 1.0)


def policy_rows(at: At, n: float, thought: float) -> Rows:
    """thought: tokens of it that are trained on; a rewritten action has none without refine.rethink."""
    size = at.lengths
    return Rows(n, size.state(size.middle) + size.action + thought, size.action + thought)


def general_rows(at: At, n: float) -> Rows:
    return Rows(n, at.lengths.general, at.lengths.general / 2)


@dataclass(frozen=True)
class Kind:
    """Rows of one kind: how many a step has, and from how many episodes they are drawn. 0: from none."""

    rows: Rows
    a_step: float
    episodes: float


def in_trees(work: Work, at: At, kinds: Sequence[Kind], draw: str, pass_tokens: int) -> Work:
    """The work with its rows in steps. Shared parts count once: the system message in every pass, an episode's conversation in every
    step with rows of it, of whatever kinds. Left out: rows of very unlike length go apart, and an action may stand in a deeper row.
    """
    size, found = at.lengths, []
    tokens = 0.0  # of a step, without its system message
    drawn = [kind for kind in kinds if kind.a_step and kind.rows.n]
    for kind in drawn:
        own = kind.rows.length - size.state(size.middle) if kind.episodes else kind.rows.length
        found.append(replace(kind.rows, own=own))
        tokens += kind.a_step * own
    if of_episodes := [kind for kind in drawn if kind.episodes]:
        met, deepest = conversations(size, of_episodes, draw)
        found.append(Rows(work.steps * met, deepest, 0.0, deepest - size.system))
        tokens += met * (deepest - size.system)
    full = tokens / max(pass_tokens - size.system, 1.0) if pass_tokens else 0.0
    passes = full + 0.5 if full > 1 else 1.0  # the last one is half full
    n, branches = work.steps * passes, sum(kind.rows.n for kind in kinds if kind.a_step)
    return replace(work, trained=(*found, Rows(n, size.system, 0.0)), passes=n, branches=branches)


def conversations(size: Lengths, kinds: Sequence[Kind], draw: str) -> tuple[float, float]:
    """(episodes that a step meets, tokens of the longest state of each). Kinds are drawn apart, from the same episodes."""
    pool = max(1.0, *(kind.episodes for kind in kinds))
    drawn = sum(kind.a_step for kind in kinds)
    if draw == "turn":
        met = pool * (1 - (1 - 1 / pool) ** drawn)
        last = drawn / met * (size.turns + 1) / (drawn / met + 1) - 1  # the last of so many turns from each
    else:  # turns after each other, from anywhere on
        of_kinds = [min(kind.a_step, pool, 1 + (kind.a_step - 1) / size.turns) for kind in kinds]
        met = pool * (1 - math.prod(1 - one / pool for one in of_kinds))
        last = size.middle + (drawn / sum(of_kinds) - 1) / 2
    return met, size.state(min(size.turns - 1, last))
