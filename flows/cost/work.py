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
    step with rows of it. Rows of two kinds from one episode are not considered.
    """
    size, found = at.lengths, []
    tokens = 0.0  # of a step, without its system message
    for kind in kinds:
        c, rows, pool = kind.a_step, kind.rows, max(kind.episodes, 1.0)
        if not c or not rows.n:
            continue
        if not kind.episodes:
            found.append(rows)
            tokens += c * rows.length
            continue
        if draw == "turn":
            met = pool * (1 - (1 - 1 / pool) ** c)  # episodes, and the last of c / met turns drawn from each
            last = c / met * (size.turns + 1) / (c / met + 1) - 1
        else:
            met = min(c, pool, 1 + (c - 1) / size.turns)  # turns after each other, from anywhere on
            last = size.middle + (c / met - 1) / 2
        deepest, own = size.state(min(size.turns - 1, last)), rows.length - size.state(size.middle)
        found.append(Rows(rows.n, rows.length, rows.predicted, own))
        found.append(Rows(rows.n / c * met, deepest, 0.0, deepest - size.system))
        tokens += c * own + met * (deepest - size.system)
    full = tokens / max(pass_tokens - size.system, 1.0) if pass_tokens else 0.0
    passes = full + 0.5 if full > 1 else 1.0  # the last one is half full
    n, branches = work.steps * passes, sum(kind.rows.n for kind in kinds if kind.a_step)
    return replace(work, trained=(*found, Rows(n, size.system, 0.0)), passes=n, branches=branches)
