"""Every adapter stands at the border: what another library's environment hands over is checked by the rules of
stages/frame/border.py, and so is what one of ours hands to another library.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stages.adapters.gymnasium_text import FromGymnasium, ToGymnasium
from stages.adapters.openenv_text import FromOpenEnv
from stages.adapters.play import Play, scenario_text
from stages.adapters.tool_text import observed
from stages.adapters.trl_env import trl_environment, trl_rows
from stages.adapters.verifiers_env import FromVerifiers, ToVerifiers
from stages.adapters.verifiers_v1 import _judged
from stages.frame.border import BrokenEnvironment
from stages.frame.types import Env, Message, Scenario, SimulatorError, Step
from stages.llm.openai import read_text
from stages.play.environment import _without_thoughts

NAN, HALF = float("nan"), "half \ud83d of it"
START = Scenario("x", "train", "x", {})
ACT: Message = {"role": "assistant", "content": "Action: go"}
NUMBER, UNICODE = "wants a finite number as reward", "wants valid Unicode as "


class Gym:
    """Gymnasium's methods, answering what they are told to."""

    def __init__(self, *step: Any, reset: Any = ("Begin.", {})) -> None:
        self._reset, self._step = reset, step

    def reset(self) -> Any:
        return self._reset

    def step(self, action: str) -> Any:
        return self._step


def gym(*step: Any, **reset: Any) -> Step:
    env = FromGymnasium(Gym(*step, **reset), system="Go.")
    env.reset(START)
    return env.step(ACT)


GYM: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (("b", NAN, False, False, {}), {}, NUMBER),
    (("b", None, False, False, {}), {}, "wants a number as reward"),
    (("b", 1.0, "False", False, {}), {}, "wants True or False as terminated"),
    (("b", 1.0, True, None, {}), {}, "wants True or False as truncated"),
    ((HALF, 1.0, True, False, {}), {}, UNICODE),
    ((b"b", 1.0, True, False, {}), {}, "wants a text as observation"),
    (("b", 1.0, True, {}), {}, r"wants \(observation, reward, terminated, truncated, info\)"),
    ((), {"reset": "Begin."}, r"reset of FromGymnasium of Gym wants \(observation, info\)"),
    ((), {"reset": (HALF, {})}, UNICODE),
]


@pytest.mark.parametrize(("step", "reset", "said"), GYM)
def test_of_gymnasium(step: tuple[Any, ...], reset: dict[str, Any], said: str) -> None:
    with pytest.raises(BrokenEnvironment, match=f"of FromGymnasium of Gym {said[said.find('wants') :]}"):
        gym(*step, **reset)


def test_numpy_s_numbers_and_flags_are_read() -> None:
    found = gym("b", np.float32(0.5), np.bool_(True), np.bool_(True), {})
    assert found == Step(({"role": "user", "content": "b"},), 0.5, terminated=True)
    assert (type(found.reward), type(found.terminated)) == (float, bool)


class Client:
    """OpenEnv's client."""

    def __init__(self, text: Any = "b", reward: Any = 1.0, done: Any = True) -> None:
        self._answer = SimpleNamespace(observation={"text": text}, reward=reward, done=done)

    def reset(self, **_: Any) -> Any:
        return SimpleNamespace(observation={"text": "Begin."}, reward=None, done=False)

    def step(self, action: Any) -> Any:
        return self._answer


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"reward": NAN}, NUMBER),
        ({"reward": "1"}, "wants a number as reward"),
        ({"done": None}, "wants True or False as done"),
        ({"text": HALF}, UNICODE),
        ({"text": 3}, "wants a text as observation"),
    ],
)
def test_of_openenv(answer: dict[str, Any], said: str) -> None:
    env = FromOpenEnv(Client(**answer), system="Go.", tell=lambda seen: seen["text"])
    env.reset(START)
    with pytest.raises(BrokenEnvironment, match=f"step of FromOpenEnv of Client {said}"):
        env.step(ACT)


class Classic:
    """verifiers' MultiTurnEnv: over after one reply."""

    def __init__(self, reward: Any) -> None:
        self.rubric = self
        self._reward = reward

    async def setup_state(self, state: Any) -> Any:
        return state

    async def is_completed(self, messages: Any, state: Any) -> bool:
        return bool(state["turn"])

    async def call_reward_func(self, func: Any) -> None: ...

    async def score_rollout(self, state: Any) -> Any:
        return SimpleNamespace(reward=self._reward)


def test_of_verifiers() -> None:
    def start(reward: Any, content: Any) -> FromVerifiers:
        env = FromVerifiers(Classic(reward))
        env.reset(Scenario("x", "train", "x", {"prompt": [{"role": "user", "content": content}]}))
        return env

    assert start(1, "Begin.").step(ACT).reward == 1.0
    with pytest.raises(BrokenEnvironment, match=f"score_rollout of Classic {NUMBER}"):
        start(NAN, "Begin.").step(ACT)
    for content in (HALF, [{"type": "text", "text": HALF}]):
        with pytest.raises(BrokenEnvironment, match=UNICODE):
            start(1, content)
    wrong: list[Any] = [3, [{"type": "text", "text": None}], ["text"], [{"type": "image_url"}]]
    for content in wrong:
        with pytest.raises(BrokenEnvironment, match="an observation of verifiers"):
            observed({"role": "tool", "content": content})


def test_of_verifiers_newer_interface() -> None:
    def over(reward: Any) -> Future[Any]:
        agent, found = SimpleNamespace(trainable=True), Future[Any]()
        trace = SimpleNamespace(agent=agent, errors=(), is_timeout=False, is_truncated=False, rewards={}, reward=reward)
        found.set_result(SimpleNamespace(ok=True, errors=(), traces=[trace]))
        return found

    assert _judged(over(1)) == (1.0, False)
    with pytest.raises(BrokenEnvironment, match=NUMBER):
        _judged(over(NAN))


class Ours:
    """An environment of ours whose step is what it is told."""

    system, tools = "Go.", ()

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        return ({"role": "user", "content": "Begin."},)

    def step(self, message: Message) -> Step:
        return self._answer  # type: ignore[no-any-return]


SEEN = ({"role": "user", "content": "b"},)
OURS = [Step(SEEN, NAN, True), Step(SEEN, 1.0, True, True), Step(({"role": "user", "content": HALF},), 1.0, True), None]


@pytest.fixture(params=OURS, ids=["NaN", "both ends", "half a character", "nothing"])
def broken(request: pytest.FixtureRequest) -> Callable[[], Env]:
    return lambda: Ours(request.param)


def test_ours_to_gymnasium_and_openenv(broken: Callable[[], Env]) -> None:
    env = ToGymnasium(broken, [START], max_turns=3)  # as_gymnasium and as_openenv play this one
    env.reset()
    with pytest.raises(BrokenEnvironment, match=r"step of .*Ours wants"):
        env.step("Action: go")


def test_ours_to_trl_and_verifiers(broken: Callable[[], Env]) -> None:
    trained = trl_environment(broken, "Go", max_turns=3)()
    trained.reset(**trl_rows(broken, [START])[0])
    with pytest.raises(BrokenEnvironment, match=r"step of .*Ours wants"):
        trained.act("go")
    with pytest.raises(RuntimeError, match=r"has no reward: BrokenEnvironment: task.env: step"):
        trained.get_reward()
    play = Play(broken, START, max_turns=3, malformed_allowance=1)  # as_v1 plays by it, and ToVerifiers
    with pytest.raises(BrokenEnvironment):
        play.act("Action: go")
    with pytest.raises(RuntimeError, match="has no reward"):
        ToVerifiers(broken, [START], max_turns=3).reward({"turnwise": play})
    assert json.loads(scenario_text(START))["id"] == "x"


def test_the_lines_of_an_llm_inside_an_environment() -> None:
    with pytest.raises(ValueError, match="no Unicode"):  # of a server
        read_text({"choices": [{"message": {"content": HALF}}]})
    with pytest.raises(SimulatorError, match="half of a surrogate pair"):
        _without_thoughts(lambda messages, **_: HALF)([{"role": "user", "content": "Who are you?"}])
