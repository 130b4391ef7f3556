"""Ask a role with the run's config: its temperature and the length of its reply. Ours."""

from __future__ import annotations

from collections.abc import Sequence

from stages.frame.contract import Context
from stages.frame.types import Completion, Message
from stages.llm.roles import ask

ACTIONS = ("policy", "refiner", "thinker")
"""Roles whose reply is an action; that of the others is a future, critique or correction."""


def ask_role(
    context: Context, role: str, prompts: Sequence[Sequence[Message]], *, adapter: str | None, seed: int,
    temperature: float | None = None, room: int | None = None, thoughts: bool = False,
) -> list[tuple[tuple[int, ...], Completion]]:  # fmt: skip
    """As `roles.ask`. temperature, room: where they are not those of the role."""
    s = context.run.roles
    own = {"policy": s.policy_temperature, "successor": s.future_temperature, "refiner": s.rewriting_temperature}
    return ask(
        context.engine, prompts, role=role, adapter=adapter, seed=seed, thoughts=thoughts,
        temperature=own.get(role, s.judge_temperature) if temperature is None else temperature,
        max_tokens=room or (s.action_room if role in ACTIONS else s.future_room),
    )  # fmt: skip
