"""Choose among sampled actions instead of rewriting one. The policy learns the best of n.

    a_1..a_n ~ pi(.|s),   a_r = best of a_1..a_n

The baselines of arXiv 2512.04601 that search by sampling differ in what is best (`by`):

    verdict   NLQL: the language critic's word, "Yes" before "No"; among equals what was sampled most often, then first
              NLRL: the same, after rollouts of each action in place of a successor's futures (`futures_of`)
    value     SAC: Q as a number; one of a_1..a_n is drawn with p ~ exp(Q(s, a_i) / tau)

NLQL is an ablation of its second version (n = 4). For the baseline NLRL the paper gives only the 4 rollouts. It does
not give SAC's improvement: ours. n and tau are logged, because action search is the difference from NLAC. States are
drawn as in refine, and the rows have its form: distill cannot tell them apart. [ours]

    turnwise run desk+nlql
    turnwise run desk+nlrl
    turnwise run desk+sac
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from stages.frame.contract import Context, Outputs, Stage
from stages.frame.react import parse_react
from stages.frame.types import Completion, Row
from stages.judge.critique import Judgement, judge
from stages.judge.fresh import StatesConfig, policy_row, sampled_actions, states_in_order, too_long, unreadable
from stages.judge.q_values import QCritic, open_q, q_prompts, q_values
from stages.judge.refinement import UNREADABLE
from stages.judge.rolled import judge_rolled
from stages.llm.last_message import check_last_message
from stages.llm.roles import Roles, mix, roles_of
from stages.llm.tokens import OUT_OF_CONTEXT, nothing_fits
from stages.play.drawing import until_enough
from stages.play.transitions import Candidate, Transition, in_full


class PickConfig(StatesConfig):
    """How many actions to choose among, and how."""

    by: Literal["verdict", "value"] = "verdict"
    """How the best action is chosen: by the language critic's verdict (NLQL), or by a q_critic's number (SAC). [paper: v2's NLQL; SAC's rule ours]"""
    tau: float = Field(0.1, gt=0)
    """Temperature of the choice by Q, in units of reward, for by = value. [ours]"""
    actions: int = Field(4, ge=1, description="n, actions sampled in a state. [paper: 4 of NLQL]")
    futures: int = Field(1, ge=1)
    """k, futures that the evaluator reads, for by = verdict. [paper: 1; 4 of NLRL]"""
    futures_of: Literal["successor", "rollouts"] = "successor"
    """Whose futures are read: those of the trained successor, or the outcomes of k rollouts of each action. [paper: NLQL; NLRL]"""
    correct: bool = Field(True, description="CoT correction of what came of a rollout. [ours; paper: of targets]")


@dataclass(frozen=True)
class Option:
    """An action sampled in a state, by its first reply; how often, and what the critic said of it."""

    reply: Completion
    times: int
    judgement: Judgement | None = None
    q: float | None = None
    episodes: int = 0  # played to judge it
    env_steps: int = 0

    @property
    def action(self) -> str:
        return parse_react(self.reply.text)[1]


@dataclass(frozen=True)
class Choice:
    """A state with its options, in the order first sampled, and the one to learn (None: dropped)."""

    state: Transition
    prompt_ids: tuple[int, ...]
    options: tuple[Option, ...] = ()
    learned: Option | None = None
    unreadable: int = 0  # of the n replies
    dropped: str = ""


Chooser = Callable[[Context, Sequence[Choice]], list[Choice]]


def run(context: Context) -> Outputs:
    """Rows of `judgements` and `targets`. Raises MissingInput without a state, UsageError where no prompt fits."""
    config: PickConfig = context.config
    roles = roles_of(context.run.roles)
    if context.iteration < config.warmup:
        return Outputs({"pick/rows": 0.0})
    check_last_message(context.engine, roles)
    critics = context.inputs.get("critic", ()) or context.inputs.get("q_critic", ())
    order = states_in_order(context, "pick", context.inputs["collect"], critics)
    wanted = min(config.states, len(order))
    choose = chooser(context, roles)
    tries = until_enough(order, wanted, config.tries, partial(attempt, context, roles, choose), learned_keys, too_long)
    choices = [choice for found in tries for choice in found]
    if all(c.dropped == OUT_OF_CONTEXT for c in choices):
        raise nothing_fits("pick", len(choices), context.engine.context)
    kept = [c for c in choices if c.learned]
    drawn = {
        "pick/tries": float(len(tries)),
        "pick/drawn_again": float(len(choices) - len(tries[0])),
        "pick/missing": float(wanted - len(kept)),
    }
    return Outputs(
        metrics(config, choices) | drawn,
        {
            "judgements": [judgement_row(c, o) for c in choices for o in c.options],
            "targets": [target_row(context, roles, c, n) for n, c in enumerate(kept)],
        },
    )


def chooser(context: Context, roles: Roles) -> Chooser:
    """The chooser among options, for the context of a try. It opens what it needs once, on first use."""
    if context.config.by == "verdict":
        return lambda again, choices: by_verdict(again, roles, choices)
    critic = cache(lambda: open_q(context))
    return lambda again, choices: by_value(again, roles, critic, choices)


def attempt(context: Context, roles: Roles, choose: Chooser, drawn: Sequence[Candidate], number: int) -> list[Choice]:
    """The action to learn in each of these states, or why there is none."""
    again = replace(context, seed=mix(context.seed, "again", number)) if number else context
    bar = context.progress("pick actions", 2)
    choices = sampled(again, roles, in_full(context.replay, drawn))
    bar.advance()
    chosen = choose(again, choices)
    bar.advance()
    return chosen


def learned_keys(choices: Sequence[Choice]) -> set[tuple[str, int]]:
    return {c.state.key for c in choices if c.learned}


def sampled(context: Context, roles: Roles, drawn: Sequence[Transition]) -> list[Choice]:
    """n replies in each state, those with the same action as one option."""
    adapter = context.adapter("critic") or context.adapter("q_critic") or context.adapter("distill")
    replies = sampled_actions(context, roles, drawn, adapter, n=context.config.actions)
    found = []
    for t, group in zip(drawn, replies, strict=True):
        reasons = [unreadable(context, t, reply) for _, reply in group]
        options: dict[str, Option] = {}
        for (_, reply), reason in zip(group, reasons, strict=True):
            if not reason:
                one = Option(reply, 1)
                before = options.get(one.action)
                options[one.action] = replace(before, times=before.times + 1) if before else one
        # All prompts of a state are the same one, so either none has room or all have.
        why = "" if options else reasons[0] if reasons[0] == OUT_OF_CONTEXT else UNREADABLE
        found.append(Choice(t, group[0][0], tuple(options.values()), None, reasons.count(UNREADABLE), why))
    return found


def by_verdict(context: Context, roles: Roles, choices: Sequence[Choice]) -> list[Choice]:
    """NLQL and NLRL: the critic's word on every option, and each state's best one."""
    k, seed = context.config.futures, mix(context.seed, "judge")
    options = [(c.state, o) for c in choices for o in c.options]
    if context.config.futures_of == "rollouts":
        rolled = judge_rolled(context, roles, [(t, o.reply) for t, o in options], n=k, seed=seed)
        judged = [
            replace(o, judgement=one.judgement, episodes=one.episodes, env_steps=one.env_steps)
            for (_, o), one in zip(options, rolled, strict=True)
        ]
    else:
        words = judge(context, roles, [(t.state, o.action) for t, o in options], k=k, seed=seed)
        judged = [replace(o, judgement=one) for (_, o), one in zip(options, words, strict=True)]
    return with_best_judged(choices, judged)


def with_best_judged(choices: Sequence[Choice], judged: Sequence[Option]) -> list[Choice]:
    """judged: the options of all choices, in order. One without a readable word is never chosen."""
    said, found = iter(judged), []
    for c in choices:
        options = tuple(next(said) for _ in c.options)
        verdicts = [o.judgement.verdict for o in options if o.judgement]
        readable = [o for o, verdict in zip(options, verdicts, strict=True) if verdict != "malformed"]
        # The first of equals: max takes it.
        best = max(
            readable, key=lambda o: (o.judgement is not None and o.judgement.verdict == "yes", o.times), default=None
        )
        too_long = all(o.judgement and o.judgement.out_of_context for o in options)
        why = c.dropped or ("" if best else OUT_OF_CONTEXT if too_long else "unreadable critique")
        found.append(replace(c, options=options, learned=best, dropped=why))
    return found


def by_value(context: Context, roles: Roles, critic: Callable[[], QCritic], choices: Sequence[Choice]) -> list[Choice]:
    """SAC: Q of every option, and one drawn in each state with p ~ times exp(Q / tau)."""
    prompts = q_prompts(context, roles, [(c.state.state, o.action) for c in choices for o in c.options])
    read = [ids for ids in prompts if ids]
    known = iter(q_values(critic().model, critic().head, read) if read else ())
    numbers, found = iter([next(known) if ids else None for ids in prompts]), []
    for c in choices:
        options = tuple(replace(o, q=next(numbers)) for o in c.options)
        readable = [o for o in options if o.q is not None]
        chance = np.random.default_rng(mix(context.seed, "pick", *c.state.key))
        learned = readable[chance.choice(len(readable), p=chances(readable, context.config.tau))] if readable else None
        why = c.dropped or ("" if learned else OUT_OF_CONTEXT)
        found.append(replace(c, options=options, learned=learned, dropped=why))
    return found


def chances(options: Sequence[Option], tau: float) -> NDArray[np.float64]:
    """p_i = times_i exp(Q_i / tau) / sum_j times_j exp(Q_j / tau). tau -> 0: the largest Q; tau -> inf: as sampled."""
    q = np.array([float(o.q or 0.0) for o in options])
    weights = np.array([o.times for o in options]) * np.exp((q - q.max()) / tau)
    return np.asarray(weights / weights.sum())


def metrics(config: PickConfig, choices: Sequence[Choice]) -> dict[str, float]:
    options = [o for c in choices for o in c.options]
    kept = [c.learned for c in choices if c.learned]
    found = {
        "pick/states": float(len(choices)),
        "pick/rows": float(len(kept)),
        "pick/dropped": float(sum(bool(c.dropped) for c in choices)),
        "pick/unreadable": float(sum(c.unreadable for c in choices)),
        "pick/out_of_context": float(sum(c.dropped == OUT_OF_CONTEXT for c in choices)),
        "pick/actions": float(config.actions),
        "pick/episodes": float(sum(o.episodes for o in options)),
        "pick/env_steps": float(sum(o.env_steps for o in options)),
        "pick/options": len(options) / max(sum(bool(c.options) for c in choices), 1),
    }
    verdicts = [o.judgement.verdict for o in options if o.judgement]
    picked = [o.judgement.verdict for o in kept if o.judgement]
    if verdicts:
        found["pick/yes_rate"] = verdicts.count("yes") / len(verdicts)
        found["pick/picked_yes_rate"] = picked.count("yes") / max(len(picked), 1)
    if config.by == "value":
        known = [[o.q for o in c.options if o.q is not None] for c in choices]
        spreads = [max(q) - min(q) for q in known if q]
        found["pick/tau"] = config.tau
        found["pick/q"] = sum(o.q or 0.0 for o in kept) / max(len(kept), 1)
        found["pick/q_spread"] = sum(spreads) / max(len(spreads), 1)
    return found


def judgement_row(c: Choice, o: Option) -> Row:
    j = o.judgement or Judgement((), "" if o.q is None else f"Q = {o.q:.3f}", "malformed" if o.q is None else "none")
    return {
        "episode_id": c.state.episode_id, "turn": c.state.turn, "state_len": len(c.state.state), "action": o.reply.text, "futures": list(j.futures),
        "critique": j.critique, "verdict": j.verdict, "refined": "", "info": {"times": o.times, "picked": o is c.learned},
    }  # fmt: skip


def target_row(context: Context, roles: Roles, c: Choice, number: int) -> Row:
    """The policy's own prompt and the reply as it was sampled: there is no teacher."""
    assert c.learned is not None
    j = c.learned.judgement
    return policy_row(
        context, roles, c.state, c.prompt_ids, c.learned.reply, raw=c.learned.reply, teacher=((), ()),
        privileged=[j.critique, *j.futures] if j else [], number=number, kept=True, times=c.learned.times,
    )  # fmt: skip


STAGE = Stage(
    "pick", 1, PickConfig, inputs=("collect", "critic", "q_critic", "distill"), run=run, outputs=("judgements", "targets"),
    roles=("policy", "successor", "combine", "evaluator", "corrector"),
)  # fmt: skip
