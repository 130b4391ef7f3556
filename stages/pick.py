"""Choose among sampled actions instead of rewriting one: the best of n is what the policy should learn.

    a_1..a_n ~ pi(.|s),   a_r = best of a_1..a_n

What is best is what differs between the baselines of arXiv 2512.04601 that search by sampling (`by`):

    verdict   NLQL: the language critic's word, "Yes" before "No"; among equals what was sampled most often, then first

NLQL is an ablation of its second version (n = 4); n is logged, since action search is what differs from NLAC. States
are drawn as refine draws them, and rows are refine's: distill cannot tell them apart. [ours]

    turnwise run demo_nlql
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from pydantic import Field

from stages.frame.contract import Context, Outputs, Stage
from stages.frame.react import parse_react
from stages.frame.types import Completion, Row
from stages.judge.critique import Judgement, judge
from stages.judge.fresh import StatesConfig, policy_row, sampled_actions, states_in_order, unreadable
from stages.judge.refinement import UNREADABLE
from stages.llm.last_message import check_last_message
from stages.llm.roles import Roles, mix, roles_of
from stages.llm.tokens import OUT_OF_CONTEXT, nothing_fits
from stages.play.drawing import until_enough
from stages.play.transitions import Candidate, Transition, in_full


class PickConfig(StatesConfig):
    """Among how many actions is chosen, and by what."""

    by: Literal["verdict"] = Field(
        "verdict",
        description="What the best action is chosen by: the language critic's verdict (NLQL). [paper: v2's NLQL]",
    )
    actions: int = Field(4, ge=1, description="n, actions sampled in a state. [paper: 4 of NLQL]")
    futures: int = Field(1, ge=1, description="k, futures that the evaluator reads, for by = verdict. [paper: 1]")


@dataclass(frozen=True)
class Option:
    """An action that was sampled in a state so many times, by its first reply, and what was said of it."""

    reply: Completion
    times: int
    judgement: Judgement | None = None

    @property
    def action(self) -> str:
        return parse_react(self.reply.text)[1]


@dataclass(frozen=True)
class Choice:
    """One state with its options, in the order in which they were first sampled, and the one to be learned (None:
    dropped).
    """

    state: Transition
    prompt_ids: tuple[int, ...]
    options: tuple[Option, ...] = ()
    learned: Option | None = None
    unreadable: int = 0  # of the n replies
    dropped: str = ""


def run(context: Context) -> Outputs:
    """Rows of `judgements`, and of `targets` with role "policy". Raises MissingInput without a state, UsageError where
    no prompt fits.
    """
    config: PickConfig = context.config
    roles = roles_of(context.run.roles)
    if context.iteration < config.warmup:
        return Outputs({"pick/rows": 0.0})
    check_last_message(context.engine, roles)
    order = states_in_order(context, "pick", context.inputs["collect"], context.inputs.get("critic", ()))
    wanted = min(config.states, len(order))
    tries = until_enough(order, wanted, config.tries, partial(attempt, context, roles), learned_keys, too_long)
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


def attempt(context: Context, roles: Roles, drawn: Sequence[Candidate], number: int) -> list[Choice]:
    """What comes of these states: an action to be learned each, or why there is none."""
    again = replace(context, seed=mix(context.seed, "again", number)) if number else context
    bar = context.progress("pick actions", 2)
    choices = sampled(again, roles, in_full(context.replay, drawn))
    bar.advance()
    judged = by_verdict(again, roles, choices)
    bar.advance()
    return judged


def learned_keys(choices: Sequence[Choice]) -> set[tuple[str, int]]:
    return {c.state.key for c in choices if c.learned}


def too_long(choices: Sequence[Choice]) -> set[tuple[str, int]]:
    """Keys of the states that have no room in the model's context, however often they are drawn."""
    return {c.state.key for c in choices if c.dropped == OUT_OF_CONTEXT}


def sampled(context: Context, roles: Roles, drawn: Sequence[Transition]) -> list[Choice]:
    """n replies in each state, those with the same action as one option."""
    replies = sampled_actions(context, roles, drawn, context.adapter("critic"), n=context.config.actions)
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
    """NLQL: the critic's word on every option, and the best judged one of each state."""
    pairs = [(c.state.state, o.action) for c in choices for o in c.options]
    words = judge(context, roles, pairs, k=context.config.futures, seed=mix(context.seed, "judge"))
    return with_best_judged(choices, words)


def with_best_judged(choices: Sequence[Choice], words: Sequence[Judgement]) -> list[Choice]:
    """words: one an option, in order. An option without a readable one is never chosen."""
    said, found = iter(words), []
    for c in choices:
        options = tuple(replace(o, judgement=next(said)) for o in c.options)
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
        "pick/options": len(options) / max(sum(bool(c.options) for c in choices), 1),
    }
    verdicts = [o.judgement.verdict for o in options if o.judgement]
    picked = [o.judgement.verdict for o in kept if o.judgement]
    if verdicts:
        found["pick/yes_rate"] = verdicts.count("yes") / len(verdicts)
        found["pick/picked_yes_rate"] = picked.count("yes") / max(len(picked), 1)
    return found


def judgement_row(c: Choice, o: Option) -> Row:
    j = o.judgement or Judgement((), "", "malformed")
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
    "pick", 1, PickConfig, inputs=("collect", "critic"), roles=("policy", "successor", "evaluator"), run=run,
    outputs=("judgements", "targets"),
)  # fmt: skip
