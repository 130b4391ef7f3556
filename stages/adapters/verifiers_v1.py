"""verifiers' newer interface ("v1", seen with 0.4.0), both ways.

    playing     a v1 Env, which runs its agents by itself, is played as ours: its model is an endpoint (adapters/asked.py)
        whose replies are the policy's
    as_v1       ours as a Taskset, an Env and a Harness, which a module exports so that verifiers finds them by its name

What fails raises on our side, and is an error of the episode on theirs: never a reward. A seat that is not trained (a
simulated user, a judge) needs a model of its own (--env.user.client, --env.user.model), since the policy is one agent.
Only the functions here import verifiers. [ours]
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import queue
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from stages.adapters.asked import Asked, Question, asking
from stages.adapters.play import Play, scenario_of, scenario_text
from stages.adapters.tool_text import observed, spoken, with_tools
from stages.adapters.verifiers_rubric import failures, limit_by_threads
from stages.frame.loops import event_loop
from stages.frame.types import Env, Message, Scenario, Step, UsageError


def scenarios_v1(env: Any, split: str, n: int | None) -> list[Scenario]:
    """The first n tasks of a v1 Env's taskset; None = all of them, of a taskset that ends."""
    tasks = itertools.islice(env.taskset, n)
    return [Scenario("verifiers", split, task.data.id or str(task.data.idx), _dumped(task)) for task in tasks]


def _dumped(task: Any) -> dict[str, Any]:
    return {"task": task.data.model_dump(mode="json")}


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
        """Hand over the reply. Raises Malformed for a tool call that cannot be read; RuntimeError after the end, and for
        whatever failed.
        """
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
    reward = float(trained[0].reward)
    if not math.isfinite(reward):
        raise RuntimeError(f"the environment gave the reward {reward}")
    return reward, bool(trained[0].is_truncated)


def as_v1(
    make_env: Callable[[], Env],
    scenarios: Sequence[Scenario],
    *,
    max_turns: int,
    malformed_allowance: int = 1,
) -> tuple[type, type, type]:
    """(Taskset, Env, Harness) of ours. A module that verifiers is told the name of exports all three:

        Desk, DeskEnv, DeskHarness = as_v1(make, scenarios, max_turns=12)
        __all__ = ["Desk", "DeskEnv", "DeskHarness"]

    max_turns: replies, after which an episode is truncated: its trace stops by "max_turns". The reward is named
    "turnwise"; trace.info["turnwise"] has how it ended. The harness is a chat in this process, without tools.
    Raises UsageError where verifiers is not there, or an older one.
    """
    try:
        import verifiers.v1 as vf
    except ImportError:
        raise UsageError("as_v1 needs verifiers' newer interface. Run: pip install 'verifiers>=0.4'") from None

    class TurnwiseData(vf.TaskData):  # type: ignore[misc, unused-ignore]
        scenario: str

    class TurnwiseTask(vf.Task[TurnwiseData, vf.State, vf.TaskConfig]):  # type: ignore[misc, unused-ignore]
        pass

    class TurnwiseTaskset(vf.Taskset[TurnwiseTask, vf.TasksetConfig]):  # type: ignore[misc, unused-ignore]
        def load(self) -> Iterator[Any]:
            for one in scenarios:
                yield TurnwiseTask(TurnwiseData(name=one.id, scenario=scenario_text(one)), self.config.task)

    class TurnwiseEnvConfig(vf.EnvConfig):  # type: ignore[misc, unused-ignore]
        agent: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})

    class TurnwiseEnv(vf.Env[TurnwiseEnvConfig]):  # type: ignore[misc, unused-ignore]
        async def run(self, task: Any, agents: Any) -> None:
            # In threads, since an environment may wait for an LLM, and other episodes go on meanwhile.
            begin = lambda: Play(  # noqa: E731
                make_env, scenario_of(task.data.scenario), max_turns=max_turns, malformed_allowance=malformed_allowance
            )
            play = await asyncio.to_thread(begin)
            async with agents.agent.interaction(task.with_data(system_prompt=play.system)) as talk:
                said = await talk.turn(play.text)
                while not said.terminated:
                    text = await asyncio.to_thread(play.act, said.last_reply)
                    if play.over:
                        talk.trace.info["turnwise"] = {
                            "terminated": play.terminated,
                            "truncated": play.truncated,
                            "said": text,
                        }
                        break
                    said = await talk.turn(text)
                if play.truncated:
                    talk.trace.stop("max_turns")
            talk.trace.record_reward("turnwise", play.reward())

    return TurnwiseTaskset, TurnwiseEnv, _chat_harness()


def _chat_harness() -> type:
    """A harness that asks the model once a segment, from this process: no program to install and to start."""
    import httpx
    import verifiers.v1 as vf
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.runtimes import ProgramResult

    class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc, unused-ignore]
        APPENDS_SYSTEM_PROMPT, SUPPORTS_RESUME = True, True
        EXECUTES_CODE, NEEDS_CONTAINER = False, False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
            messages = [*([{"role": "system", "content": system}] if system else []), *said]
            async with httpx.AsyncClient(timeout=None) as client:
                response = await client.post(
                    f"{endpoint}/chat/completions",
                    json={"model": ctx.model, "messages": messages},
                    headers={"Authorization": f"Bearer {secret}"},
                )
            failed = response.status_code >= 400
            return ProgramResult(exit_code=int(failed), stdout="", stderr=response.text if failed else "")

    return ChatHarness
