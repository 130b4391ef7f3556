"""OpenEnv: a stand-in of its client is played as ours; the library's own server and client play ours (`make
test-adapters`, 0.10.0).
"""

from __future__ import annotations

import importlib.util
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from stages import envs
from stages.adapters.openenv_text import FromOpenEnv, as_openenv
from stages.frame.border import BrokenEnvironment
from stages.frame.types import Env, Malformed, Message, Scenario, SimulatorError, Step, UsageError

HAS_OPENENV = importlib.util.find_spec("openenv") is not None


@dataclass
class Result:
    observation: Any
    reward: float | None = None
    done: bool = False


class Echo:
    """A client's methods: three steps, the last one pays."""

    def __init__(self, rewards: Sequence[float | None] = (None, 0.5, 1.0), cut: bool = False) -> None:
        self.rewards, self.cut, self.given = list(rewards), cut, dict[str, Any]()

    def reset(self, **given: Any) -> Result:
        self.given = given
        return Result({"text": "Say something."})

    def step(self, action: Any) -> Result:
        if action == "boom":
            raise ConnectionError("the server is gone")
        reward = self.rewards.pop(0)
        return Result({"text": f"you said {action}", "cut": self.cut}, reward, not self.rewards)


def start(client: Echo) -> FromOpenEnv:
    env = FromOpenEnv(client, system="Echo.", tell=lambda seen: str(seen["text"]))
    data = {"seed": 3, "split": "train"}
    assert env.reset(Scenario("echo", "train", "x", data)) == ({"role": "user", "content": "Say something."},)
    assert client.given == data
    return env


def said(text: str) -> Message:
    return {"role": "assistant", "content": f"Action: {text}"}


def test_rewards_and_the_end_are_its_own() -> None:
    env = start(Echo())
    steps = [env.step(said(text)) for text in ("a", "b", "c")]
    assert [(s.reward, s.terminated, s.truncated) for s in steps] == [
        (0.0, False, False),
        (0.5, False, False),
        (1.0, True, False),
    ]
    assert steps[0].messages == ({"role": "user", "content": "you said a"},)
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step(said("d"))
    assert start(Echo([0.0], cut=True)).step(said("a")) == Step(
        ({"role": "user", "content": "you said a"},), 0.0, truncated=True
    )


@pytest.mark.parametrize(
    ("text", "rewards", "error"), [("boom", [1.0], ConnectionError), ("a", [float("nan")], BrokenEnvironment)]
)
def test_a_failure_is_no_reward_and_ends_the_episode(text: str, rewards: list[float], error: type[Exception]) -> None:
    env = start(Echo(rewards))
    with pytest.raises(Malformed):
        env.step({"role": "assistant", "content": "hello"})
    with pytest.raises(error):
        env.step(said(text))
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step(said("a"))


@pytest.mark.skipif(HAS_OPENENV, reason="openenv is installed")
def test_without_openenv_it_says_what_to_install() -> None:
    with pytest.raises(UsageError, match="pip install openenv"):
        as_openenv(envs.make_env("game24", {}), [], max_turns=3, at_once=1)


class Silent:
    system = "Silent."
    tools: Sequence[Any] = ()

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        return ({"role": "user", "content": "Hi."},)

    def step(self, message: Message) -> Step:
        raise SimulatorError("the user is silent")


@contextmanager
def served(make: Callable[[], Env], scenarios: list[Scenario], max_turns: int) -> Iterator[str]:
    import uvicorn

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = as_openenv(make, scenarios, max_turns=max_turns, at_once=4)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not server.started and time.monotonic() < until:
        time.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


@contextmanager
def played(url: str) -> Iterator[FromOpenEnv]:
    from openenv.core import GenericEnvClient

    with GenericEnvClient(base_url=url).sync() as client:
        yield FromOpenEnv(client, system="", tell=lambda seen: str(seen["text"]), act=lambda text: {"reply": text})


@pytest.mark.slow
@pytest.mark.skipif(not HAS_OPENENV, reason="openenv is not installed: make test-adapters")
def test_there_and_back_again_through_its_server_every_step_is_the_same() -> None:
    scenarios = envs.scenarios("twenty_questions", {}, "train", 3, 0)
    make = envs.make_env("twenty_questions", {})
    with served(make, scenarios, 9) as url, played(url) as there, played(url) as beside:
        beside.reset(Scenario("o", "train", "x", {"seed": 0}))
        for number, scenario in enumerate(scenarios):
            direct = make()
            assert there.reset(Scenario("o", "train", "x", {"seed": number})) == direct.reset(scenario)
            for question in ("Is it alive?", "Is it big?", f"Is it a {scenario.data['object']}?"):
                got, wanted = there.step(said(question)), direct.step(said(question))
                assert (got.messages, got.reward, got.terminated) == (wanted.messages, wanted.reward, wanted.terminated)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_OPENENV, reason="openenv is not installed: make test-adapters")
def test_through_its_server_a_cut_is_a_cut_and_a_failure_a_failure() -> None:
    scenario = Scenario("o", "train", "x", {"seed": 0})
    scenarios = envs.scenarios("twenty_questions", {}, "train", 1, 0)
    with served(envs.make_env("twenty_questions", {}), scenarios, 2) as url, played(url) as env:
        env.reset(scenario)
        steps = [env.step(said("Is it alive?")) for _ in range(2)]
        assert [(s.terminated, s.truncated) for s in steps] == [(False, False), (False, True)]
    with served(Silent, [Scenario("o", "train", "x", {})], 2) as url, played(url) as env:
        env.reset(scenario)
        with pytest.raises(RuntimeError, match="the user is silent"):
            env.step(said("hello"))
