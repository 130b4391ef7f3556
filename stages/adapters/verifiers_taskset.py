"""Our environments as a Taskset, an Env and a Harness of verifiers' newer interface ("v1", seen with 0.4.0). A module
exports them so that verifiers finds them by its name:

    # desk_v1.py, on the path
    make = envs.make_env("service_desk", {})
    Desk, DeskEnv, DeskHarness = as_v1(make, envs.scenarios("service_desk", {}, "train", 100, 0), max_turns=12)
    __all__ = ["Desk", "DeskEnv", "DeskHarness"]

A failure is an error of the episode there, never a reward. Theirs as ours: adapters/verifiers_v1.py. [ours]
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stages.adapters.play import Play, scenario_of, scenario_text
from stages.frame.types import Env, Scenario, UsageError


def as_v1(
    make_env: Callable[[], Env], scenarios: Sequence[Scenario], *, max_turns: int, malformed_allowance: int = 1
) -> tuple[type, type, type]:
    """(Taskset, Env, Harness) of ours, all three to be exported: without the harness verifiers takes one that runs commands.

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

    return TurnwiseTaskset, TurnwiseEnv, chat_harness()


def chat_harness() -> type:
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
