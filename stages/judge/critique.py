"""The language critic at work: k futures of (s, a) from the successor, and the evaluator's verdict on them.

Source: arXiv 2512.04601, section 4: e ~ E(s, a, f_1..f_k). Used by refine (to improve) and by evaluate (to be audited).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stages.frame.contract import Context
from stages.frame.types import Completion, Malformed, Message
from stages.judge.asking import ask_role
from stages.judge.backup import successor_prompt
from stages.llm.roles import NO_ROOM, Roles, complete_future, mix, parse_evaluation


@dataclass(frozen=True)
class Judgement:
    """Futures as predicted, the critique, and its verdict: "yes", "no" or "malformed", also of what did not fit."""

    futures: tuple[str, ...]
    critique: str
    verdict: str
    out_of_context: bool = False


def judge(
    context: Context, roles: Roles, pairs: Sequence[tuple[Sequence[Message], str]], *, k: int, seed: int
) -> list[Judgement]:
    """The critic's word on each (state, action), in order; "malformed" where a future or verdict is unreadable."""
    adapter = context.adapter("critic")
    prompts = [successor_prompt(roles, state, action) for state, action in pairs for _ in range(k)]
    replies = ask_role(context, "successor", prompts, adapter=adapter, seed=mix(seed, "future"))
    futures = [[reply for _, reply in replies[i * k : (i + 1) * k]] for i in range(len(pairs))]
    return verdicts(context, roles, pairs, futures, adapter=adapter, seed=seed)


def verdicts(
    context: Context,
    roles: Roles,
    pairs: Sequence[tuple[Sequence[Message], str]],
    futures: Sequence[Sequence[Completion]],
    *,
    adapter: str | None,
    seed: int,
) -> list[Judgement]:
    """The evaluator's word on each (state, action) after its futures. adapter: not used with `roles.frozen` "base"."""
    prompts = [
        roles.prompt("evaluator", state, action=action, thought="", futures="\n".join(reply.text for reply in group))
        for (state, action), group in zip(pairs, futures, strict=True)
    ]
    adapter = None if context.run.roles.frozen == "base" else adapter
    replies = ask_role(context, "evaluator", prompts, adapter=adapter, seed=mix(seed, "verdict"))
    return [judgement(group, reply) for group, (_, reply) in zip(futures, replies, strict=True)]


def judgement(futures: Sequence[Completion], critique: Completion) -> Judgement:
    try:
        for future in futures:
            complete_future(future)
        verdict = "yes" if parse_evaluation(critique.text).optimal else "no"
    except Malformed:
        verdict = "malformed"
    return Judgement(tuple(future.text for future in futures), critique.text, verdict, NO_ROOM in (*futures, critique))
