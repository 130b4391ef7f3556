"""Write a chain of thought for a rewritten action, from what the policy knows.

The paper corrects a chain of thought that was written with privileged knowledge. A reasoning model's thought can be a
page of free prose, and a corrector would have to rewrite every sentence. So here the model thinks anew. It sees the
policy's own prompt and the action to arrive at, and nothing else that the teacher knew. The engine returns reply and
thought in one piece, so the learned ids are those it produced.
Source: rationales with the answer as a hint, learned without it: STaR, arXiv 2203.14465; its use here is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stages.frame.contract import Context
from stages.frame.react import parse_react, thought_of, without_thought
from stages.frame.types import Completion, Malformed, Message
from stages.judge.asking import ask_role
from stages.llm.pieces import leaked_piece
from stages.llm.roles import NO_ROOM, Roles, mix, policy_text
from stages.llm.tokens import OUT_OF_CONTEXT
from stages.play.environment import read_action

LEAK = "leak in the thought"
LOST = ("thought cut short", "another action", "no thought")
"""Why a row is dropped for its new thought: it repeats what only the teacher knew; or the reply is not what it was to be."""


@dataclass(frozen=True)
class Unthought:
    """A reply without a thought, for a state; privileged: the texts from which it was made."""

    state: tuple[Message, ...]
    said: str
    privileged: tuple[str, ...]


def think_again(
    context: Context, roles: Roles, replies: Sequence[Unthought], *, adapter: str | None, words: int
) -> list[tuple[Completion, str]]:
    """Each reply with a new thought before it, as the engine produced it, and why it cannot be learned ("": it can).

    words: the thought may not share this many successive words with a privileged text or with the instruction. Words
    that also stand in the state or in the reply are allowed.
    """
    prompts = [roles.prompt("thinker", r.state, reply=r.said) for r in replies]
    found = ask_role(context, "thinker", prompts, adapter=adapter, seed=mix(context.seed, "think"), thoughts=True)
    return [(reply, _flaw(context, roles, r, reply, words)) for r, (_, reply) in zip(replies, found, strict=True)]


def _flaw(context: Context, roles: Roles, r: Unthought, reply: Completion, words: int) -> str:
    cut, other, none = LOST
    if reply == NO_ROOM:
        return OUT_OF_CONTEXT
    if reply.finish_reason != "stop":
        return cut
    try:
        action = read_action(context, r.state, without_thought(reply.text))[1]
    except Malformed:
        return other
    if action != parse_react(r.said)[1]:
        return other
    if not thought_of(reply.text):
        return none
    instruction = roles.templates["thinker"].format(reply="")
    known = f"{policy_text(roles, r.state)}\n{r.said}"
    return LEAK if leaked_piece(reply.text, [*r.privileged, instruction], known, words=words) else ""
