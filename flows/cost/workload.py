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
    """n requests of one kind: tokens that each reads, those of them that all have in front, and tokens that each
    writes.
    """

    n: float
    read: float
    written: float
    shared: float = 0.0


@dataclass(frozen=True)
class Rows:
    """n rows of `length` tokens in passes of a training, of which `predicted` go through the vocabulary projection."""

    n: float
    length: float
    predicted: float


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
    def trained_tokens(self) -> float:
        return sum(r.n * r.length for r in self.trained)

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


def policy_prompts(at: At, n: float, k: float) -> Prompts:
    size = at.lengths
    return Prompts(n, size.state(k), size.action + size.thought, size.system)


def collect(at: At) -> Work:
    n, size = n_episodes(at.run, at.iteration), at.lengths
    return Work("collect", n, (policy_prompts(at, n * size.turns, size.middle),), asked=n * size.turns * size.asked)


def targets(at: At) -> Work:
    """Each transition k with its chain of `steps` real steps, of which the first min(steps, turns - k) are there."""
    config, size, turns = at.run.targets, at.lengths, at.lengths.whole
    total = min(config.transitions, at.pool, config.replay_size)
    last = 1 / turns if config.terminal_frac is None or turns == 1 else config.terminal_frac
    weights = [total * (last if k == turns - 1 else (1 - last) / (turns - 1)) for k in range(turns)]
    found: list[Prompts] = []
    for k, n in enumerate(weights):
        depth = min(config.steps, turns - k)
        if k + depth < turns:
            found.append(policy_prompts(at, n, k + depth))
            found.append(Prompts(n, size.template + size.history(k + depth) + size.act, size.future + size.thought))
        for j in range(k, k + depth):
            seen = size.template + size.history(j) + size.act + size.observation + size.future
            found.append(Prompts(n, seen, size.future + size.thought))
            if config.correct:
                found.append(Prompts(n, size.template + size.future, size.future + size.thought))
    return Work("targets", prompts=merged(found))


def merged(prompts: Sequence[Prompts]) -> tuple[Prompts, ...]:
    """One entry for all: its means are weighted by n, so that sums stay what they are."""
    n = sum(p.n for p in prompts)

    def mean(value: Callable[[Prompts], float]) -> float:
        return sum(p.n * value(p) for p in prompts) / n

    return (Prompts(n, mean(lambda p: p.read), mean(lambda p: p.written), mean(lambda p: p.shared)),) if n else ()


def successor_rows(at: At, n: float) -> Rows:
    size = at.lengths
    return Rows(n, size.template + size.history(size.middle) + size.act + size.future, size.future)


def policy_rows(at: At, n: float, thought: float) -> Rows:
    """thought: tokens of it that are trained on; a rewritten action has none without refine.rethink."""
    size = at.lengths
    return Rows(n, size.state(size.middle) + size.action + thought, size.action + thought)


def general_rows(at: At, n: float) -> Rows:
    return Rows(n, at.lengths.general, at.lengths.general / 2)


def n_targets(at: At) -> int:
    return int(min(at.run.targets.transitions, at.pool, at.run.targets.replay_size))


def critic(at: At) -> Work:
    config, n = at.run.critic, n_targets(at)
    steps = config.epochs * math.ceil(n / config.batch)
    kept = at.lengths.yes if at.iteration and not at.run.refine.rethink else 1
    beside = policy_rows(at, steps * config.policy_rows, at.lengths.thought * kept)
    trained = (successor_rows(at, config.epochs * n), beside, general_rows(at, steps * config.general_rows))
    return Work("critic", trained=trained, steps=steps)


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
    past, said = size.history(size.middle), size.future + size.thought
    no = kept_rows(at)[0]
    found = [policy_prompts(at, n, size.middle)]
    if config.critique != "none":
        found.append(Prompts(n * config.futures, size.template + past + size.act, said))
        found.append(Prompts(n, size.template + past + size.act + config.futures * size.future, said))
    found.append(
        Prompts(no, size.template + size.system + past + size.action + size.future, size.action + size.thought)
    )
    if config.correct:
        found.append(Prompts(no, size.template + size.action, size.action + size.thought))
    if config.rethink and size.thought:
        found.append(
            Prompts(no, size.state(size.middle) + size.template + size.action, size.action + size.thought, size.system)
        )
    return Work("refine", prompts=merged(found))


def distill(at: At) -> Work:
    config, (no, yes) = at.run.distill, kept_rows(at)
    n = math.floor(no + yes + 1e-9)
    n -= int(n * config.held_out) if config.epochs > 1 else 0
    steps = config.epochs * math.ceil(n / config.batch)
    thinking = 1 if at.run.refine.rethink else yes / max(no + yes, 1)
    rows = policy_rows(at, config.epochs * n, at.lengths.thought * thinking)
    beside = (successor_rows(at, steps * config.successor_rows), general_rows(at, steps * config.general_rows))
    return Work("distill", trained=(rows, *beside), steps=steps)


def rft(at: At) -> Work:
    config = at.run.rft
    won = at.lengths.win * at.pool
    n = config.rows if config.refill and won >= 1 else int(min(config.rows, won))
    return Work(
        "rft",
        trained=(policy_rows(at, config.epochs * n, at.lengths.thought),),
        steps=config.epochs * math.ceil(n / config.batch),
    )


def grpo(at: At) -> Work:
    """Groups that are all won or all lost have no advantage and are left out."""
    config, w, g = at.run.grpo, at.lengths.win, at.run.collect.group
    n = round(n_episodes(at.run, at.iteration) * at.lengths.turns * (1 - w**g - (1 - w) ** g))
    return Work(
        "grpo",
        trained=(policy_rows(at, config.epochs * n, at.lengths.thought),),
        steps=config.epochs * math.ceil(n / config.batch),
    )


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
    found = [policy_prompts(at, n * size.turns, size.middle)]
    forward: tuple[Rows, ...] = ()
    if at.iteration >= 0 and at.run.method == "nlac" and config.audit_turns:
        audited = min(config.audit_turns, n * size.turns)
        seen, said = size.template + size.history(size.middle) + size.act, size.future + size.thought
        found.append(policy_prompts(at, audited, size.middle))
        # The policy's own action and one of the base model at each state.
        found.append(Prompts(2 * audited * config.audit_futures, seen, said))
        found.append(Prompts(2 * audited, seen + config.audit_futures * size.future, said))
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
