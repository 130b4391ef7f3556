"""The language critic at work: k futures of (s, a) from the successor, and the evaluator's verdict on them.

Source: arXiv 2512.04601, section 4: e ~ E(s, a, f_1..f_k). Used by refine (to improve) and by evaluate (to be audited).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stages.contract import Context
from stages.llm.roles import Roles, ask, history_text, mix, parse_evaluation, parse_future
from stages.types import Malformed, Message


@dataclass(frozen=True)
class Judgement:
    """futures as predicted, the critique in words, and its verdict: "yes", "no" or "malformed"."""

    futures: tuple[str, ...]
    critique: str
    verdict: str


def judge(context: Context, roles: Roles, pairs: Sequence[tuple[Sequence[Message], str]], *, k: int, seed: int) -> list[Judgement]:
    """The critic's word on each (state, action), in order. An unreadable future or verdict makes a "malformed" judgement."""
    s = context.run.roles
    adapter = context.adapter("critic")
    prompts = [roles.prompt("successor", history=history_text(state), action=action, thought="") for state, action in pairs for _ in range(k)]
    replies = ask(
        context.engine, prompts, adapter=adapter, temperature=s.future_temperature, max_tokens=s.max_future_tokens, seed=mix(seed, "future")
    )
    futures = [[reply.text for _, reply in replies[i * k : (i + 1) * k]] for i in range(len(pairs))]
    prompts = [
        roles.prompt("evaluator", history=history_text(state), action=action, thought="", futures="\n".join(texts))
        for (state, action), texts in zip(pairs, futures, strict=True)
    ]
    judge_adapter = None if s.frozen == "base" else adapter
    verdicts = ask(
        context.engine, prompts, adapter=judge_adapter, temperature=s.judge_temperature, max_tokens=s.max_future_tokens, seed=mix(seed, "verdict")
    )
    return [judgement(texts, reply.text) for texts, (_, reply) in zip(futures, verdicts, strict=True)]


def judgement(futures: Sequence[str], critique: str) -> Judgement:
    try:
        for future in futures:
            parse_future(future)
        verdict = "yes" if parse_evaluation(critique).optimal else "no"
    except Malformed:
        verdict = "malformed"
    return Judgement(tuple(futures), critique, verdict)
