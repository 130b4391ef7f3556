"""verifiers' newer interface ("v1", seen with 0.4.0): its environments as ours.

A v1 Env runs its own agents. It runs unchanged, and its model is an endpoint (adapters/asked.py) that returns the
policy's replies:

    with playing(env) as make:
        rollout(engine, make, scenarios_v1(env, "train", 100), ...)

A failure raises and is never a reward. The policy is one agent. A seat that is not trained (a simulated user, a judge)
needs its own model (--env.user.client, --env.user.model). Ours as theirs: adapters/verifiers_taskset.py. [ours]
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from stages.adapters.asked import Asked, Question, asking
from stages.adapters.tool_text import observed, spoken, with_tools
from stages.adapters.verifiers_rubric import failures, limit_by_threads
from stages.frame.border import At, number_of
from stages.frame.loops import event_loop
from stages.frame.types import Message, Scenario, Step, UsageError


def scenarios_v1(env: Any, split: str, n: int | None) -> list[Scenario]:
    """The first n tasks of a v1 Env's taskset; None = all of them, of a taskset that ends."""
    tasks = itertools.islice(env.taskset, n)
    return [
        Scenario("verifiers", split, t.data.id or str(t.data.idx), {"task": t.data.model_dump(mode="json")})
        for t in tasks
    ]


@contextlib.contextmanager
def playing(env: Any, *, silence_s: float = 600.0) -> Iterator[Callable[[], FromV1]]:
    """What makes episodes of a v1 Env, as long as the block lasts.

    silence_s: seconds without a word of the environment, after which an episode has failed.
    Raises UsageError where the policy's replies would be run as commands on this machine.
    """
    _check_seats(env)
    limit_by_threads()
    loop = event_loop("verifiers")
    up: Future[None] = Future()

    async def serve(down: asyncio.Event) -> None:  # one task enters and leaves it, as its cancel scopes want
        try:
            async with env.serving():
                up.set_result(None)
                await down.wait()
        except BaseException as error:
            if up.done():
                raise
            up.set_exception(error)

    down = asyncio.Event()
    with asking() as asked:
        served = asyncio.run_coroutine_threadsafe(serve(down), loop)
        up.result()
        try:
            yield lambda: FromV1(env, asked, silence_s)
        finally:
            loop.call_soon_threadsafe(down.set)
            served.result()


def _check_seats(env: Any) -> None:
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import harness_class

    for name, harness in env.config.agent_harnesses().items():
        kind = agent_config_fields(env.config)[name].runtime.type
        if kind == "subprocess" and harness_class(harness.id).EXECUTES_CODE:
            raise UsageError(
                f"agent {name!r} runs what the policy says as commands on this machine (harness {harness.id!r}, runtime subprocess). Set its harness to null, or its runtime to docker."
            )


class FromV1:
    """One running episode. A scenario's data is {"task": the task's data}. The policy's tools are told in the system
    message and called by a ReAct action (adapters/tool_text.py). The reward comes at the end, as there.
    """

    def __init__(self, env: Any, asked: Asked, silence_s: float) -> None:
        self.system = ""
        self.tools: Sequence[Mapping[str, Any]] = ()
        self._env, self._asked, self._silence_s = env, asked, silence_s
        self._run: _Run | None = None
        self._question: Question | None = None

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        """What the policy is first asked, without its system message, which becomes `system`. Raises RuntimeError."""
        if self._run is not None:
            self._run.leave()
        self._question, self._run = None, _Run(self._env, self._asked, scenario.data["task"], self._silence_s)
        weakref.finalize(self, self._run.leave)
        found = self._run.next()
        if not isinstance(found, Question):
            _judged(found)
            raise RuntimeError("the environment was over before it asked the policy")
        self._question, self.tools = found, tuple(tool.get("function", tool) for tool in found.tools)
        said = [str(observed(one)["content"]) for one in found.messages if one["role"] == "system"]
        self.system = with_tools("\n\n".join(said), self.tools)
        return tuple(observed(one) for one in found.messages if one["role"] != "system")

    def step(self, message: Message) -> Step:
        """Hand over the reply. Raises Malformed; RuntimeError after the end, and for whatever failed."""
        before, run = self._question, self._run
        if before is None or run is None:
            raise RuntimeError("the episode has not begun, or is over: call reset first")
        reply = spoken(str(message.get("content") or ""), self.tools, f"call_{len(before.messages)}")
        self._question = None  # so that an error leaves no episode to go on with
        before.reply.set_result(reply)
        found = run.next()
        if isinstance(found, Question):
            news = _news(before, found)
            if news is None:
                run.leave()
                raise RuntimeError("the environment asks the policy in more than one conversation, or rewrites it")
            self._question = found
            return Step(tuple(observed(one) for one in news))
        run.leave()
        reward, truncated = _judged(found)
        told: Message = {"role": "user", "content": "The end."}
        return Step((told,), reward, terminated=not truncated, truncated=truncated)


class _Run:
    """An episode that verifiers runs on its loop. What it asks of the policy, and its end, come through a queue."""

    def __init__(self, env: Any, asked: Asked, data: Mapping[str, Any], silence_s: float) -> None:
        self._asked, self._silence_s = asked, silence_s
        self._found: queue.SimpleQueue[Question | Future[Any]] = queue.SimpleQueue()
        self._sessions: list[str] = []
        self._open: Question | None = None
        self._over = asyncio.run_coroutine_threadsafe(self._played(env, data), event_loop("verifiers"))
        self._over.add_done_callback(self._found.put)

    async def _played(self, env: Any, data: Mapping[str, Any]) -> Any:
        from verifiers.v1 import EvalClientConfig, ModelContext

        kind = type(env.taskset).task_type()
        task = kind(kind.data_type().model_validate(data), env.taskset.config.task)
        client = EvalClientConfig(base_url=self._asked.url, api_key_var="TURNWISE_NO_KEY")
        with failures():
            return await env.run_episode(task, ModelContext(model="policy", client=client), on_trace=self._begun)

    def _begun(self, trace: Any) -> None:
        if trace.agent.trainable:  # another seat finds nobody to answer it
            self._sessions.append(trace.id)
            self._asked.sessions[trace.id] = self._found

    def next(self) -> Question | Future[Any]:
        try:
            found = self._found.get(timeout=self._silence_s)
        except queue.Empty:
            self.leave()
            raise RuntimeError(f"the environment said nothing for {self._silence_s:g} s") from None
        self._open = found if isinstance(found, Question) else None
        return found

    def leave(self) -> None:
        """Give the episode up, wherever it is."""
        for session in self._sessions:
            self._asked.sessions.pop(session, None)
        if self._open is not None and not self._open.reply.done():
            self._open.reply.set_exception(RuntimeError("the episode was given up"))
        self._over.cancel()


def _news(before: Question, after: Question) -> Sequence[Mapping[str, Any]] | None:
    """What was said since the reply to `before`; None where `after` does not go on with that conversation."""
    old = len(before.messages)
    if len(after.messages) <= old + 1 or after.messages[old]["role"] != "assistant":
        return None
    same = all(_text(one) == _text(other) for one, other in zip(before.messages, after.messages, strict=False))
    return after.messages[old + 1 :] if same else None


def _text(message: Mapping[str, Any]) -> tuple[str, str]:
    return str(message["role"]), str(observed(message)["content"])


def _judged(over: Future[Any]) -> tuple[float, bool]:
    """(reward, whether it was cut short) of an episode that is over. Raises RuntimeError where something failed."""
    episode = over.result()
    errors = [error for source in (episode, *episode.traces) for error in source.errors]
    if not episode.ok:
        why = f"{errors[0].type}: {errors[0].message}" if errors else "it says not why"
        raise RuntimeError(f"the environment failed: {why}")
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        raise RuntimeError(f"wanted one agent that is trained, found {len(trained)}")
    if trained[0].is_timeout or any(reward is None for reward in trained[0].rewards.values()):
        raise RuntimeError("the environment ran out of time before all rewards were given")
    return number_of(At("FromV1", "the task"), "reward", trained[0].reward), bool(trained[0].is_truncated)
