"""What a run of a config would do, counted before it runs: episodes, prompts, tokens read, generated and trained,
optimiser steps.

Counts of rows, batches and steps are the stages' own arithmetic. What only a run can tell (turns of an episode, tokens
of a reply, how often the critic says Yes) is assumed: `flows/cost/lengths.py`. Pools grow over the iterations as they
do in a run. [ours]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flows.cost.lengths import Lengths
from flows.registry import METHODS

FACTOR = 40.0  # tokens of one thought in a chain of thought


@dataclass(frozen=True)
class Prompts:
    """n requests of one kind: tokens that each reads and that each writes; and of those read the first ones, which the
    request before it has, too.
    """

    n: float
    read: float
    written: float
    shared: float = 0.0


@dataclass(frozen=True)
class Rows:
    """n rows of `length` tokens in passes of a training, of which `predicted` go through the vocabulary projection, and
    `own` through the model, the last ones: what stands before them another row of the pass has brought.
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
    """One execution of a stage. asked: calls of whoever answers inside the environment."""

    stage: str
    episodes: float = 0.0
    prompts: tuple[Prompts, ...] = ()
    trained: tuple[Rows, ...] = ()
    forward: tuple[Rows, ...] = ()  # passes without a gradient
    steps: int = 0
    asked: float = 0.0

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


def workload(run: Any, lengths: Lengths) -> list[Work]:
    """Every execution of a stage, in order: the base model's evaluations, the iterations, the final evaluation."""
    found = [evaluate(At(run, lengths, -1, 0.0), run.evaluate.trials), evaluate(At(run, lengths, -1, 0.0))]
    pool = 0.0
    for i in range(run.iterations):
        pool += n_episodes(run, i) * lengths.turns
        found += [OF_STAGE[name](At(run, lengths, i, pool)) for name in METHODS[run.method]]
        if (i + 1) % run.evaluate_every == 0 or i == run.iterations - 1:
            found.append(evaluate(At(run, lengths, i, pool)))
    last = At(run, lengths, run.iterations - 1, pool)
    return [*found, evaluate(last, run.evaluate.trials)] if run.iterations else found


def n_episodes(run: Any, iteration: int) -> int:
    wanted, group = run.collect.first_episodes if iteration == 0 else run.collect.episodes, run.collect.group
    return int(max(1, wanted // group) * group)


def policy_prompts(at: At, n: float, k: float, draw: str = "turn") -> Prompts:
    size = at.lengths
    return Prompts(n, size.state(k), size.action + size.thought, shared_prefix(at, k, draw))


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
    """Tokens that prompts at reply k have in front like the ones before them, sorted: the system message; by the
    episode all that was said up to the turn before. That other roles of the stage had the same conversation is left
    out: they are asked after each other, and a cache does not hold a whole stage of the paper's.
    """
    size = at.lengths
    return size.system if draw == "turn" else max(size.system, seen_by_roles(at, k - 1))


def collect(at: At) -> Work:
    n, size = n_episodes(at.run, at.iteration), at.lengths
    return Work(
        "collect", n, (policy_prompts(at, n * size.turns, size.middle, "episode"),), asked=n * size.turns * size.asked
    )


def targets(at: At) -> Work:
    """Each transition k with its chain of `steps` real steps, of which the first min(steps, turns - k) are there."""
    config, size, turns = at.run.targets, at.lengths, at.lengths.whole
    total = min(config.transitions, at.pool, config.replay_size)
    last = 1 / turns if not config.terminal_frac or turns == 1 else config.terminal_frac
    weights = [total * (last if k == turns - 1 else (1 - last) / (turns - 1)) for k in range(turns)]
    found: list[Prompts] = []
    for k, n in enumerate(weights):
        depth = min(config.steps, turns - k)
        if k + depth < turns:
            found.append(policy_prompts(at, n, k + depth, config.draw))
            found.append(role_prompts(at, n, k + depth, size.act, size.future, config.draw))
        for j in range(k, k + depth):
            found.append(role_prompts(at, n, j, size.act + size.observation + size.future, size.future, config.draw))
            if config.correct:
                found.append(role_prompts(at, n, j, size.future, size.future, config.draw))
    return Work("targets", prompts=merged(found))


def merged(prompts: Sequence[Prompts]) -> tuple[Prompts, ...]:
    """One entry for all: its means are weighted by n, so that sums stay what they are."""
    n = sum(p.n for p in prompts)

    def mean(value: Callable[[Prompts], float]) -> float:
        return sum(p.n * value(p) for p in prompts) / n

    return (Prompts(n, mean(lambda p: p.read), mean(lambda p: p.written), mean(lambda p: p.shared)),) if n else ()


def successor_rows(at: At, n: float) -> Rows:
    size = at.lengths
    return Rows(n, seen_by_roles(at, size.middle) + size.template + size.act + size.future, size.future)


def policy_rows(at: At, n: float, thought: float) -> Rows:
    """thought: tokens of it that are trained on; a rewritten action has none without refine.rethink."""
    size = at.lengths
    return Rows(n, size.state(size.middle) + size.action + thought, size.action + thought)


def general_rows(at: At, n: float) -> Rows:
    return Rows(n, at.lengths.general, at.lengths.general / 2)


def n_targets(at: At) -> int:
    return int(min(at.run.targets.transitions, at.pool, at.run.targets.replay_size))


@dataclass(frozen=True)
class Kind:
    """Rows of one kind: how many a step has, and of how many episodes they are drawn; 0 = they are of none."""

    rows: Rows
    a_step: float
    episodes: float


def in_trees(at: At, kinds: Sequence[Kind], steps: int, draw: str, pass_tokens: int) -> tuple[Rows, ...]:
    """The rows as steps have them, what they share counted once: the system message in every pass, an episode's
    conversation in every step that has rows of it. That rows of two kinds may be of one episode is left out.
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
    return (*found, Rows(steps * passes, size.system, 0.0))


def critic(at: At) -> Work:
    config, n = at.run.critic, n_targets(at)
    steps = config.epochs * math.ceil(n / config.batch)
    kept = at.lengths.yes if at.iteration and not at.run.refine.rethink else 1
    drawn = min(at.pool, at.run.targets.replay_size) / at.lengths.turns
    kinds = (
        Kind(successor_rows(at, config.epochs * n), config.epochs * n / max(steps, 1), drawn),
        Kind(policy_rows(at, steps * config.policy_rows, at.lengths.thought * kept), config.policy_rows, drawn),
        Kind(general_rows(at, steps * config.general_rows), config.general_rows, 0),
    )
    return Work("critic", trained=in_trees(at, kinds, steps, config.draw, config.pass_tokens), steps=steps)


def n_states(at: At) -> int:
    config = at.run.refine
    return 0 if at.iteration < config.warmup else int(min(config.states, at.pool, config.replay_size))


def kept_rows(at: At) -> tuple[float, float]:
    """(rewritten actions, kept ones) that refine leaves, all replies readable."""
    config, n = at.run.refine, n_states(at)
    yes = 0.0 if config.critique == "none" else at.lengths.yes
    no = n * (1 - yes) * config.refinements
    most = math.inf if config.yes_frac_max >= 1 else config.yes_frac_max * no / (1 - config.yes_frac_max)
    return no, min(n * yes, most)


def refine(at: At) -> Work:
    config, size, n = at.run.refine, at.lengths, n_states(at)
    no = kept_rows(at)[0]
    found = [policy_prompts(at, n, size.middle, config.draw)]

    def asked(n: float, fields: float, written: float, times: float = 1) -> None:
        found.append(role_prompts(at, n, size.middle, fields, written, config.draw, times))

    if config.critique != "none":
        asked(n, size.act, size.future, config.futures)
        asked(n, size.act + config.futures * size.future, size.future)
    asked(no, size.action + size.future, size.action)
    if config.correct:
        asked(no, size.action, size.action)
    if config.rethink and size.thought:
        asked(no, size.action, size.action)
    return Work("refine", prompts=merged(found))


def distill(at: At) -> Work:
    config, (no, yes) = at.run.distill, kept_rows(at)
    n = math.floor(no + yes + 1e-9)
    n -= int(n * config.held_out) if config.epochs > 1 else 0
    steps = config.epochs * math.ceil(n / config.batch)
    thinking = 1 if at.run.refine.rethink else yes / max(no + yes, 1)
    drawn = min(at.pool, at.run.refine.replay_size) / at.lengths.turns
    rows = policy_rows(at, config.epochs * n, at.lengths.thought * thinking)
    kinds = (
        Kind(rows, config.epochs * n / max(steps, 1), drawn),
        Kind(successor_rows(at, steps * config.successor_rows), config.successor_rows, drawn),
        Kind(general_rows(at, steps * config.general_rows), config.general_rows, 0),
    )
    return Work("distill", trained=in_trees(at, kinds, steps, config.draw, config.pass_tokens), steps=steps)


def rft(at: At) -> Work:
    config = at.run.rft
    won = at.lengths.win * at.pool
    n = config.rows if config.refill and won >= 1 else int(min(config.rows, won))
    steps = config.epochs * math.ceil(n / config.batch)
    rows = policy_rows(at, config.epochs * n, at.lengths.thought)
    kind = Kind(rows, config.epochs * n / max(steps, 1), won / at.lengths.turns)
    return Work("rft", trained=in_trees(at, [kind], steps, "turn", config.pass_tokens), steps=steps)


def grpo(at: At) -> Work:
    """Groups that are all won or all lost have no advantage and are left out."""
    config, w, g = at.run.grpo, at.lengths.win, at.run.collect.group
    n = round(n_episodes(at.run, at.iteration) * at.lengths.turns * (1 - w**g - (1 - w) ** g))
    steps = config.epochs * math.ceil(n / config.batch)
    rows = policy_rows(at, config.epochs * n, at.lengths.thought)
    kind = Kind(rows, config.epochs * n / max(steps, 1), n / at.lengths.turns)
    return Work("grpo", trained=in_trees(at, [kind], steps, "turn", config.pass_tokens), steps=steps)


def self_ac(at: At) -> Work:
    """One row an episode. The same rows again without a gradient for the price on divergence, and a second pass for a
    critic of its own.
    """
    config, size, n = at.run.self_ac, at.lengths, n_episodes(at.run, at.iteration)
    said = size.turns * (size.action + size.thought)
    states = 1 + (said / FACTOR if at.run.task.agent == "cot" else size.turns)
    seen = size.system + size.first + said + size.turns * size.observation
    with_critic = seen + (states * size.critic if config.has_critic else 0.0)
    n_rows = config.epochs * n
    rows = (
        (Rows(n_rows, with_critic, said),)
        if not config.separate
        else (Rows(n_rows, seen, said), Rows(n_rows, with_critic, 0.0))
    )
    return Work(
        "self_ac",
        trained=rows,
        forward=(Rows(n_rows, seen, said),) if config.kl_coef else (),
        steps=config.epochs * math.ceil(n / config.batch),
    )


def evaluate(at: At, trials: int = 1) -> Work:
    """The base model (iteration -1) has no critic to be audited, and no values. trials: of each scenario."""
    config, size = at.run.evaluate, at.lengths
    n = config.episodes * config.best_of * trials
    found = [policy_prompts(at, n * size.turns, size.middle, "episode")]
    forward: tuple[Rows, ...] = ()
    if at.iteration >= 0 and at.run.method == "nlac" and config.audit_turns:
        audited = min(config.audit_turns, n * size.turns)
        found.append(policy_prompts(at, audited, size.middle))
        # The policy's own action and one of the base model at each state.
        found.append(role_prompts(at, 2 * audited, size.middle, size.act, size.future, times=config.audit_futures))
        told = size.act + config.audit_futures * size.future
        found.append(role_prompts(at, 2 * audited, size.middle, told, size.future))
    if at.iteration >= 0 and at.run.method == "self_ac" and config.value and at.run.self_ac.alpha:
        forward = (Rows(n * (size.turns + 1), size.state(size.turns / 2) + size.critic, 0.0),)
    return Work("evaluate", n, tuple(found), forward=forward, asked=n * size.turns * size.asked)


OF_STAGE: dict[str, Callable[[At], Work]] = {
    "collect": collect,
    "targets": targets,
    "critic": critic,
    "refine": refine,
    "distill": distill,
    "rft": rft,
    "grpo": grpo,
    "self_ac": self_ac,
    "evaluate": evaluate,
}
