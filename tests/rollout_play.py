"""Engines, environments and settings that tests of rollouts share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stages.frame.types import (
    EngineUnavailable,
    Env,
    Episode,
    Malformed,
    Message,
    Request,
    Scenario,
    SimulatorError,
    Step,
)
from stages.llm.roles import Roles
from stages.llm.scripted import draw
from stages.play.rollout import RolloutSettings

ERRORS: dict[str, Exception] = {
    "raise": KeyError("door"), "simulator": SimulatorError("the user is silent"), "oracle down": EngineUnavailable("no oracle"),
}  # fmt: skip

ROLES = Roles("toy", {"policy": ""})


SETTINGS = RolloutSettings(
    adapter=None, temperature=1.0, max_tokens=100, max_turns=4, malformed_allowance=1, slots=8, attempts=3, seed=5
)


class Toy:
    """Plays the events of its scenario, one a turn: say, win, lose, cut, malformed, or an error; `first` events are
    those of earlier attempts.
    """

    system = "Toy."
    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, tries: Counter[str]) -> None:
        self._tries = tries
        self._events: list[str] = []

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        earlier = scenario.data.get("earlier", [])
        attempt = self._tries[scenario.id]
        self._tries[scenario.id] += 1
        self._events = list(earlier[attempt] if attempt < len(earlier) else scenario.data["events"])
        if self._events[0].startswith("reset "):
            raise ERRORS[self._events[0].removeprefix("reset ")]
        return ({"role": "user", "content": f"start {scenario.id}"},)

    def step(self, message: Message) -> Step:
        event = self._events.pop(0)
        if event in ERRORS:
            raise ERRORS[event]
        if event == "malformed":
            raise Malformed("say it again")
        answer = ({"role": "user", "content": f"{event} after {message['content'][-6:]}"},)
        return Step(answer, float(event == "win"), terminated=event in ("win", "lose"), truncated=event == "cut")


def toy(kind: type[Toy] = Toy) -> Callable[[], Env]:
    tries: Counter[str] = Counter()
    return lambda: kind(tries)


def scenario(name: str, *events: str, earlier: Sequence[Sequence[str]] = ()) -> Scenario:
    return Scenario("toy", "train", name, {"events": events, "earlier": earlier})


def speak(prompt: str, request: Request) -> str:
    return f"Thought: {request.seed % 97} Action: go {draw(request, [f'{i:02}' for i in range(90)])}"


def without_time(episode: Episode) -> Episode:
    return replace(episode, seconds=0.0, turns=tuple(replace(t, seconds=0.0) for t in episode.turns))


MIXED = [
    scenario("a", "say", "say", "win"),
    scenario("b", "lose"),
    scenario("c", "malformed", "malformed"),
    scenario("d", *["say"] * 5),
    scenario("e", "win", earlier=[["say", "raise"]]),
    scenario("f", "reset raise"),
    scenario("g", "say", "win"),
]
