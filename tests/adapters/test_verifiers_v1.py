"""verifiers' newer interface, the library itself: it plays ours against an endpoint, and we play its environments.
`make test-adapters` runs it, with 0.4.0.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

vf = pytest.importorskip("verifiers.v1", reason="verifiers 0.4 is not installed: make test-adapters")

from verifiers.v1.utils.loaders import load_environment, resolve_env_config  # noqa: E402

from stages import envs  # noqa: E402
from stages.adapters.verifiers_v1 import playing, scenarios_v1  # noqa: E402
from stages.frame.types import Malformed, Message, Outcome, Step, UsageError  # noqa: E402
from stages.llm.roles import Roles  # noqa: E402
from stages.llm.scripted import ScriptedEngine  # noqa: E402
from stages.play.rollout import RolloutSettings, rollout  # noqa: E402

SETTINGS = RolloutSettings(
    adapter=None, temperature=0.0, max_tokens=100, max_turns=9, malformed_allowance=1, slots=4, attempts=1, seed=0
)

OURS = """
from collections.abc import Sequence
from typing import Any

from stages import envs
from stages.adapters.verifiers_taskset import as_v1
from stages.frame.types import SimulatorError

class Silent:
    system, tools = "Silent.", ()
    def reset(self, scenario): return ({"role": "user", "content": "Hi."},)
    def step(self, message): raise SimulatorError("the user is silent")

make = Silent if %r == "silent" else envs.make_env("twenty_questions", {})
Task, Env, Harness = as_v1(make, envs.scenarios("twenty_questions", {}, "train", 3, 0), max_turns=%d)
__all__ = ["Task", "Env", "Harness"]
"""

# Two turns; a tool that only the tests' harness offers; mathematics by math-verify's own time limits.
THEIRS = """
import httpx, json
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

TOOL = {"type": "function", "function": {"name": "times", "description": "The product.", "parameters": {"type": "object"}}}


class Data(vf.TaskData):
    answer: str


class SumTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task, trace) -> float:
        from math_verify import parse, verify

        if "boom" in trace.last_reply:
            raise ConnectionError("the judge is gone")
        return float(verify(parse("$42$"), parse(trace.last_reply)))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for n in range(3):
            yield SumTask(Data(prompt=f"What is 6 times 7? {n}", system_prompt="Sums.", answer="42"), self.config.task)


class SumsEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"}, max_turns=3)


class SumsEnv(vf.Env[SumsEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            while not said.terminated and "boxed" not in said.last_reply:
                said = await talk.turn("Go on.")


class ToolHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT, SUPPORTS_RESUME, EXECUTES_CODE, NEEDS_CONTAINER = True, True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [message_to_wire(m) for m in prompt]
        messages = [{"role": "system", "content": system}, *said]
        while True:
            async with httpx.AsyncClient(timeout=None) as client:
                body = {"model": ctx.model, "messages": messages, "tools": [TOOL]}
                got = await client.post(f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"})
            if got.status_code >= 400:
                return ProgramResult(1, "", got.text)
            message = got.json()["choices"][0]["message"]
            if not message.get("tool_calls"):
                return ProgramResult(0, "", "")
            call = message["tool_calls"][0]
            a = json.loads(call["function"]["arguments"])
            told = {"role": "tool", "tool_call_id": call["id"], "content": str(a["a"] * a["b"])}
            messages = [*messages, message, told]


__all__ = ["Sums", "SumsEnv", "ToolHarness"]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """An environment of verifiers, from the source of a module that it finds by its name."""

    def load(name: str, source: str, **config: Any) -> Any:
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return load_environment(resolve_env_config({"taskset": {"id": name}, **config}))

    return load


@contextmanager
def endpoint(reply: Callable[[list[Message]], str]) -> Iterator[str]:
    """An OpenAI endpoint on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            message = {"role": "assistant", "content": reply(body["messages"])}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            told = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            content = json.dumps(told).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


def theirs(env: Any, url: str) -> Any:
    """One episode of it, by verifiers alone."""

    async def run() -> Any:
        async with env.serving():
            task = next(iter(env.taskset))
            client = vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY")
            return await env.run_episode(task, vf.ModelContext(model="m", client=client))

    return asyncio.run(run())


def asking_for(name: str) -> Callable[[list[Message]], str]:
    return lambda messages: "Action: Is it alive?" if len(messages) < 4 else f"Action: Is it a {name}?"


def test_it_plays_ours_to_the_end(module: Callable[..., Any]) -> None:
    name = envs.scenarios("twenty_questions", {}, "train", 3, 0)[0].data["object"]
    with endpoint(asking_for(name)) as url:
        episode = theirs(module("ours_v1", OURS % ("", 9)), url)
    (trace,) = episode.traces
    assert (episode.ok, trace.reward, trace.num_turns, trace.is_truncated) == (True, 1.0, 2, False)
    assert trace.messages[0].role == "system" and "20 Questions" in trace.messages[0].content
    assert trace.info["turnwise"]["said"].endswith("You win.") and trace.info["turnwise"]["terminated"]


def test_out_of_turns_is_truncated_there(module: Callable[..., Any]) -> None:
    with endpoint(lambda messages: "Action: Is it alive?") as url:
        (trace,) = theirs(module("ours_short", OURS % ("", 2)), url).traces
    assert (trace.reward, trace.num_turns, trace.is_truncated, trace.ok) == (0.0, 2, True, True)


def test_a_simulator_that_fails_is_an_error_there(module: Callable[..., Any]) -> None:
    with endpoint(lambda messages: "Action: hello") as url:
        episode = theirs(module("ours_silent", OURS % ("silent", 9)), url)
    assert not episode.ok and "the user is silent" in str(episode.last_error or episode.traces[0].last_error)


def test_there_and_back_again_every_step_is_the_same(module: Callable[..., Any]) -> None:
    env = module("ours_back", OURS % ("", 9))
    scenarios = scenarios_v1(env, "train", 2)
    assert len(scenarios) == 2 and len(scenarios_v1(env, "train", None)) == 3
    with playing(env) as make:
        for scenario, source in zip(scenarios, envs.scenarios("twenty_questions", {}, "train", 2, 0), strict=True):
            there, direct = make(), envs.make_env("twenty_questions", {})()
            assert there.reset(scenario) == direct.reset(source) and there.system == direct.system
            for question in ("Is it alive?", "Is it big?", f"Is it a {source.data['object']}?"):
                message = {"role": "assistant", "content": f"Thought: hm\nAction: {question}"}
                got, wanted = there.step(message), direct.step(message)
                assert (got.reward, got.terminated, got.truncated) == (wanted.reward, wanted.terminated, False)
                assert got.terminated or got.messages == wanted.messages  # the last one verifiers keeps to itself
            with pytest.raises(RuntimeError, match="call reset first"):
                there.step(message)


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


CALL = 'Thought: a tool does it\nAction: {"name": "times", "arguments": {"a": 6, "b": 7}}'


def test_its_tools_are_told_and_called_and_its_mathematics_is_right(module: Callable[..., Any]) -> None:
    env = module("theirs_v1", THEIRS)
    (scenario,) = scenarios_v1(env, "train", 1)
    with playing(env) as make:
        played = make()
        assert played.reset(scenario) == ({"role": "user", "content": "What is 6 times 7? 0"},)
        assert played.system.startswith("Sums.") and "times: The product." in played.system
        with pytest.raises(Malformed, match="not valid JSON"):
            played.step(said('Action: {"name"'))
        assert played.step(said(CALL)) == Step(({"role": "user", "content": "Tool output: 42"},))
        assert played.step(said("It is 42, I think.")) == Step(({"role": "user", "content": "Go on."},))
        last = played.step(said(r"\boxed{\frac{84}{2}}"))
        assert (last.reward, last.terminated, last.truncated) == (1.0, True, False)
        played.reset(scenario)
        steps = [played.step(said(text)) for text in ("hm", "well", "no")]
        assert [(s.reward, s.terminated, s.truncated) for s in steps[1:]] == [(0.0, False, False), (0.0, False, True)]


def test_what_fails_is_no_reward_and_an_abandoned_episode_is_left(module: Callable[..., Any]) -> None:
    env = module("theirs_fails", THEIRS)
    (scenario,) = scenarios_v1(env, "train", 1)
    with playing(env) as make:
        played = make()
        played.reset(scenario)
        with pytest.raises(RuntimeError, match="the judge is gone"):
            played.step(said(r"boom \boxed{42}"))
        for _ in range(2):  # the first one is given up in the middle
            played.reset(scenario)
        assert played.step(said(r"\boxed{42}")).reward == 1.0
        make().reset(scenario)


def test_in_a_rollout_many_episodes_go_on_at_once(module: Callable[..., Any]) -> None:
    env = module("theirs_rollout", THEIRS)

    def reply(prompt: str, request: object) -> str:
        if "7? 0" in prompt:
            return r"boom \boxed{42} Action: x"
        return r"Action: \boxed{42}" if "7? 1" in prompt else "Action: hm"

    with playing(env) as make:
        scenarios = scenarios_v1(env, "train", 3)
        episodes = rollout(ScriptedEngine(reply), make, scenarios, Roles("toy", {"policy": ""}), SETTINGS)
    assert [e.outcome for e in episodes] == [Outcome.ENV_FAILED, Outcome.SCORED, Outcome.TRUNCATED]
    assert [e.total_reward for e in episodes] == [0.0, 1.0, 0.0]


def test_replies_are_not_run_as_commands_on_this_machine(module: Callable[..., Any]) -> None:
    env = module("theirs_bash", THEIRS, agent={"harness": {"id": "bash"}})
    with pytest.raises(UsageError, match="runs what the policy says as commands"), playing(env):
        pass


def test_a_seat_that_is_not_trained_needs_a_model_of_its_own(module: Callable[..., Any]) -> None:
    source = THEIRS.replace(
        "    async def run(self, task, agents):",
        "    async def setup(self, agents):\n        agents.agent.trainable = False\n\n    async def run(self, task, agents):",
    )
    env = module("theirs_judge", source)
    with playing(env) as make, pytest.raises(RuntimeError, match="nobody plays session"):
        make().reset(scenarios_v1(env, "train", 1)[0])


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("uv") is None, reason="uv is not on the path, with which verifiers installs its program"
)
def test_its_own_chat_program_is_played(module: Callable[..., Any]) -> None:
    source = THEIRS.replace(', "ToolHarness"]', "]")
    env = module("theirs_null", source, agent={"harness": {"id": "null"}})
    with playing(env) as make:
        played = make()
        assert played.reset(scenarios_v1(env, "train", 1)[0]) == ({"role": "user", "content": "What is 6 times 7? 0"},)
        assert played.step(said("hm")).messages == ({"role": "user", "content": "Go on."},)
        assert played.step(said(r"\boxed{42}")).reward == 1.0
