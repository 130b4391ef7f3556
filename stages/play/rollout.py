"""Play many episodes at once. Each reply is acted on when it ends, and the episode's next prompt joins the engine.

A failure is sorted by its cause (types.Outcome). One that the policy cannot cause is tried again, kept and counted, and
never becomes a reward. EngineUnavailable and BrokenEnvironment end the stage: the first belongs to no episode, the
second is a mistake in the environment. An episode is truncated if its next prompt leaves no room for a reply. If that
is the first prompt, the task does not fit the model.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from stages.frame.border import BrokenEnvironment, failure
from stages.frame.checked_env import checked
from stages.frame.contract import Context
from stages.frame.react import without_thought
from stages.frame.sections import Agent
from stages.frame.types import (
    Completion,
    Engine,
    EngineUnavailable,
    Env,
    Episode,
    Malformed,
    Message,
    Outcome,
    Request,
    Scenario,
    SimulatorError,
    Turn,
    Wait,
)
from stages.llm.endpoint import dropped_on_error
from stages.llm.roles import Roles, mix, thought_opened
from stages.llm.streams import stream
from stages.llm.tokens import OUT_OF_CONTEXT, has_room
from stages.play.agents import read_reply, turns_of
from stages.play.jobs import Jobs

Ended = tuple[Outcome, str]
"""How an episode ended, and by which error."""

Hopeless = Callable[[Sequence[tuple[int, ...]]], Sequence[bool]]
"""From the prompts of states to whether an episode is given up there."""

GIVEN_UP = "given up: its value was too low"
"""`Episode.error` of an episode that was stopped as hopeless."""


@dataclass(frozen=True)
class RolloutSettings:
    """How a policy acts. adapter None = the base model."""

    adapter: str | None
    temperature: float
    max_tokens: int
    max_turns: int
    malformed_allowance: int
    slots: int
    attempts: int
    seed: int
    agent: Agent = "react"
    workers: int = 1  # environments that act side by side, in threads
    limit_ends: bool = False  # an episode out of turns is over, not cut short


def rollout_settings(
    context: Context,
    adapter: str | None,
    *,
    seed: int,
    temperature: float | None = None,
    slots: int = 256,
    attempts: int = 3,
) -> RolloutSettings:
    """How an adapter acts in the run's task; at the policy's own temperature unless another is given."""
    task, roles = context.run.task, context.run.roles
    return RolloutSettings(
        adapter, roles.policy_temperature if temperature is None else temperature, roles.action_room,
        task.max_turns, task.malformed_allowance, slots, attempts, seed, task.agent, task.oracle_concurrency if task.oracle == "openai" else 1,
        task.at_limit == "terminated",
    )  # fmt: skip


@dataclass
class _Running:
    """An episode on its way: the only mutable state of a rollout."""

    number: int
    scenario: Scenario
    env: Any  # an Env, once it is made
    messages: list[Message]
    attempt: int
    started: float
    turns: list[Turn] = field(default_factory=list)
    replies: int = 0
    malformed: int = 0


_Asked = tuple[_Running, tuple[int, ...]]  # with its next prompt
_Acted = tuple[_Running, Ended | None]


def rollout(
    engine: Engine,
    make_env: Callable[[], Env],
    scenarios: Sequence[Scenario],
    roles: Roles,
    settings: RolloutSettings,
    *,
    numbers: Sequence[int] | None = None,
    forced: Sequence[Sequence[str]] | None = None,
    hopeless: Hopeless | None = None,
    done: Callable[[int], None] = lambda n: None,
) -> list[Episode]:
    """One episode a scenario, in their order. `done(1)` as each one ends. Raises EngineUnavailable, BrokenEnvironment.

    numbers: of the scenarios, by which their seeds and names go; from 0 on where not given.
    forced: replies, one list a number, that are said before the policy takes over; their turns carry no token ids.
    hopeless: asked of an episode from its second reply on; one that is given up is truncated.
    """
    numbers = range(len(scenarios)) if numbers is None else numbers
    with dropped_on_error(), Jobs[_Acted](settings.workers) as jobs:
        playing = _Rollout(engine, checked(make_env), roles, settings, jobs, forced, hopeless, done)
        playing.waiting.extend((number, scenario, 1) for number, scenario in zip(numbers, scenarios, strict=True))
        playing.play()
    return [playing.finished[number] for number in numbers]


@dataclass
class _Rollout:
    """What `rollout` was given, and its episodes: waiting for a slot, acting, asked of the engine, finished."""

    engine: Engine
    make_env: Callable[[], Env]
    roles: Roles
    settings: RolloutSettings
    jobs: Jobs[_Acted]
    forced: Sequence[Sequence[str]] | None
    hopeless: Hopeless | None
    done: Callable[[int], None]
    waiting: deque[tuple[int, Scenario, int]] = field(default_factory=deque)  # number, scenario, attempt
    asked: dict[int, _Asked] = field(default_factory=dict)
    finished: dict[int, Episode] = field(default_factory=dict)
    owed: float = 0.0  # since when the engine owes a reply

    def play(self) -> None:
        with closing(stream(self.engine, self.more)) as replies:
            for ended in replies:
                seconds = (time.monotonic() - self.owed) / len(ended)
                for number, completion in ended:
                    self.jobs.start(self.act, *self.asked.pop(number), completion, seconds)
                self.owed = time.monotonic()

    def more(self, patience: Wait) -> list[tuple[int, Request]] | None:
        """What the engine is asked next; None once all episodes are finished."""
        running = self.ready(patience)
        if not (running or self.asked or self.waiting or self.jobs):
            return None
        prompts = self.engine.encode_all([self.roles.policy(r.messages) for r in running])
        asked = list(zip(running, prompts, strict=True))
        asked = self.stop(asked, _too_long(asked, self.engine.context if asked else None))
        if self.hopeless is not None:
            asked = self.stop(asked, _given_up(asked, self.hopeless))
        self.owed = self.owed if self.asked else time.monotonic()
        self.asked.update((r.number, (r, ids)) for r, ids in asked)
        return [(r.number, _request(r, ids, self.settings)) for r, ids in asked]

    def ready(self, patience: Wait) -> list[_Running]:
        """Episodes that can go on, once every slot is taken."""
        found: list[_Running] = []
        while True:
            for _ in range(min(self.free(found), len(self.waiting))):
                self.jobs.start(self.begin, *self.waiting.popleft())
            found += self.sort(self.jobs.fetch("none" if found and patience == "some" else patience))
            if not self.waiting or self.free(found) <= 0:
                return found

    def free(self, ready: Sequence[_Running]) -> int:
        """Slots that no episode has."""
        return self.settings.slots - len(self.asked) - len(self.jobs) - len(ready)

    def begin(self, number: int, scenario: Scenario, attempt: int) -> _Acted:
        r, ended = _start(number, scenario, attempt, self.make_env, self.settings.seed)
        for text in self.forced[number] if self.forced else ():
            ended = ended or _act(r, (), Completion(text, (), (), "stop"), 0.0, self.settings, self.engine.decode)
        return r, ended

    def act(self, r: _Running, ids: tuple[int, ...], completion: Completion, seconds: float) -> _Acted:
        return r, _act(r, ids, completion, seconds, self.settings, self.engine.decode)

    def stop(self, asked: Sequence[_Asked], errors: Sequence[str]) -> list[_Asked]:
        """Those without an error. The others end here, between two turns."""
        self.sort([(r, _cut(r, error)) for (r, _), error in zip(asked, errors, strict=True)])
        return [one for one, error in zip(asked, errors, strict=True) if not error]

    def sort(self, found: Sequence[_Acted]) -> list[_Running]:
        """Those that go on. The others are finished, or tried again."""
        for r, ended in found:
            if ended is not None:
                self.close(r, *ended)
        return [r for r, ended in found if ended is None]

    def close(self, r: _Running, outcome: Outcome, error: str) -> None:
        if not outcome.trainable and r.attempt < self.settings.attempts:
            self.waiting.append((r.number, r.scenario, r.attempt + 1))
            return
        self.finished[r.number] = _episode(r, outcome, error, self.settings)
        self.done(1)


def _too_long(asked: Sequence[_Asked], context: int | None) -> list[str]:
    """The error of each whose prompt leaves no room for a reply, else ""."""
    said = "{}: a prompt of {} tokens, the model has {}"
    return ["" if has_room(ids, context) else said.format(OUT_OF_CONTEXT, len(ids), context) for _, ids in asked]


def _given_up(asked: Sequence[_Asked], hopeless: Hopeless) -> list[str]:
    """The error of each that is given up, else "". None is before its first turn."""
    lost = iter(hopeless([ids for r, ids in asked if r.turns]))
    return ["" if not r.turns or not next(lost) else GIVEN_UP for r, _ in asked]


def _cut(r: _Running, error: str) -> Ended | None:
    """How an episode ends that cannot go on with its next turn; None without an error."""
    if error and r.turns:
        r.turns[-1] = replace(r.turns[-1], truncated=True)
    return (Outcome.TRUNCATED if r.turns else Outcome.ENV_FAILED, error) if error else None


def _request(r: _Running, ids: tuple[int, ...], s: RolloutSettings) -> Request:
    return Request(ids, s.max_tokens, s.temperature, mix(s.seed, r.number, r.attempt, r.replies), s.adapter)


def _start(
    number: int, scenario: Scenario, attempt: int, make_env: Callable[[], Env], seed: int
) -> tuple[_Running, Ended | None]:
    r = _Running(number, scenario, None, [], attempt, time.monotonic())
    try:
        r.env = make_env()
        first = r.env.reset(replace(scenario, seed=mix(seed, number, attempt, "environment")))
        r.messages = [{"role": "system", "content": r.env.system}, *first]
    except BrokenEnvironment:
        raise
    except (SimulatorError, EngineUnavailable) as error:  # the LLM inside the environment, not the policy's
        return r, (Outcome.SIMULATOR_FAILED, str(error))
    except Exception as error:  # an environment is foreign code: whatever it raises is its failure, kept by name
        return r, (Outcome.ENV_FAILED, failure(error))
    return r, None


def _act(
    r: _Running,
    ids: tuple[int, ...],
    completion: Completion,
    seconds: float,
    s: RolloutSettings,
    decode: Callable[[Sequence[int]], str],
) -> Ended | None:
    """Hand the policy's reply to the environment and record its turns; None while the episode goes on."""
    state_len = len(r.messages)
    # With the tag that the template opened, so that a thought which was cut short is not read as an action, now or in
    # the history.
    text = thought_opened(decode, ids) + completion.text
    reply: Message = {"role": "assistant", "content": text}
    thought = action = ""
    reward, terminated, truncated, malformed = 0.0, False, False, False
    try:
        thought, action = read_reply(s.agent, text)
        step = r.env.step({**reply, "content": without_thought(text)})
        observation, reward, terminated, truncated = step.messages, step.reward, step.terminated, step.truncated
    except Malformed as error:
        malformed, observation = True, ({"role": "user", "content": str(error)},)
    except BrokenEnvironment:
        raise
    except (SimulatorError, EngineUnavailable) as error:
        return Outcome.SIMULATOR_FAILED, str(error)
    except Exception as error:  # as in _start
        return Outcome.ENV_FAILED, failure(error)
    r.replies += 1
    # A reply that the context cut short, not its own limit, is not the policy's doing: what follows does not fit, and
    # is truncated.
    r.malformed += malformed and not (completion.finish_reason == "length" and len(completion.token_ids) < s.max_tokens)
    failed = r.malformed > s.malformed_allowance
    last = r.replies >= s.max_turns
    terminated = terminated or failed or (last and s.limit_ends and not truncated)
    truncated = not terminated and (truncated or last)
    r.messages += [reply, *observation]
    seen = "\n".join(str(m["content"]) for m in observation)
    turn = Turn(
        len(r.turns), state_len, ids, completion, thought, action, seen, reward, terminated, truncated, malformed,
        seconds,
    )  # fmt: skip
    r.turns += turns_of(s.agent, turn, decode)
    if failed:
        return Outcome.POLICY_FAILED, f"{r.malformed} unreadable replies"
    if terminated:
        return Outcome.SCORED, ""
    return (Outcome.TRUNCATED, "") if truncated else None


def _episode(r: _Running, outcome: Outcome, error: str, s: RolloutSettings) -> Episode:
    name = hashlib.sha256(f"{s.seed} {r.number} {r.scenario.id}".encode()).hexdigest()[:16]
    seconds = time.monotonic() - r.started
    return Episode(name, r.scenario, s.adapter, outcome, tuple(r.messages), tuple(r.turns), seconds, error, r.attempt)
