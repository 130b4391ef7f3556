"""Rewrite actions from the critic's words. After "Optimality: No" the policy learns the refiner's action.

    a ~ pi(.|s),   f_1..f_k ~ M(.|s, a),   e = E(s, a, f_1..f_k),   a_r ~ refiner(s, a, e);      "Yes": a_r = a

Source: arXiv 2512.04601, section 4 (policy improvement) and Algorithm 1. Ours: a is sampled afresh, and further states
replace what is dropped. The options `yes_frac_max`, `gate` and `critique` (off) are ours, too.

    turnwise rerun refine --of RUN --set refine.futures=4
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from pydantic import Field

from stages.frame.contract import Context, Outputs, Stage
from stages.frame.react import parse_react, thought_of
from stages.frame.types import Message, Row, UsageError
from stages.judge.asking import ask_role
from stages.judge.critique import Judgement, judge, verdicts
from stages.judge.fresh import StatesConfig, policy_row, sampled_actions, states_in_order, too_long, unreadable
from stages.judge.gate import Trial, no_worse
from stages.judge.refinement import Refinement, cap_yes, drawn_again, judgement_row, metrics
from stages.judge.rethink import Unthought, think_again
from stages.judge.rolled import lived_actions, lived_futures
from stages.llm.last_message import check_last_message
from stages.llm.roles import NO_ROOM, Roles, mix, roles_of
from stages.llm.tokens import OUT_OF_CONTEXT, nothing_fits
from stages.play.drawing import until_enough
from stages.play.transitions import Candidate, Transition, in_full


class RefineConfig(StatesConfig):
    """How many states are refined, and how far the critic is trusted."""

    futures: int = Field(1, ge=1, description="k, futures that the evaluator reads. [paper: 1]")
    futures_of: Literal["successor", "episode"] = Field(
        "successor",
        description="Whose futures are read. successor: those that the trained successor predicts for a fresh action. episode: what really followed the action that the episode took. "
        "[paper: the successor's; v2 has the other as an ablation, self-distillation]",
    )
    refinements: int = Field(1, ge=1)
    """m, refinements of an action judged No; more than one needs roles.judge_temperature above 0. [paper: 1]"""
    correct: bool = Field(True, description="CoT correction of the refined action. [paper]")
    rethink: bool = Field(
        True,
        description="For a policy that thinks (<think>): write a new thought before a rewritten action, from what the policy knows. Off: an empty thought. "
        "[paper: its chain of thought is corrected; how: ours]",
    )
    leak_words: int = Field(8, ge=2)
    """A new thought that repeats this many successive words of a critique or future is dropped with its row. [ours]"""
    yes_frac_max: float = Field(1.0, ge=0, le=1)
    """Largest share of rows whose action was kept because of "Yes". [ours; paper: no limit]"""
    critique: Literal["full", "verdict", "none"] = "full"
    """What the refiner sees: the full critique, or only the verdict; none = no critic, every action is rewritten. [ours, ablation]"""
    gate: Literal["none", "evaluate", "reroll"] = "none"
    """When a refined action replaces the fresh one. evaluate: if the critic now says Yes. reroll: if its rollouts are no worse. none: always. [ours; paper: none]"""
    refused: Literal["kept", "dropped"] = "kept"
    """What is learned if the gate refuses all rewrites. kept: the fresh action. dropped: nothing, and another state is drawn. [ours]"""
    gate_rollouts: int = Field(8, ge=1, description="Rollouts an action, for gate = reroll. [ours]")


def run(context: Context) -> Outputs:
    """Rows of `judgements` and `targets`. Raises MissingInput without a state, UsageError where no prompt fits."""
    config: RefineConfig = context.config
    roles = roles_of(context.run.roles)
    if config.refinements > 1 and context.run.roles.rewriting_temperature == 0:
        raise UsageError(
            "refine.refinements is above 1, but the refiner's temperature is 0 and all would be equal. Raise roles.refiner_temperature"
        )
    if context.iteration < config.warmup:
        return Outputs({"refine/rows": 0.0})
    check_last_message(context.engine, roles)
    order = states_in_order(context, "refine", context.inputs["collect"], context.inputs.get("critic", ()))
    wanted = min(config.states, len(order))
    attempts = partial(attempt, context, roles, {t.key: t for t in order})
    tries = until_enough(order, wanted, config.tries, attempts, partial(to_learn, context), too_long)
    refined = [r for rows in tries for r in rows]
    if all(r.dropped == OUT_OF_CONTEXT for r in refined):
        raise nothing_fits("refine", len(refined), context.engine.context)
    kept = cap_yes(refined, config.yes_frac_max, random.Random(context.seed))
    return Outputs(
        metrics(refined, kept) | drawn_again(tries, kept, wanted),
        {
            "judgements": [judgement_row(r) for r in refined],
            "targets": [target_row(context, roles, r, n) for n, r in enumerate(kept)],
        },
    )


def attempt(
    context: Context, roles: Roles, pool: Mapping[tuple[str, int], Candidate], drawn: Sequence[Candidate], number: int
) -> list[Refinement]:
    """The action to learn in each state, m of them if the critic said No, or why there is none."""
    again = replace(context, seed=mix(context.seed, "again", number)) if number else context
    bar = context.progress("refine actions, role by role", 3)
    if context.config.futures_of == "episode":
        judged = judge_lived(again, roles, drawn, pool)
        bar.advance(2)
    else:
        fresh = fresh_actions(again, roles, in_full(context.replay, drawn))
        bar.advance()
        judged = judge_all(again, roles, fresh)
        bar.advance()
    refined = refine_all(again, roles, judged)
    bar.advance()
    return gated(again, roles, refined) if context.config.gate != "none" else refined


def to_learn(context: Context, refined: Sequence[Refinement]) -> set[tuple[str, int]]:
    """Keys of the states that leave a row."""
    return {r.state.key for r in cap_yes(refined, context.config.yes_frac_max, random.Random(context.seed))}


def fresh_actions(context: Context, roles: Roles, drawn: Sequence[Transition]) -> list[Refinement]:
    replies = sampled_actions(context, roles, drawn, context.adapter("critic"))
    found = [Refinement(t, ids, reply) for t, [(ids, reply)] in zip(drawn, replies, strict=True)]
    return [replace(r, dropped=unreadable(context, r.state, r.action)) for r in found]


def judge_all(context: Context, roles: Roles, fresh: Sequence[Refinement]) -> list[Refinement]:
    """The critic's word on every readable action. Without a critic, every action is rewritten."""
    config: RefineConfig = context.config
    live = [r for r in fresh if not r.dropped]
    pairs = [(r.state.state, parse_react(r.action.text)[1]) for r in live]
    if config.critique == "none":
        words = [Judgement((), "Optimality: No.", "no") for _ in pairs]
    else:
        words = judge(context, roles, pairs, k=config.futures, seed=mix(context.seed, "judge"))
    judged = iter(words)
    return [r if r.dropped else with_verdict(replace(r, judgement=next(judged))) for r in fresh]


def judge_lived(
    context: Context, roles: Roles, drawn: Sequence[Candidate], pool: Mapping[tuple[str, int], Candidate]
) -> list[Refinement]:
    """The evaluator's word on the actions that the episodes took, after it read what followed."""
    states = in_full(context.replay, drawn)
    lived = [Refinement(t, *one) for t, one in zip(states, lived_actions(context, states), strict=True)]
    lived = [replace(r, dropped=unreadable(context, r.state, r.action)) for r in lived]
    live = [i for i, r in enumerate(lived) if not r.dropped]
    came = dict(zip(live, lived_futures(context, roles, [drawn[i] for i in live], pool), strict=True))
    lived = [replace(r, dropped=came[i].dropped) if i in came else r for i, r in enumerate(lived)]
    told = [i for i in live if not lived[i].dropped]
    pairs = [(lived[i].state.state, parse_react(lived[i].action.text)[1]) for i in told]
    futures = [[future] for i in told if (future := came[i].target)]
    adapter, seed = context.adapter("distill"), mix(context.seed, "judge")
    for i, judgement in zip(told, verdicts(context, roles, pairs, futures, adapter=adapter, seed=seed), strict=True):
        lived[i] = with_verdict(replace(lived[i], judgement=judgement))
    return lived


def with_verdict(r: Refinement) -> Refinement:
    assert r.judgement is not None
    if r.judgement.verdict == "malformed":
        return replace(r, dropped=OUT_OF_CONTEXT if r.judgement.out_of_context else "unreadable critique")
    return replace(r, raw=r.action, learned=r.action) if r.judgement.verdict == "yes" else r


def refine_all(context: Context, roles: Roles, judged: Sequence[Refinement]) -> list[Refinement]:
    """m rewritten actions for every "No", each corrected; unreadable ones are dropped and counted."""
    s, config = context.run.roles, context.config
    adapter = None if s.frozen == "base" else context.adapter("critic") or context.adapter("distill")
    todo = [r for r in judged if not r.dropped and r.learned is None for _ in range(config.refinements)]
    prompts = [refiner_prompt(roles, r, config.critique) for r in todo]
    replies = ask_role(context, "refiner", prompts, adapter=adapter, seed=mix(context.seed, "refine"))
    rewritten = [
        replace(r, teacher=(ids, tuple(prompt)), raw=reply, learned=reply)
        for r, prompt, (ids, reply) in zip(todo, prompts, replies, strict=True)
    ]
    if config.correct:
        # Where there are no words to be corrected, a corrector would make some up.
        prompts = [
            roles.prompt("corrector", r.state.state, text=r.raw.text) for r in rewritten if r.raw and r.raw != NO_ROOM
        ]
        seed, room = mix(context.seed, "correct"), s.action_room
        replies = ask_role(context, "corrector", prompts, adapter=adapter, seed=seed, room=room)
        corrected = iter(replies)
        rewritten = [r if r.raw == NO_ROOM else replace(r, learned=next(corrected)[1]) for r in rewritten]
    rewritten = [replace(r, dropped=unreadable(context, r.state, r.learned)) for r in rewritten if r.learned]
    if config.rethink:
        rewritten = with_thoughts(context, roles, rewritten, adapter)
    return [r for r in judged if r.dropped or r.learned is not None] + rewritten


def with_thoughts(
    context: Context, roles: Roles, rewritten: Sequence[Refinement], adapter: str | None
) -> list[Refinement]:
    """A new thought before each rewritten action, if the policy thought there, or why there is none."""
    plain = {
        i: Unthought(r.state.state, r.learned.text, (r.judgement.critique, *r.judgement.futures))
        for i, r in enumerate(rewritten)
        if r.learned and r.judgement and not r.dropped and thought_of(r.action.text)
    }
    thought = think_again(context, roles, [*plain.values()], adapter=adapter, words=context.config.leak_words)
    again = dict(zip(plain, thought, strict=True))
    return [replace(r, learned=again[i][0], dropped=again[i][1]) if i in again else r for i, r in enumerate(rewritten)]


def refiner_prompt(roles: Roles, r: Refinement, critique: str) -> list[Message]:
    thought, action = parse_react(r.action.text)
    assert r.judgement is not None
    evaluation = r.judgement.critique if critique == "full" else "Optimality: No."
    return roles.prompt("refiner", r.state.state, action=action, thought=thought, evaluation=evaluation)


def gated(context: Context, roles: Roles, refined: Sequence[Refinement]) -> list[Refinement]:
    """If the gate refuses all rewrites of an action, keep the fresh one once, or nothing (`refused`).

    A kept action is one that the critic said No to, so it is mostly wrong. Dropping has a cost, too: a critic that says
    No to everything at some step removes its states from training. The policy may then forget how to act there.
    """
    config: RefineConfig = context.config
    new = [(r, r.learned) for r in refined if not r.dropped and not r.kept_action and r.learned]
    if config.gate == "evaluate":
        pairs = [(r.state.state, parse_react(learned.text)[1]) for r, learned in new]
        words = judge(context, roles, pairs, k=config.futures, seed=mix(context.seed, "gate"))
        trials = [Trial(j.verdict == "yes") for j in words]
    else:
        trials = no_worse(context, roles, [(r.state, r.action, learned) for r, learned in new], config.gate_rollouts)
    settled = {id(r.action) for (r, _), trial in zip(new, trials, strict=True) if trial.passed}
    found = [r for r in refined if r.dropped or r.kept_action]
    for (one, learned), trial in zip(new, trials, strict=True):
        r = replace(one, episodes=trial.episodes, env_steps=trial.env_steps)
        if trial.passed:
            found.append(r)
        elif id(r.action) in settled or config.refused == "dropped":
            # Another rewrite stands for this action, or the fresh one does, or none.
            found.append(replace(r, refused=learned.text, dropped="gate"))
        else:
            settled.add(id(r.action))
            found.append(replace(r, raw=r.action, learned=r.action, refused=learned.text))
    return found


def target_row(context: Context, roles: Roles, r: Refinement, number: int) -> Row:
    """The student's prompt is the policy's own. The teacher's is the refiner's, with the critique in it."""
    assert r.learned is not None and r.raw is not None and r.judgement is not None
    return policy_row(
        context, roles, r.state, r.prompt_ids, r.learned, raw=r.raw, teacher=r.teacher,
        privileged=[r.judgement.critique, *r.judgement.futures], number=number, kept=r.kept_action,
    )  # fmt: skip


STAGE = Stage(
    "refine", 7, RefineConfig, inputs=("collect", "critic", "distill"), run=run,
    roles=("policy", "successor", "combine", "evaluator", "refiner", "corrector", "thinker"),
    outputs=("judgements", "targets"), shares=True,
)  # fmt: skip
