"""Episodes of an engine that is a stream are those of one that is asked tick by tick, and nobody waits for another's
customer.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import pytest
from rollout_play import MIXED, ROLES, SETTINGS, Toy, scenario, speak, toy, without_time

from stages.frame.types import EngineUnavailable, Message, More, Outcome, Replies, Request, Scenario, Step
from stages.llm.metered import Metered
from stages.llm.scripted import ScriptedEngine
from stages.llm.tokens import OUT_OF_CONTEXT
from stages.play.rollout import GIVEN_UP, rollout


class Restless(ScriptedEngine):
    """A stream whose replies end in any order, some at a time."""

    def __init__(self, order: int) -> None:
        super().__init__(speak)
        self._random = random.Random(order)
        self.most = 0  # under way at once

    def stream(self, more: More) -> Replies:
        under_way: dict[int, Request] = {}
        while (asked := more("none" if under_way else "some")) is not None:
            assert not under_way.keys() & dict(asked).keys()
            under_way.update(asked)
            self.most = max(self.most, len(under_way))
            if ended := [number for number in under_way if self._random.random() < 0.4]:
                yield [(number, self.generate([under_way.pop(number)])[0]) for number in ended]


class Tardy(Toy):
    """Answers after a while, which is another one each time."""

    def step(self, message: Message) -> Step:
        time.sleep(0.004 * random.random())
        return super().step(message)


@pytest.mark.parametrize(("workers", "slots"), [(1, 100), (1, 3), (4, 100), (4, 3), (4, 1)])
def test_episodes_of_a_stream_are_those_of_ticks(workers: int, slots: int) -> None:
    forced = [["Action: x"], *[[] for _ in MIXED[1:]]]
    expected = rollout(ScriptedEngine(speak), toy(), MIXED, ROLES, SETTINGS, forced=forced)
    settings = replace(SETTINGS, workers=workers, slots=slots)
    for order in range(8):
        engine, seen = Restless(order), list[int]()
        found = rollout(Metered(engine), toy(Tardy), MIXED, ROLES, settings, forced=forced, done=seen.append)
        assert [without_time(e) for e in found] == [without_time(e) for e in expected]
        assert engine.most <= slots
        assert seen == [1] * len(MIXED)


@pytest.mark.parametrize("workers", [1, 4])
def test_hopeless_and_too_long_end_the_same_episodes_of_a_stream(workers: int) -> None:
    def hopeless(states: Sequence[tuple[int, ...]]) -> list[bool]:
        return ["start d" in ticks.decode(ids) for ids in states]

    ticks, streams = ScriptedEngine(speak), Restless(3)
    ticks.context = streams.context = (
        len(ticks.encode([{"role": "system", "content": "Toy."}, {"role": "user", "content": "start a"}])) + 120
    )
    settings = replace(SETTINGS, max_tokens=40, workers=workers)
    expected = rollout(ticks, toy(), MIXED, ROLES, settings, hopeless=hopeless)
    found = rollout(streams, toy(), MIXED, ROLES, settings, hopeless=hopeless)
    assert [without_time(e) for e in found] == [without_time(e) for e in expected]
    assert {GIVEN_UP} < {e.error for e in found if e.outcome == Outcome.TRUNCATED}
    assert any(e.error.startswith(OUT_OF_CONTEXT) for e in found)


def test_an_environment_that_waits_holds_up_no_other_episode() -> None:
    """The first customer answers once the other episode is over; in ticks it would wait half a minute."""
    over = threading.Event()

    class Polite(Toy):
        def reset(self, scenario: Scenario) -> tuple[Message, ...]:
            self.polite = scenario.id == "a"
            return super().reset(scenario)

        def step(self, message: Message) -> Step:
            assert not self.polite or over.wait(30)
            step = super().step(message)
            if step.terminated:
                over.set()
            return step

    pair = [scenario("a", "say", "win"), scenario("b", "say", "say", "say", "win")]
    a, b = rollout(Restless(0), toy(Polite), pair, ROLES, replace(SETTINGS, workers=2))
    assert (a.outcome, a.total_reward, b.outcome, len(b.turns)) == (Outcome.SCORED, 1.0, Outcome.SCORED, 4)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_stream_that_fails_ends_the_stage(workers: int) -> None:
    class Failing(Restless):
        def stream(self, more: More) -> Replies:
            yield from islice(super().stream(more), 2)
            raise EngineUnavailable("no server")

    with pytest.raises(EngineUnavailable, match="no server"):
        rollout(Failing(0), toy(), MIXED, ROLES, replace(SETTINGS, workers=workers))
