"""Ask a role with the run's config: its temperature and the length of its reply. Ours."""

from __future__ import annotations

from collections.abc import Sequence

from stages import envs
from stages.frame.contract import Context
from stages.frame.types import Completion, Message
from stages.llm.roles import ask
from stages.llm.tokens import ChatTokenizer

ACTIONS = ("policy", "refiner", "thinker")
"""Roles whose reply is an action; that of the others is a future, critique or correction."""


def ask_role(
    context: Context, role: str, prompts: Sequence[Sequence[Message]], *, adapter: str | None, seed: int,
    temperature: float | None = None, room: int | None = None, thoughts: bool = False,
) -> list[tuple[tuple[int, ...], Completion]]:  # fmt: skip
    """As `roles.ask`, or by code (`roles.oracle`). temperature, room: where they are not those of the role."""
    s = context.run.roles
    if role == s.oracle:
        return perfect_replies(context, role, prompts)
    own = {"policy": s.policy_temperature, "successor": s.future_temperature, "refiner": s.rewriting_temperature}
    return ask(
        context.engine, prompts, role=role, adapter=adapter, seed=seed, thoughts=thoughts,
        temperature=own.get(role, s.judge_temperature) if temperature is None else temperature,
        max_tokens=room or (s.action_room if role in ACTIONS else s.future_room),
    )  # fmt: skip


def perfect_replies(
    context: Context, role: str, prompts: Sequence[Sequence[Message]]
) -> list[tuple[tuple[int, ...], Completion]]:
    """What the environment's perfect role says, as if an engine had been sure of it. Raises UsageError where it has none."""
    task, chats = context.run.task, ChatTokenizer(context.run.model.path)
    said = [envs.perfect(task.env, task.options, role, prompt) for prompt in prompts]
    replies = [(text, chats.reply_ids(text)) for text in said]
    whole = [Completion(text, ids, (0.0,) * len(ids), "stop") for text, ids in replies]
    return list(zip(context.engine.encode_all(prompts), whole, strict=True))
