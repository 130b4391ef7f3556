"""Many episodes at once: one engine call a tick over all running episodes, a finished one replaced at once.

An episode's failure is sorted by whose it is (types.Outcome). What the policy cannot cause is tried again, kept and
counted, and never becomes a reward. EngineUnavailable is nobody's episode: it ends the stage.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from stages import envs
from stages.agents import read_reply, turns_of
from stages.contract import Context
from stages.llm.roles import Roles, mix, thought_opened
from stages.react import without_thought
from stages.sections import Agent
from stages.types import (
    Ask,
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
    TurnwiseError,
)

T = TypeVar("T")

Ended = tuple[Outcome, str]
"""How an episode ended, and by which error."""

WAITING = 16
"""Environments that wait for their oracle's server at once."""

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


def rollout_settings(
    context: Context, adapter: str | None, *, seed: int, temperature: float | None = None, slots: int = 256, attempts: int = 3
) -> RolloutSettings:
    """How an adapter acts in the run's task; at the policy's own temperature unless another is given."""
    task, roles = context.run.task, context.run.roles
    return RolloutSettings(
        adapter, roles.policy_temperature if temperature is None else temperature, roles.action_room,
        task.max_turns, task.malformed_allowance, slots, attempts, seed, task.agent, WAITING if task.oracle == "openai" else 1,
    )  # fmt: skip


@dataclass
class _Running:
    """An episode on its way: the only mutable state of a rollout."""

    number: int
    scenario: Scenario
    env: Env
    messages: list[Message]
    attempt: int
    started: float
    turns: list[Turn] = field(default_factory=list)
    replies: int = 0
    malformed: int = 0


def rollout(
    engine: Engine,
    make_env: Callable[[], Env],
    scenarios: Sequence[Scenario],
    roles: Roles,
    settings: RolloutSettings,
    *,
    forced: Sequence[Sequence[str]] | None = None,
    hopeless: Callable[[Sequence[tuple[int, ...]]], Sequence[bool]] | None = None,
    done: Callable[[int], None] = lambda n: None,
) -> list[Episode]:
    """One episode a scenario, in their order. `done(1)` is called as each one ends. Raises EngineUnavailable.

    forced: replies, one list a scenario, that are said before the policy takes over; their turns carry no token ids.
    hopeless: from the prompts of states to whether an episode is given up there, asked from its second reply on; it is truncated.
    """
    waiting = deque((number, scenario, 1) for number, scenario in enumerate(scenarios))
    running: list[_Running] = []
    finished: dict[int, Episode] = {}

    def close(r: _Running, outcome: Outcome, error: str = "") -> None:
        if not outcome.trainable and r.attempt < settings.attempts:
            waiting.append((r.number, r.scenario, r.attempt + 1))
            return
        finished[r.number] = _episode(r, outcome, error, settings)
        done(1)

    def begin(number: int, scenario: Scenario, attempt: int) -> tuple[_Running, Ended | None]:
        r, ended = _start(number, scenario, attempt, make_env)
        for text in forced[number] if forced else ():
            ended = ended or _act(r, (), Completion(text, (), (), "stop"), 0.0, settings, engine.decode)
        return r, ended

    def sort(found: Sequence[tuple[_Running, Ended | None]]) -> list[_Running]:
        for r, ended in found:
            if ended is not None:
                close(r, *ended)
        return [r for r, ended in found if ended is None]

    while waiting or running:
        while waiting and len(running) < settings.slots:
            chosen = [waiting.popleft() for _ in range(min(len(waiting), settings.slots - len(running)))]
            running += sort(_side_by_side(settings.workers, begin, chosen))
        if not running:
            continue
        prompts = [engine.encode(roles.policy(r.messages)) for r in running]
        if hopeless is not None:
            lost = _hopeless(running, prompts, hopeless)
            for i in lost:
                running[i].turns[-1] = replace(running[i].turns[-1], truncated=True)
                close(running[i], Outcome.TRUNCATED, GIVEN_UP)
            running = [r for i, r in enumerate(running) if i not in lost]
            prompts = [ids for i, ids in enumerate(prompts) if i not in lost]
            if not running:
                continue
        began = time.monotonic()
        completions = engine.generate([_request(r, ids, settings) for r, ids in zip(running, prompts, strict=True)])
        seconds = (time.monotonic() - began) / len(running)

        def act(r: _Running, ids: tuple[int, ...], completion: Completion, seconds: float = seconds) -> tuple[_Running, Ended | None]:
            return r, _act(r, ids, completion, seconds, settings, engine.decode)

        running = sort(_side_by_side(settings.workers, act, list(zip(running, prompts, completions, strict=True))))
    return [finished[number] for number in range(len(scenarios))]


def _side_by_side(workers: int, function: Callable[..., T], calls: Sequence[tuple[Any, ...]]) -> list[T]:
    """What the calls return, in order. Several threads where an environment waits for a server at each step; every call has an episode of its own."""
    if workers == 1:
        return [function(*call) for call in calls]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda call: function(*call), calls))


def _hopeless(
    running: Sequence[_Running], prompts: Sequence[tuple[int, ...]], hopeless: Callable[[Sequence[tuple[int, ...]]], Sequence[bool]]
) -> list[int]:
    """Indices of the episodes that are given up; none is before its first turn."""
    going = [i for i, r in enumerate(running) if r.turns]
    return [i for i, is_lost in zip(going, hopeless([prompts[i] for i in going]), strict=True) if is_lost]


def _request(r: _Running, ids: tuple[int, ...], s: RolloutSettings) -> Request:
    return Request(ids, s.max_tokens, s.temperature, mix(s.seed, r.number, r.attempt, r.replies), s.adapter)


def _start(number: int, scenario: Scenario, attempt: int, make_env: Callable[[], Env]) -> tuple[_Running, Ended | None]:
    env = make_env()
    r = _Running(number, scenario, env, [], attempt, time.monotonic())
    try:
        first = env.reset(scenario)
    except EngineUnavailable as error:  # the LLM inside the environment, not the policy's
        return r, (Outcome.SIMULATOR_FAILED, str(error))
    except SimulatorError as error:
        return r, (Outcome.SIMULATOR_FAILED, str(error))
    except Exception as error:  # an environment is foreign code: whatever it raises is its failure, kept by name
        return r, (Outcome.ENV_FAILED, f"{type(error).__name__}: {error}")
    r.messages = [{"role": "system", "content": env.system}, *first]
    return r, None


def _act(
    r: _Running, ids: tuple[int, ...], completion: Completion, seconds: float, s: RolloutSettings, decode: Callable[[Sequence[int]], str]
) -> Ended | None:
    """Hand the policy's reply to the environment and record its turns; None while the episode goes on."""
    state_len = len(r.messages)
    # With the tag that the template opened, so that a thought which was cut short is not read as an action, now or in the history.
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
    except (SimulatorError, EngineUnavailable) as error:
        return Outcome.SIMULATOR_FAILED, str(error)
    except Exception as error:  # as in _start
        return Outcome.ENV_FAILED, f"{type(error).__name__}: {error}"
    r.replies += 1
    r.malformed += malformed
    failed = r.malformed > s.malformed_allowance
    terminated = terminated or failed
    truncated = not terminated and (truncated or r.replies >= s.max_turns)
    r.messages += [reply, *observation]
    seen = "\n".join(str(m["content"]) for m in observation)
    turn = Turn(len(r.turns), state_len, ids, completion, thought, action, seen, reward, terminated, truncated, malformed, seconds)
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


def environment(context: Context) -> Callable[[], Env]:
    """The task's environment, with its oracle or simulated user handed in as a function where it needs one."""
    task, model = context.run.task, context.run.model
    ask: Ask | None = None
    room = task.oracle_tokens + context.run.roles.max_thought_tokens
    if task.oracle == "engine":

        def ask(messages: Sequence[Message]) -> str:
            ids = context.engine.encode(messages)
            reply = context.engine.generate([Request(ids, room, 0.0, mix(context.seed, ids))])[0]
            return thought_opened(context.engine.decode, ids) + reply.text

    elif task.oracle == "openai":
        from stages.llm.openai import chat

        ask = chat(task.oracle_url or model.url, task.oracle_model or model.path, max_tokens=room, concurrency=WAITING)
    return envs.make_env(task.env, task.options, None if ask is None else _without_thoughts(ask))


def _without_thoughts(ask: Ask) -> Ask:
    """The same without a reasoning model's <think> part. It raises SimulatorError where that was cut short: nothing was answered then."""

    def answer(messages: Sequence[Message]) -> str:
        try:
            return without_thought(ask(messages))
        except Malformed:
            raise SimulatorError("the model inside the environment thought past its limit; raise roles.max_thought_tokens, or take another") from None

    return answer


def check_environment(episodes: Sequence[Episode]) -> None:
    """Raises TurnwiseError where not one episode says anything about the policy."""
    if not episodes:
        raise TurnwiseError("no episode was run: the environment has no scenario for this split and these task.options")
    if not any(e.outcome.trainable for e in episodes):
        raise TurnwiseError(f"no episode could be scored: {episodes[0].outcome} on all {len(episodes)}, first error: {episodes[0].error}")


def summary(episodes: Sequence[Episode], stage: str) -> dict[str, float]:
    """Counts and means over episodes; rates over those that the policy answers for. A reply is a step of the environment, in however many turns."""
    counts = Counter(e.outcome for e in episodes)
    ours = [e for e in episodes if e.outcome.trainable]
    turns = sum(len(e.turns) for e in ours)
    replies = sum(len({t.state_len for t in e.turns}) for e in ours)  # the turns of one reply have one state_len
    tokens = sum(len(t.completion.token_ids) for e in ours for t in e.turns)
    return {
        f"{stage}/episodes": float(len(episodes)),
        f"{stage}/retries": float(sum(e.attempts - 1 for e in episodes)),
        f"{stage}/win_rate": sum(e.total_reward >= 1 for e in ours) / len(ours),
        f"{stage}/return": sum(e.total_reward for e in ours) / len(ours),
        f"{stage}/turns": turns / len(ours),
        f"{stage}/tokens": float(tokens),
        f"{stage}/env_steps": float(replies),
        f"{stage}/malformed_frac": sum(t.malformed for e in ours for t in e.turns) / max(replies, 1),
        **{f"{stage}/{outcome}": float(counts[outcome]) for outcome in Outcome},
    }
