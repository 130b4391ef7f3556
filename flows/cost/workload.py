"""Counts the work of a run before it starts: episodes, prompts, tokens read, generated and trained, optimiser steps.

Rows, batches and steps use the stages' own arithmetic. Only a run can tell the turns of an episode, the tokens of a
reply and the share of Yes: `flows/cost/lengths.py` assumes them. Pools grow over the iterations as in a run. [ours]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flows.cost.lengths import Lengths
from flows.cost.work import (
    At,
    Kind,
    Prompts,
    Rows,
    Work,
    general_rows,
    in_trees,
    lived_prompts,
    merged,
    policy_prompts,
    policy_rows,
    q_rows,
    role_prompts,
    successor_rows,
)
from flows.pipeline import LAST, stages_of
from flows.registry import METHODS

FACTOR = 40.0  # tokens of one thought in a chain of thought


def workload(run: Any, lengths: Lengths) -> list[Work]:
    """Every execution of a stage, in order: the base model's evaluations, the iterations, the final evaluation."""
    found = [evaluate(At(run, lengths, -1, 0.0), run.evaluate.trials), evaluate(At(run, lengths, -1, 0.0))]
    pool = 0.0
    for i in range(run.iterations):
        stages = stages_of(i, run)
        pool += n_episodes(run, i) * lengths.turns if "collect" in stages else 0
        found += [(evaluate if name == LAST else OF_STAGE[name])(At(run, lengths, i, pool)) for name in stages]
    last = At(run, lengths, run.iterations - 1, pool)
    return [*found, evaluate(last, run.evaluate.trials)] if run.iterations else found


def n_episodes(run: Any, iteration: int) -> int:
    wanted, group = run.collect.first_episodes if iteration == 0 else run.collect.episodes, run.collect.group
    return int(max(1, wanted // group) * group)


def collect(at: At) -> Work:
    n, size = n_episodes(at.run, at.iteration), at.lengths
    return Work("collect", n, (lived_prompts(at, n),), asked=n * size.turns * size.asked)


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


def n_targets(at: At) -> int:
    return int(min(at.run.targets.transitions, at.pool, at.run.targets.replay_size))


def critic(at: At) -> Work:
    config, n = at.run.critic, n_targets(at)
    steps = config.epochs * math.ceil(n / config.batch)
    kept = at.lengths.yes if at.iteration and not picks(at) and not at.run.refine.rethink else 1
    drawn = min(at.pool, at.run.targets.replay_size) / at.lengths.turns
    kinds = (
        Kind(successor_rows(at, config.epochs * n), config.epochs * n / max(steps, 1), drawn),
        Kind(policy_rows(at, steps * config.policy_rows, at.lengths.thought * kept), config.policy_rows, drawn),
        Kind(general_rows(at, steps * config.general_rows), config.general_rows, 0),
    )
    return in_trees(Work("critic", steps=steps), at, kinds, config.draw, config.pass_tokens)


def improved_states(at: At, config: Any) -> int:
    """Of refine or of pick, by its config."""
    return 0 if at.iteration < config.warmup else int(min(config.states, at.pool, config.replay_size))


def picks(at: At) -> bool:
    return "pick" in METHODS[at.run.method]


def learned_rows(at: At) -> tuple[float, float]:
    """(rewritten actions, the policy's own) that distill learns, all replies readable."""
    return (0.0, improved_states(at, at.run.pick)) if picks(at) else kept_rows(at)


def kept_rows(at: At) -> tuple[float, float]:
    """(rewritten actions, kept ones) that refine leaves, all replies readable."""
    config, n = at.run.refine, improved_states(at, at.run.refine)
    yes = 0.0 if config.critique == "none" else at.lengths.yes
    no = n * (1 - yes) * config.refinements
    most = math.inf if config.yes_frac_max >= 1 else config.yes_frac_max * no / (1 - config.yes_frac_max)
    return no, min(n * yes, most)


def refine(at: At) -> Work:
    config, size, n = at.run.refine, at.lengths, improved_states(at, at.run.refine)
    no, lived = kept_rows(at)[0], config.futures_of == "episode"
    found = [] if lived else [policy_prompts(at, n, size.middle, config.draw)]

    def asked(n: float, fields: float, written: float, times: float = 1) -> None:
        found.append(role_prompts(at, n, size.middle, fields, written, config.draw, times))

    if lived:  # each turn from the state on is merged, and corrected
        merges = n * (size.turns + 1) / 2
        asked(merges, size.act + size.observation + size.future, size.future)
        asked(merges * config.correct, size.future, size.future)
        asked(n, size.act + size.future, size.future)
    elif config.critique != "none":
        asked(n, size.act, size.future, config.futures)
        asked(n, size.act + config.futures * size.future, size.future)
    asked(no, size.action + size.future, size.action)
    if config.correct:
        asked(no, size.action, size.action)
    if config.rethink and size.thought:
        asked(no, size.action, size.action)
    return Work("refine", prompts=merged(found))


def q_critic(at: At) -> Work:
    """An a' and a prompt without a reply for each bootstrapped transition. Also the steps of a critic that reads the
    end of the successor's prompt.
    """
    config, size = at.run.q_critic, at.lengths
    n = int(min(config.transitions, at.pool, config.replay_size))
    steps = config.epochs * math.ceil(n / config.batch)
    turns = size.whole
    last = 1 / turns if not config.terminal_frac or turns == 1 else config.terminal_frac
    goes_on = n * (1 - last) * max(turns - config.steps, 0) / max(turns - 1, 1)
    drawn = min(at.pool, config.replay_size) / size.turns
    kinds = (
        Kind(q_rows(at, config.epochs * n), config.epochs * n / max(steps, 1), drawn),
        Kind(policy_rows(at, steps * config.policy_rows, size.thought), config.policy_rows, drawn),
    )
    work = Work(
        "q_critic",
        prompts=(policy_prompts(at, goes_on, size.middle, config.draw),) if goes_on else (),
        forward=(q_rows(at, goes_on),) if goes_on else (),
        steps=steps,
    )
    return in_trees(work, at, kinds, config.draw, config.pass_tokens)


def pick(at: At) -> Work:
    """n actions in every state, by one prompt; all of them taken to differ."""
    config, size = at.run.pick, at.lengths
    n, k = improved_states(at, config), config.actions
    once = policy_prompts(at, n, size.middle, config.draw)
    found = [replace(once, n=n * k, shared=(once.shared + (k - 1) * once.read) / k)]

    def told(fields: float, times: float = 1, asked: float = n * k) -> None:
        found.append(role_prompts(at, asked, size.middle, fields, size.future, config.draw, times))

    if config.by == "value":
        return Work("pick", prompts=merged(found), forward=(q_rows(at, n * k),))
    played = n * k * config.futures if config.futures_of == "rollouts" else 0
    if played:  # each one to its end, and told from there back
        found.append(policy_prompts(at, played * (size.turns - 1) / 2, size.middle, config.draw))
        merges = played * (size.turns + 1) / 2
        told(size.act + size.observation + size.future, asked=merges)
        told(size.future, asked=merges * config.correct)
    else:
        told(size.act, config.futures)
    told(size.act + config.futures * size.future)
    return Work("pick", episodes=played, prompts=merged(found))


def distill(at: At) -> Work:
    config, (no, yes) = at.run.distill, learned_rows(at)
    n = math.floor(no + yes + 1e-9)
    n -= int(n * config.held_out) if config.epochs > 1 else 0
    steps = config.epochs * math.ceil(n / config.batch)
    improving = at.run.pick if picks(at) else at.run.refine
    thinking = 1 if picks(at) or at.run.refine.rethink else yes / max(no + yes, 1)
    drawn = min(at.pool, improving.replay_size) / at.lengths.turns
    rows = policy_rows(at, config.epochs * n, at.lengths.thought * thinking)
    of_critic = q_rows if "q_critic" in METHODS[at.run.method] else successor_rows
    kinds = (
        Kind(rows, config.epochs * n / max(steps, 1), drawn),
        Kind(of_critic(at, steps * config.successor_rows), config.successor_rows, drawn),
        Kind(general_rows(at, steps * config.general_rows), config.general_rows, 0),
    )
    return in_trees(Work("distill", steps=steps), at, kinds, config.draw, config.pass_tokens)


def rft(at: At) -> Work:
    config = at.run.rft
    won = at.lengths.win * at.pool
    n = config.rows if config.refill and won >= 1 else int(min(config.rows, won))
    steps = config.epochs * math.ceil(n / config.batch)
    rows = policy_rows(at, config.epochs * n, at.lengths.thought)
    kind = Kind(rows, config.epochs * n / max(steps, 1), won / at.lengths.turns)
    return in_trees(Work("rft", steps=steps), at, [kind], "turn", config.pass_tokens)


def grpo(at: At) -> Work:
    """Groups that are all won or all lost have no advantage and are left out."""
    config, w, g = at.run.grpo, at.lengths.win, at.run.collect.group
    n = round(n_episodes(at.run, at.iteration) * at.lengths.turns * (1 - w**g - (1 - w) ** g))
    steps = config.epochs * math.ceil(n / config.batch)
    rows = policy_rows(at, config.epochs * n, at.lengths.thought)
    kind = Kind(rows, config.epochs * n / max(steps, 1), n / at.lengths.turns)
    return in_trees(Work("grpo", steps=steps), at, [kind], "turn", config.pass_tokens)


def sdpo(at: At) -> Work:
    """Turns of lost episodes, and of those with another win in the group. The teacher reads each with words behind it."""
    config, size, w = at.run.sdpo, at.lengths, at.lengths.win
    helped = 1 - (1 - w) ** (at.run.collect.group - 1) if config.wins == "context" else 0.0
    share = helped if config.feedback == "none" else 1 - w + w * helped
    n = round(n_episodes(at.run, at.iteration) * size.turns * share)
    steps = config.epochs * math.ceil(n / config.batch)
    rows, drawn = policy_rows(at, config.epochs * n, size.thought), n / size.turns
    said = size.template + (size.observation if config.feedback != "none" else 0.0)
    taught = replace(rows, length=rows.length + said + helped * size.turns * size.action)
    kinds = [Kind(rows, rows.n / max(steps, 1), drawn), Kind(taught, rows.n / max(steps, 1), drawn)]
    if config.ema_rate == 1:
        return in_trees(Work("sdpo", steps=steps), at, kinds, "turn", config.pass_tokens)
    read = in_trees(Work("sdpo", steps=steps), at, kinds[1:], "turn", config.pass_tokens).trained
    return in_trees(Work("sdpo", steps=steps, forward=read), at, kinds[:1], "turn", config.pass_tokens)


def self_ac(at: At) -> Work:
    """One row an episode. The price on divergence reads the same rows again without a gradient. A separate critic needs
    a second pass. The deviation of the advantages reads each episode's values once.
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
    forward = [Rows(n_rows, seen, said)] if config.kl_coef else []
    if config.advantage_scale == "batch" and config.advantage != "group":
        forward.append(Rows(n, with_critic, 0.0))
    steps = config.epochs * math.ceil(n / config.batch)
    a_step = sum(r.n * r.length for r in rows) / steps
    passes = max(float(len(rows)), a_step / config.row_tokens)
    return Work(
        "self_ac",
        trained=rows,
        forward=tuple(forward),
        steps=steps,
        passes=steps * passes,
        branches=n_rows * (1 + (states if config.has_critic else 0)),
    )


def evaluate(at: At, trials: int = 1) -> Work:
    """The base model (iteration -1) has no critic to be audited, and no values. trials: of each scenario."""
    config, size = at.run.evaluate, at.lengths
    n = config.episodes * config.best_of * trials
    found = [lived_prompts(at, n)]
    forward: tuple[Rows, ...] = ()
    if at.iteration >= 0 and "critic" in METHODS[at.run.method] and config.audit_turns:
        audited = min(config.audit_turns, n * size.turns)
        found.append(policy_prompts(at, audited, size.middle))
        # The policy's own action and one of the base model at each state.
        found.append(role_prompts(at, 2 * audited, size.middle, size.act, size.future, times=config.audit_futures))
        told = size.act + config.audit_futures * size.future
        found.append(role_prompts(at, 2 * audited, size.middle, told, size.future))
    if at.iteration >= 0 and "q_critic" in METHODS[at.run.method] and config.audit_turns:
        audited = min(config.audit_turns, n * size.turns)
        found.append(policy_prompts(at, audited, size.middle))
        forward = (q_rows(at, 2 * audited),)
    if at.iteration >= 0 and at.run.method == "self_ac" and config.value and at.run.self_ac.alpha:
        forward = (Rows(n * (size.turns + 1), size.state(size.turns / 2) + size.critic, 0.0),)
    return Work("evaluate", n, tuple(found), forward=forward, asked=n * size.turns * size.asked)


OF_STAGE: dict[str, Callable[[At], Work]] = {
    "collect": collect,
    "targets": targets,
    "critic": critic,
    "refine": refine,
    "q_critic": q_critic,
    "pick": pick,
    "distill": distill,
    "rft": rft,
    "grpo": grpo,
    "sdpo": sdpo,
    "self_ac": self_ac,
    "evaluate": evaluate,
}
