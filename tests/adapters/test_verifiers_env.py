"""verifiers' side: a stand-in for the classic MultiTurnEnv, played as ours; and ours by its methods, driven by its
rollout loop written out here.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from stages import envs
from stages.adapters.verifiers_env import FromVerifiers, ToVerifiers, as_verifiers
from stages.frame.border import BrokenEnvironment
from stages.frame.types import Malformed, Message, Outcome, Scenario, SimulatorError, Step, UsageError
from stages.llm.roles import Roles
from stages.llm.scripted import ScriptedEngine
from stages.play.rollout import RolloutSettings, rollout

SETTINGS = RolloutSettings(
    adapter=None, temperature=0.0, max_tokens=100, max_turns=9, malformed_allowance=1, slots=4, attempts=2, seed=0
)


@dataclass
class Score:
    reward: float


class Rubric:
    """verifiers.Rubric as far as it is called: it books 0.0 for a reward function that raises."""

    def __init__(self, *funcs: Callable[..., Any], weights: Sequence[float] = ()) -> None:
        self.funcs, self.weights = list(funcs), list(weights) or [1.0] * len(funcs)

    async def call_reward_func(self, func: Callable[..., Any], **known: Any) -> float:
        wanted = inspect.signature(func).parameters
        every = any(one.kind is one.VAR_KEYWORD for one in wanted.values())
        try:
            value = func(**{name: one for name, one in {**known, "parser": None}.items() if every or name in wanted})
            return float(await value if inspect.isawaitable(value) else value)
        except Exception:  # that is what verifiers does
            return 0.0

    async def score_rollout(self, prompt: Any, completion: Any, answer: str, state: Any, **known: Any) -> Score:
        known |= {"prompt": prompt, "completion": completion, "answer": answer, "state": state}
        scores = [await self.call_reward_func(func=func, **known) for func in self.funcs]
        return Score(sum(score * weight for score, weight in zip(scores, self.weights, strict=True)))


def right(completion: list[Message], answer: str) -> float:
    return float(completion[-1]["content"] in (f"yes, {answer}", answer))


async def short(state: dict[str, Any], **kwargs: Any) -> float:
    assert set(kwargs) >= {"prompt", "completion", "answer", "task", "info", "example_id", "parser"}
    return float(state["turn"] == 1)


class Riddle:
    """The classic methods, with hints until the answer is said."""

    parser = None

    def __init__(self, max_turns: int = 3, rubric: Rubric | None = None) -> None:
        self.max_turns, self.rubric = max_turns, rubric or Rubric(right)

    async def setup_state(self, state: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {**state, "hints": ["it flies", "it sings"]}

    async def max_turns_reached(self, state: dict[str, Any]) -> bool:
        return bool(state["turn"] >= self.max_turns > 0)

    async def is_completed(self, messages: list[Message], state: dict[str, Any], **kwargs: Any) -> bool:
        said = messages[-1]["role"] == "assistant" and messages[-1]["content"] == state["answer"]
        return said or await self.max_turns_reached(state)

    def env_response(
        self, messages: list[Message], state: dict[str, Any], **kwargs: Any
    ) -> tuple[list[Message], dict[str, Any]]:
        if messages[-1]["content"] == "boom":
            raise ConnectionError("the judge is gone")
        return [{"role": "user", "content": state["hints"].pop(0)}], state


ROW = {
    "prompt": [{"role": "system", "content": "Riddles."}, {"role": "user", "content": "What am I?"}],
    "answer": "bird",
}
SCENARIO = Scenario("riddle", "train", "x", ROW)


def start(**settings: Any) -> FromVerifiers:
    env = FromVerifiers(Riddle(**settings))
    assert env.reset(SCENARIO) == ({"role": "user", "content": "What am I?"},) and env.system == "Riddles."
    return env


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def test_an_episode_is_scored_at_its_end_and_the_end_is_no_turn_limit() -> None:
    env = start(rubric=Rubric(right, short, weights=[1.0, 0.5]))
    assert env.step(said("fish?")) == Step(({"role": "user", "content": "it flies"},))
    assert env.step(said("bird")) == Step(({"role": "user", "content": "The end."},), 1.0, terminated=True)
    with pytest.raises(RuntimeError, match="reset"):
        env.step(said("bird"))
    assert start(rubric=Rubric(right, short, weights=[1.0, 0.5])).step(said("bird")).reward == 1.5


def test_out_of_turns_is_truncated_unless_it_is_over_anyway() -> None:
    env = start()
    steps = [env.step(said(text)) for text in ("a", "b", "c")]
    assert [(s.reward, s.terminated, s.truncated) for s in steps[1:]] == [(0.0, False, False), (0.0, False, True)]
    env = start()
    steps = [env.step(said(text)) for text in ("a", "b", "bird")]
    assert (steps[-1].reward, steps[-1].terminated, steps[-1].truncated) == (1.0, True, False)


def test_what_its_environment_ends_with_is_the_last_observation() -> None:
    class Farewell(Riddle):
        async def is_completed(self, messages: list[Message], state: dict[str, Any], **kwargs: Any) -> bool:
            return bool(messages[-1]["content"] == "it sings")

    env = FromVerifiers(Farewell(rubric=Rubric(lambda completion: float(len(completion)))))
    env.reset(SCENARIO)
    assert env.step(said("a")).terminated is False
    assert env.step(said("b")) == Step(({"role": "user", "content": "it sings"},), 4.0, terminated=True)


def broken(state: dict[str, Any]) -> float:
    raise ConnectionError("the judge is gone")


@pytest.mark.parametrize(
    ("text", "rubric", "error", "what"),
    [
        ("boom", Rubric(right), ConnectionError, "gone"),
        ("bird", Rubric(right, broken), ConnectionError, "gone"),  # verifiers itself would book 0.0
        ("bird", Rubric(lambda answer: float("nan")), BrokenEnvironment, "finite number as reward, found float nan"),
    ],
)
def test_a_failure_is_no_reward_and_ends_the_episode(
    text: str, rubric: Rubric, error: type[Exception], what: str
) -> None:
    env = start(rubric=rubric)
    with pytest.raises(error, match=what):
        env.step(said(text))
    with pytest.raises(RuntimeError, match="reset"):
        env.step(said("bird"))


def test_in_a_rollout_a_failure_is_the_environment_s_and_one_environment_serves_many_episodes() -> None:
    shared = Riddle()
    names = ("bird", "no", "Action: boom")

    def reply(prompt: str, request: object) -> str:
        return next(f"Thought: hm\nAction: {name}" for name in names if f"say {name}" in prompt)

    class React(FromVerifiers):
        def step(self, message: Message) -> Step:
            return super().step(said(str(message["content"]).rpartition("Action: ")[2]))

    rows = [{**ROW, "prompt": [{"role": "user", "content": f"say {name}"}]} for name in names]
    scenarios = [Scenario("riddle", "train", str(i), row) for i, row in enumerate(rows)]
    episodes = rollout(ScriptedEngine(reply), lambda: React(shared), scenarios, Roles("toy", {"policy": ""}), SETTINGS)
    assert [e.outcome for e in episodes] == [Outcome.SCORED, Outcome.TRUNCATED, Outcome.ENV_FAILED]
    assert [e.total_reward for e in episodes] == [1.0, 0.0, 0.0] and episodes[2].turns == ()


def generate(ours: ToVerifiers, row: dict[str, Any], replies: Sequence[str]) -> tuple[list[Message], dict[str, Any]]:
    """The loop of MultiTurnEnv.rollout in verifiers 0.1.5, with replies in place of a model."""

    async def run() -> tuple[list[Message], dict[str, Any]]:
        said_so_far, completion, waiting = list(row["prompt"]), [], list(replies)
        state = await ours.setup_state({**row, "completion": [], "responses": [], "turn": 0})
        while not await ours.is_completed(said_so_far, state):
            message = said(waiting.pop(0))
            said_so_far.append(message)
            completion.append(message)
            state["turn"] += 1
            if await ours.is_completed(said_so_far, state):
                break
            answer, state = await ours.env_response(said_so_far, state)
            said_so_far += answer
            completion += answer
        return completion, state

    return asyncio.run(run())


def test_ours_is_played_by_its_loop_to_the_same_end() -> None:
    scenarios = envs.scenarios("game24", {}, "train", 2, 0)
    ours = ToVerifiers(envs.make_env("game24", {}), scenarios, max_turns=9)
    rows = ours.rows()
    assert [row["prompt"][0]["role"] for row in rows] == ["system", "system"] and rows[0]["prompt"] != rows[1]["prompt"]
    completion, state = generate(ours, rows[1], ["Action: go", "Thought: no\nAction: submit 0"])
    assert [m["role"] for m in completion] == ["assistant", "user", "assistant", "user"]
    assert "use expand NODE" in completion[1]["content"] and completion[3]["content"].endswith("You lose.")
    play = state["turnwise"]
    assert (ours.reward(state), play.terminated, play.truncated) == (0.0, True, False)


def test_the_last_reply_is_looked_at_and_the_turn_limit_is_told_apart() -> None:
    scenario = Scenario("math", "train", "x", {"problem": "3 + 4?", "answer": "7", "level": 1})
    ours = ToVerifiers(envs.make_env("math", {}), [scenario], max_turns=1)
    completion, state = generate(ours, ours.rows()[0], ["7"])
    assert (ours.reward(state), completion[-1]["content"], state["turnwise"].terminated) == (1.0, "Right.", True)
    ours = ToVerifiers(
        envs.make_env("twenty_questions", {}), envs.scenarios("twenty_questions", {}, "train", 1, 0), max_turns=2
    )
    _, state = generate(ours, ours.rows()[0], ["Action: Is it alive?"] * 2)
    assert (ours.reward(state), state["turnwise"].terminated, state["turnwise"].truncated) == (0.0, False, True)


class Unsteady:
    """Begins otherwise each time; its simulator fails at the second step."""

    system = "Unsteady."
    tools: Sequence[Any] = ()
    begun = 0

    def __init__(self, steady: bool) -> None:
        self.steady, self.steps = steady, 0

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        Unsteady.begun += 1
        return ({"role": "user", "content": "Hi." if self.steady else f"Hi {Unsteady.begun}."},)

    def step(self, message: Message) -> Step:
        self.steps += 1
        if message["content"] == "?":
            raise Malformed("say a word")
        if self.steps > 1:
            raise SimulatorError("the user is silent")
        return Step(({"role": "user", "content": "Go on."},))


def test_a_simulator_that_fails_raises_through_and_leaves_no_reward() -> None:
    ours = ToVerifiers(lambda: Unsteady(True), [SCENARIO], max_turns=5)
    row = ours.rows()[0]
    with pytest.raises(SimulatorError, match="silent"):
        generate(ours, row, ["a", "b"])

    async def failed() -> dict[str, Any]:
        state = await ours.setup_state(dict(row))
        for text in ("a", "b"):
            try:
                await ours.env_response([said(text)], state)
            except SimulatorError:
                return state
        raise AssertionError

    state = asyncio.run(failed())
    assert state["turnwise"].over
    with pytest.raises(RuntimeError, match="no reward: SimulatorError: the user is silent"):
        ours.reward(state)


def test_unreadable_replies_end_the_episode_as_the_policy_s_failure() -> None:
    ours = ToVerifiers(lambda: Unsteady(True), [SCENARIO], max_turns=5)
    completion, state = generate(ours, ours.rows()[0], ["?", "?"])
    assert completion[-1]["content"] == "say a word" and (ours.reward(state), state["turnwise"].terminated) == (
        0.0,
        True,
    )


def test_an_environment_that_begins_otherwise_each_time_is_refused() -> None:
    ours = ToVerifiers(lambda: Unsteady(False), [SCENARIO], max_turns=5)
    with pytest.raises(RuntimeError, match="begins differently each time"):
        generate(ours, ours.rows()[0], ["a"])


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed")
def test_without_verifiers_it_says_what_to_install() -> None:
    with pytest.raises(UsageError, match=r"verifiers>=0\.1\.5,<0\.1\.8"):
        as_verifiers(ToVerifiers(lambda: Unsteady(True), [SCENARIO], max_turns=5))
