"""A run's environment, and the replies it can read. An LLM inside it (oracle, simulated user) is passed in as a
function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from stages import envs
from stages.frame.border import broken_character
from stages.frame.contract import Context
from stages.frame.react import parse_react, without_thought
from stages.frame.types import Ask, Env, Malformed, Message, Request, SimulatorError, UsageError
from stages.llm.cassette import recorded
from stages.llm.roles import mix, thought_opened
from stages.llm.tokens import has_room


def environment(context: Context) -> Callable[[], Env]:
    """The task's environment, with its oracle or simulated user handed in as a function where it needs one."""
    task, model = context.run.task, context.run.model
    ask: Ask | None = None
    room = task.oracle_tokens + context.run.roles.max_thought_tokens
    if task.oracle == "engine":

        def ask(messages: Sequence[Message], *, temperature: float = 0.0, seed: int = 0) -> str:
            ids = context.engine.encode(messages)
            if not has_room(ids, context.engine.context):
                raise SimulatorError(
                    f"the model inside the environment was asked {len(ids)} tokens, which leaves no room in its {context.engine.context}"
                )
            request = Request(ids, room, temperature, mix(context.seed, seed, ids), role="user")
            reply = context.engine.generate([request])[0]
            return thought_opened(context.engine.decode, ids) + reply.text

    elif task.oracle == "openai":
        from stages.llm.openai import chat

        key = "model.url" if model.url and not task.oracle_url else "task.oracle_url"
        ask = chat(
            task.oracle_url or model.url, task.oracle_model or model.path, max_tokens=room,
            timeout_s=task.oracle_timeout_s, concurrency=task.oracle_concurrency, key=key,
        )  # fmt: skip
        if task.cassette:
            asked_of = {"model": task.oracle_model or model.path, "max_tokens": room}
            ask = recorded(ask, Path(task.cassette), asked_of, only=task.cassette_only)
    if task.cassette and task.oracle != "openai":
        raise UsageError(
            f"task.cassette: it keeps the answers of task.oracle = openai, found {task.oracle}; leave it out."
        )
    asked = None if ask is None else _without_thoughts(ask)
    return envs.make_env(task.env, task.options, asked, limit_s=task.step_timeout_s)


def read_action(context: Context, state: Sequence[Message], text: str) -> tuple[str, str]:
    """(thought, action) of a ReAct reply in this state. Raises Malformed where it or the environment reads none."""
    found, task = parse_react(text), context.run.task
    envs.check_readable(task.env, task.options, state, without_thought(text))
    return found


def _without_thoughts(ask: Ask) -> Ask:
    """The same without <think>. It raises SimulatorError for an unfinished thought, and for no valid Unicode."""

    def answer(messages: Sequence[Message], *, temperature: float = 0.0, seed: int = 0) -> str:
        try:
            text = without_thought(ask(messages, temperature=temperature, seed=seed))
        except Malformed:
            raise SimulatorError(
                "the model inside the environment thought past its limit; raise roles.max_thought_tokens, or take another"
            ) from None
        if broken_character(text) is not None:
            raise SimulatorError("the model inside the environment answered with half of a surrogate pair")
        return text

    return answer
