"""The border: everything that an environment returns is checked here, and nowhere else.

A breach of the contract (docs/how-to/environment-options.md) is a mistake in the environment's module. One error names
the module, the method, what was wanted, what was found, and what to do. It is never tried again, and no row of it is
stored. An exception that an environment raises is a failure, which is tried again (stages/play/rollout.py).

Checked values come back as plain copies: numpy's numbers are floats, messages are new. [ours]
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from stages.frame.types import Message, Scenario, Step, UsageError, printable

LARGEST = 3.4028234663852886e38
"""The largest number of float32, which trainings compute in."""

ROLES = ("user", "tool")
"""Who may speak in an observation: the system message is `Env.system`, and the assistant is the policy."""

_PLACES = {"system": "put it into `system`", "assistant": "only the policy speaks as the assistant; say it as the user"}
_SHAPES: dict[type, str] = {str: 'return ({"role": "user", "content": text},)', dict: "return (message,)"}


class BrokenEnvironment(UsageError):
    """An environment breaks its contract. where: its module, or the adapter and the class that it plays."""

    def __init__(self, where: str, method: str, wanted: str, found: str, fix: str, more: str = "") -> None:
        self.where, self.said = where, (method, wanted, found, fix)
        super().__init__(
            f"task.env: {method} of {where} wants {wanted}, found {found}; {fix}.{more and f' To find more of it: {more}'}"
        )


@dataclass(frozen=True)
class At:
    """Where a value comes from. more: the command that looks for other breaches, "" where there is none."""

    where: str
    method: str
    more: str = ""

    def broken(self, wanted: str, found: str, fix: str) -> BrokenEnvironment:
        return BrokenEnvironment(self.where, self.method, wanted, found, fix, self.more)


def shown(value: object) -> str:
    """A value's type and its beginning, on one line. Never raises."""
    try:
        text = reprlib.repr(value)
    except Exception:  # a foreign __repr__: its type is enough
        return type(value).__name__
    return f"{type(value).__name__} {printable(text)[:80]}"


def failure(error: BaseException) -> str:
    """An error's type and text, as text that can be stored. Never raises."""
    try:
        text = str(error)
    except Exception:  # a foreign __str__
        text = ""
    return f"{type(error).__name__}: {text}".encode(errors="replace").decode()


def broken_character(text: str) -> int | None:
    """Where the first half of a surrogate pair stands; None in valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def text_of(at: At, what: str, value: Any) -> str:
    """The text. Raises BrokenEnvironment for what is none, or is no valid Unicode."""
    if not isinstance(value, str):
        raise at.broken(f"a text as {what}", shown(value), "hand over a str")
    if (place := broken_character(value)) is not None:
        raise at.broken(
            f"valid Unicode as {what}",
            f"half of a surrogate pair ({value[place]!a}) at character {place}",
            'mend it: text.encode("utf-8", "replace").decode()',
        )
    return str.__str__(value)


def number_of(at: At, what: str, value: Any) -> float:
    """The number as a float; also numpy's and torch's. Raises BrokenEnvironment for what is none, or not finite."""
    plain = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(plain, Real):
        raise at.broken(f"a number as {what}", shown(value), "hand over a float, 0.0 where there is nothing to pay")
    try:
        found = float(plain)
    except OverflowError:
        found = math.inf
    if not abs(found) <= LARGEST:  # nan, too
        raise at.broken(f"a finite number as {what}", shown(value), "look for a division by zero or an overflow")
    return found


def flag_of(at: At, what: str, value: Any) -> bool:
    """True or False; also numpy's, and 0 or 1. Raises BrokenEnvironment for anything else, which may be true by chance."""
    plain = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(plain, int) or plain not in (0, 1):
        raise at.broken(f"True or False as {what}", shown(value), "hand over a bool")
    return bool(plain)


def json_of(at: At, what: str, value: Any) -> Any:
    """A copy made by JSON. Raises BrokenEnvironment for what JSON cannot hold, as NaN, an object, broken Unicode."""
    wanted = f"JSON as {what}"
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise at.broken(
            wanted, failure(error)[:120], "keep to dicts, lists, texts, finite numbers, True, False and None"
        ) from None
    return json.loads(text)


def message_of(at: At, value: Any) -> Message:
    """A copy of one message. Raises BrokenEnvironment."""
    if not isinstance(value, Mapping):
        raise at.broken("messages", shown(value), 'a message is {"role": "user", "content": text}')
    role = value.get("role")
    if role not in ROLES:
        fix = _PLACES.get(role if isinstance(role, str) else "", 'a message is {"role": "user", "content": text}')
        raise at.broken("messages of the role user or tool", shown(role), fix)
    content = text_of(at, "content of a message", value.get("content"))
    found: Message = {"role": str(role), "content": content}
    if len(value) > len(found):
        found = {**json_of(at, "message", dict(value)), **found}
    return found


def messages_of(at: At, value: Any, least: int = 1) -> tuple[Message, ...]:
    """Copies of the messages of an observation. Raises BrokenEnvironment where it is none, or has less than `least`."""
    if not isinstance(value, (tuple, list)):
        raise at.broken("a tuple of messages", shown(value), _SHAPES.get(type(value), "return tuple(messages)"))
    if len(value) < least:
        raise at.broken(
            "a message that the policy can answer", "none", "say what is seen, if only that nothing has changed"
        )
    return tuple(message_of(at, one) for one in value)


def step_of(at: At, value: Any) -> Step:
    """The step, of plain values. Raises BrokenEnvironment."""
    if not isinstance(value, Step):
        fix = "a five-tuple of Gymnasium's is played by stages.adapters.gymnasium_text.FromGymnasium"
        raise at.broken(
            "a Step of stages.frame.types", shown(value), fix if isinstance(value, tuple) else "return Step(messages)"
        )
    terminated, truncated = flag_of(at, "terminated", value.terminated), flag_of(at, "truncated", value.truncated)
    if terminated and truncated:
        raise at.broken(
            "terminated or truncated, never both",
            "both",
            "terminated where the task is over by its own rule, else truncated",
        )
    if not isinstance(value.info, Mapping):
        raise at.broken("a dict as info", shown(value.info), "leave it out where there is nothing to tell")
    return Step(
        messages_of(at, value.messages, least=not (terminated or truncated)),
        number_of(at, "reward", value.reward),
        terminated,
        truncated,
        value.info,
    )


def tools_of(at: At, value: Any) -> Sequence[Mapping[str, Any]]:
    """Copies of the tools. Raises BrokenEnvironment for anything but a tuple or a list of dicts that are JSON."""
    if not isinstance(value, (tuple, list)) or not all(isinstance(one, Mapping) for one in value):
        raise at.broken("a tuple of dicts", shown(value), "one dict a tool, in OpenAI's form; () where there is none")
    return tuple(json_of(at, "tools", [dict(one) for one in value]))


def scenarios_of(at: At, value: Any, split: str, n: int | None) -> list[Scenario]:
    """The scenarios. Raises BrokenEnvironment for what is none, and for more than n, or of another split."""
    if not isinstance(value, (tuple, list)):
        raise at.broken("a list of scenarios", shown(value), "return list(scenarios)")
    if n is not None and len(value) > n:
        raise at.broken(f"at most {n} scenarios", str(len(value)), "`n` says how many; None = all")
    for one in value:
        if not isinstance(one, Scenario):
            raise at.broken("scenarios of stages.frame.types", shown(one), "return Scenario(task, split, id, data)")
        if not text_of(at, "id of a scenario", one.id):
            raise at.broken("an id for each scenario", "an empty text", "rows and pages know a scenario by it")
        text_of(at, "task of a scenario", one.task)
        if one.split != split:
            raise at.broken(
                f"scenarios of the split {split!r}", shown(one.split), "an evaluation would see what was trained on"
            )
        if not isinstance(one.data, Mapping):
            raise at.broken(
                "a dict as data of a scenario", shown(one.data), "`reset` gets it as it was stored, as JSON"
            )
        json_of(at, "data of a scenario", dict(one.data))
    return list(value)


def numbers_of(at: At, value: Any) -> dict[str, float]:
    """Numbers by name, as metrics. Raises BrokenEnvironment for another name than a metric may have, or no number."""
    if not isinstance(value, Mapping):
        raise at.broken("a dict of numbers", shown(value), "return {name: number}")
    for name in value:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.\- :/]+", name):
            raise at.broken("names of letters, digits and _", shown(name), "give it another name")
    return {name: number_of(at, name, one) for name, one in value.items()}
