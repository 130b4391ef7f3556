"""An environment that misbehaves as its option says, for tests/envs/test_hostile.py, which puts it into a project folder
as my/hostile.py. Without a kind it is the service desk.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import Field

from stages.envs import service_desk
from stages.frame.types import Ask, Env, Malformed, Message, Scenario, Step

REPLIES = [f"Action: {action}" for action in ("check photo", "give voucher", "log ledger", "close phone")]
HALF = "half \ud83d of it"


class Options(service_desk.Options):
    """The desk's, and what is done to it."""

    kind: str = Field("", description="What it does. [ours]")
    at: str = Field("", description="Where. [ours]")


OPTIONS = Options


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


class Loud(float):
    def __repr__(self) -> str:
        raise ValueError("no")


def leave(error: BaseException) -> Any:
    raise error


def leaving_a_thread(first: Any) -> Any:
    threading.Thread(target=time.sleep, args=(30,), name="left").start()
    return first


def user(content: Any) -> tuple[Message, ...]:
    return ({"role": "user", "content": content},)


# Of `reset`: what becomes of the first messages.
RESETS: dict[str, Callable[[Any], Any]] = {
    "a text": lambda first: "Hello.",
    "a generator": lambda first: (one for one in first),
    "a dict": lambda first: first[0],
    "None": lambda first: None,
    "no message": lambda first: (),
    "a message of text": lambda first: ("Hello.",),
    "no role": lambda first: ({"content": "Hello."},),
    "role system": lambda first: ({"role": "system", "content": "Hello."},),
    "role assistant": lambda first: ({"role": "assistant", "content": "Hello."},),
    "content None": lambda first: user(None),
    "content bytes": lambda first: user(b"Hello."),
    "content parts": lambda first: user([{"type": "text", "text": "Hello."}]),
    "half a character": lambda first: user(HALF),
    "half a character beside": lambda first: ({**first[0], "name": HALF},),
    "an object beside": lambda first: ({**first[0], "made": object()},),
    "exit": lambda first: sys.exit(3),
    "cancelled": lambda first: leave(asyncio.CancelledError()),
    "an error of half a character": lambda first: leave(ValueError(HALF)),
    "an error without a text": lambda first: leave(Mute()),
    "for ever": lambda first: time.sleep(3600),
    "a list": list,
    "numpy text": lambda first: user(np.str_(first[0]["content"])),
    "print": lambda first: [print("a line of the environment"), first][1],
    "a thread": lambda first: leaving_a_thread(first),
}
# Of the last `step`: what becomes of it.
STEPS: dict[str, Callable[[Step], Any]] = {
    "NaN": lambda step: replace(step, reward=float("nan")),
    "infinity": lambda step: replace(step, reward=float("inf")),
    "numpy NaN": lambda step: replace(step, reward=np.float32("nan")),  # type: ignore[arg-type]
    "no reward": lambda step: replace(step, reward=None),  # type: ignore[arg-type]
    "reward of text": lambda step: replace(step, reward="1"),  # type: ignore[arg-type]
    "complex reward": lambda step: replace(step, reward=1j),  # type: ignore[arg-type]
    "endless reward": lambda step: replace(step, reward=10**400),
    "two rewards": lambda step: replace(step, reward=np.ones(2)),  # type: ignore[arg-type]
    "loud reward": lambda step: replace(step, reward=Loud("nan")),
    "both ends": lambda step: replace(step, terminated=True, truncated=True),
    "an end of text": lambda step: replace(step, terminated="False"),  # type: ignore[arg-type]
    "no truncated": lambda step: replace(step, truncated=None),  # type: ignore[arg-type]
    "a five-tuple": lambda step: (step.messages, step.reward, True, False, {}),
    "nothing": lambda step: None,
    "a dict": lambda step: {"messages": step.messages},
    "messages of text": lambda step: replace(step, messages="Bye."),  # type: ignore[arg-type]
    "half a character": lambda step: replace(step, messages=user(HALF)),
    "info of text": lambda step: replace(step, info="won"),  # type: ignore[arg-type]
    "silence": lambda step: replace(step, messages=(), terminated=False, truncated=False),
    "malformed by half a character": lambda step: leave(Malformed(HALF)),
    "exit": lambda step: sys.exit(3),
    "for ever": lambda step: time.sleep(3600),
    "numpy": lambda step: replace(step, reward=np.float64(step.reward), terminated=np.bool_(True), truncated=0),  # type: ignore[arg-type]
    "torch": lambda step: replace(step, reward=torch.tensor(step.reward)),  # type: ignore[arg-type]
    "bool reward": lambda step: replace(step, reward=step.reward == 1),
}
SCENARIOS: dict[str, Callable[[list[Scenario]], Any]] = {
    "a generator": iter,
    "too many": lambda found: found * 2,
    "another split": lambda found: [replace(one, split="test") for one in found],
    "dicts": lambda found: [one.__dict__ for one in found],
    "an id of number": lambda found: [replace(one, id=1) for one in found],  # type: ignore[arg-type]
    "no id": lambda found: [replace(one, id="") for one in found],
    "data of NaN": lambda found: [replace(one, data={**one.data, "x": float("nan")}) for one in found],
    "data of a set": lambda found: [replace(one, data={**one.data, "x": {1}}) for one in found],
    "half a character": lambda found: [replace(one, data={**one.data, "x": HALF}) for one in found],
    "an error": lambda found: leave(KeyError("no such file")),
}


class Hostile:
    """The desk, but for what is done to it."""

    def __init__(self, options: Options, inner: Env) -> None:
        self._inner, self._do, self._at = inner, options.kind, options.at
        self._first: tuple[Message, ...] = ()

    @property
    def system(self) -> Any:
        return {"None": None, "half a character": HALF}[self._do] if self._at == "system" else self._inner.system

    @property
    def tools(self) -> Any:
        return {"a text": "ls", "an object": (object(),)}[self._do] if self._at == "tools" else self._inner.tools

    def reset(self, scenario: Scenario) -> Any:
        self._first = self._inner.reset(scenario)
        if self._at == "scenario":
            scenario.data.clear()  # type: ignore[attr-defined]
        return RESETS[self._do](self._first) if self._at == "reset" else self._first

    def step(self, message: Message) -> Any:
        step = self._inner.step(message)
        if self._at == "messages":  # those that were handed over
            self._first[0]["content"] = "Something else."
        return STEPS[self._do](step) if self._at == "step" and (step.terminated or step.truncated) else step


def make(options: Mapping[str, Any], ask: Ask | None = None) -> Any:
    given = Options(**options)
    if given.at == "make":
        return {"a list": [], "an error": given.kind == "an error" and leave(ValueError("no desk"))}[given.kind]
    if given.at == "made":
        return {"a list": list, "an error": lambda: leave(ConnectionError("no desk"))}[given.kind]
    inner = service_desk.make(_desk(options), ask)
    return lambda: Hostile(given, inner())


def scenarios(options: Mapping[str, Any], split: str, n: int | None, seed: int) -> Any:
    given = Options(**options)
    found = service_desk.scenarios(_desk(options), split, n, seed)
    return SCENARIOS[given.kind](found) if given.at == "scenarios" else found


def describe(options: Mapping[str, Any], episodes: Sequence[Any]) -> Any:
    given = Options(**options)
    if given.at == "describe":
        return {"NaN": {"x": float("nan")}, "a list": [1], "a bad name": {"x?": 1}}[given.kind]
    return {"n": len(episodes)}


def _desk(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in ("kind", "at")}
