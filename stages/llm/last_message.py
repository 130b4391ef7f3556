"""Check how a chat template renders a message after a conversation: a role's words, or the question for a value.

Ours. Chat templates raise on some orders of messages, leave messages out, or change earlier ones. The model then reads
something else than was asked, without an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from stages.frame.types import ChatRefused, Engine, Message, UsageError
from stages.llm.roles import Roles

_TALK: tuple[Message, ...] = (
    {"role": "system", "content": "Desk."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "<think>\nOne.\n</think>\n\nThought: one. Action: two"},
    {"role": "user", "content": "Done."},
)


def check_last_message(engine: Engine, roles: Roles) -> None:
    """Raises UsageError where a role's message cannot stand behind the conversation as the policy saw it."""
    if roles.history == "text":
        return
    seen = roles.policy(_TALK)
    before, reason = engine.encode(seen), ""
    try:
        once, twice = (engine.encode([*seen, {"role": "user", "content": said}]) for said in ("Judge.", "Judge. Pass."))
    except ChatRefused as error:
        reason = f"refuses it ({error.reason})"
    else:
        if once == twice:
            reason = "leaves it out"
        # What ends the prompt, ready for a reply, stands behind the message.
        elif _same(before, once) + _same(before[::-1], once[::-1]) < len(before):
            reason = "changes what stands before it"
    if reason:
        raise UsageError(
            f"model.path: a role's message comes last, as a user's, but the chat template {reason}. Set roles.history to text, or use a model with another template"
        )


def asked_after(engine: Engine, text: str) -> tuple[int, ...]:
    """The ids of a user message `text` after a prompt: the end of the assistant's open turn, the message, and the start
    of the next turn.

    Raises UsageError if the chat template leaves the message out, ChatRefused if it refuses the chat.
    """

    def chat(reply: str, said: str) -> tuple[int, ...]:
        return engine.encode(
            [
                {"role": "user", "content": "."},
                {"role": "assistant", "content": reply},
                {"role": "user", "content": said},
            ]
        )

    # Behind two replies that end in different letters all is the same.
    rendered, other = chat(text, text), chat(text.rstrip(text[-1:]), text)
    found = rendered[len(rendered) - _same(rendered[::-1], other[::-1]) :]
    if rendered == other or found == chat(text, f"{text} {text}")[-len(found) :]:
        raise UsageError(
            "model.path: the chat template leaves out the message that asks for a value. Use a model with another template, or set self_ac.soft_prompt"
        )
    return found


def _same(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
