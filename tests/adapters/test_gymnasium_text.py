"""Gymnasium's side: a stand-in that follows its documented interface is played as ours, and ours by its five-tuple,
with nothing lost on the way.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from stages import envs
from stages.adapters.gymnasium_text import FromGymnasium, ToGymnasium, as_gymnasium
from stages.frame.border import BrokenEnvironment
from stages.frame.types import Env, Malformed, Message, Outcome, Scenario, SimulatorError, Step, UsageError
from stages.llm.roles import Roles
from stages.llm.scripted import ScriptedEngine
from stages.play.rollout import RolloutSettings, rollout

SETTINGS = RolloutSettings(
    adapter=None, temperature=0.0, max_tokens=100, max_turns=9, malformed_allowance=1, slots=4, attempts=2, seed=0
)


class Guess:
    """A Gymnasium environment without the package: the digit that the seed chose, three guesses, a time limit."""

    def __init__(self, limit: int = 3) -> None:
        self.limit, self.closed = limit, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.number, self.left = random.Random(seed).randrange(10), self.limit
        return (options or {}).get("greeting", "A digit."), {"number": self.number}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "boom":
            raise ConnectionError("the server is gone")
        if action == "nan":
            return "", float("nan"), True, False, {}
        if action == "pixels":
            return [0, 0], 0.0, False, False, {}  # type: ignore[return-value]
        guess = int(action)  # ValueError: the action's fault
        self.left -= 1
        text = "right" if guess == self.number else "higher" if guess < self.number else "lower"
        return text, float(guess == self.number), guess == self.number, self.left == 0, {"left": self.left}


def start(seed: int = 0, **data: Any) -> FromGymnasium:
    env = FromGymnasium(Guess(), system="Guess a digit.", malformed=(ValueError,))
    env.reset(Scenario("guess", "train", str(seed), {"seed": seed, **data}))
    return env


def act(action: str) -> Message:
    return {"role": "assistant", "content": f"Thought: hm\nAction: {action}"}


SIX = 6  # what seed 0 chooses


def test_terminated_and_truncated_stay_apart_and_what_is_over_by_itself_is_not_truncated() -> None:
    assert random.Random(0).randrange(10) == SIX
    env = start()
    assert env.step(act("5")) == Step(({"role": "user", "content": "higher"},), 0.0, False, False, {"left": 2})
    assert env.step(act("6")) == Step(({"role": "user", "content": "right"},), 1.0, True, False, {"left": 1})
    env = start()
    assert [(s.terminated, s.truncated) for s in (env.step(act("1")) for _ in range(3))] == [
        (False, False),
        (False, False),
        (False, True),
    ]
    env = start()
    steps = [env.step(act(a)) for a in ("1", "2", "6")]  # Gymnasium says both of the last one
    assert (steps[-1].reward, steps[-1].terminated, steps[-1].truncated) == (1.0, True, False)


def test_options_reach_the_environment_and_the_end_is_the_end() -> None:
    env = FromGymnasium(Guess(), system="s")
    with pytest.raises(RuntimeError, match="reset"):
        env.step(act("1"))
    assert env.reset(Scenario("g", "train", "x", {"options": {"greeting": "Hello."}})) == (
        {"role": "user", "content": "Hello."},
    )
    env = start()
    env.step(act("6"))
    with pytest.raises(RuntimeError, match="reset"):
        env.step(act("6"))


def test_reset_is_given_what_the_scenario_has_and_nothing_else() -> None:
    class Gem:
        """Takes a seed and no options, as GEM's environments do."""

        def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            return f"seed {seed}", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "", 1.0, True, False, {}

    class Bare(Gem):
        def reset(self) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
            return "no seed", {}

    env = FromGymnasium(Gem(), system="s")
    assert env.reset(Scenario("g", "train", "x", {"seed": 3}))[0]["content"] == "seed 3"
    assert env.reset(Scenario("g", "train", "x", {}))[0]["content"] == "seed None"
    with pytest.raises(TypeError, match="options"):  # what it cannot take is not dropped silently
        env.reset(Scenario("g", "train", "x", {"options": {"greeting": "Hello."}}))
    assert FromGymnasium(Bare(), system="s").reset(Scenario("g", "train", "x", {}))[0]["content"] == "no seed"


@pytest.mark.skipif(importlib.util.find_spec("gem") is None, reason="gem-llm is not installed: make test-adapters")
def test_gem_itself_is_played() -> None:
    import gem

    env = FromGymnasium(gem.make("game:GuessTheNumber-v0-easy"), system="Guess.", read=lambda text: text)
    (first,) = env.reset(Scenario("gem", "train", "1", {"seed": 1}))
    assert "between 1 and 10" in first["content"]
    step = env.step({"role": "assistant", "content": r"\boxed{3}"})  # what seed 1 hides
    assert (step.reward, step.terminated, step.truncated) == (1.0, True, False)


def test_only_errors_that_blame_the_action_are_malformed_and_they_change_nothing() -> None:
    env = start()
    for content in ("hello", "Thought: x\nAction: six"):
        with pytest.raises(Malformed):
            env.step({"role": "assistant", "content": content})
    assert env.step(act("6")).reward == 1
    fresh = FromGymnasium(Guess(), system="s")
    fresh.reset(Scenario("g", "train", "x", {"seed": 0}))
    with pytest.raises(ValueError, match="invalid literal"):
        fresh.step(act("six"))


@pytest.mark.parametrize(
    ("action", "error", "said"),
    [
        ("boom", ConnectionError, "gone"),
        ("nan", BrokenEnvironment, "finite number as reward, found float nan"),
        ("pixels", BrokenEnvironment, "wants a text as observation, found list"),
    ],
)
def test_a_failure_stays_a_failure_and_ends_the_episode(action: str, error: type[Exception], said: str) -> None:
    env = start()
    with pytest.raises(error, match=said):
        env.step(act(action))
    with pytest.raises(RuntimeError, match="reset"):
        env.step(act("6"))


def test_in_a_rollout_a_failure_is_no_reward_and_a_time_limit_is_a_truncation() -> None:
    def reply(prompt: str, request: object) -> str:
        return "Action: boom" if "greeting boom" in prompt else "Action: 6" if "greeting six" in prompt else "Action: 1"

    names = ("six", "one", "boom")
    scenarios = [
        Scenario("guess", "train", name, {"seed": 0, "options": {"greeting": f"greeting {name}"}}) for name in names
    ]
    make = lambda: FromGymnasium(Guess(), system="Guess.", malformed=(ValueError,))  # noqa: E731
    six, one, boom = rollout(ScriptedEngine(reply), make, scenarios, Roles("toy", {"policy": ""}), SETTINGS)
    assert (six.outcome, six.total_reward, one.outcome, one.total_reward) == (
        Outcome.SCORED,
        1.0,
        Outcome.TRUNCATED,
        0.0,
    )
    assert (boom.outcome, boom.turns, boom.attempts) == (Outcome.ENV_FAILED, (), 2) and "ConnectionError" in boom.error


class Broken:
    """One of our environments whose simulator fails at the second step."""

    system = "Broken."
    tools: Sequence[Any] = ({"type": "function", "function": {"name": "say"}},)

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        return ({"role": "user", "content": "Hi."}, {"role": "user", "content": scenario.id})

    def step(self, message: Message) -> Step:
        self.steps += 1
        if message["content"] == "?":
            raise Malformed("say a word")
        if self.steps > 1:
            raise SimulatorError("the user is silent")
        return Step(({"role": "user", "content": "Go on."},), truncated=message["content"] == "cut")


SCENARIOS = [Scenario("broken", "train", name, {}) for name in ("a", "b", "c")]


def test_ours_by_five_tuples_tells_system_and_tools_and_what_fails_raises() -> None:
    env = ToGymnasium(Broken, SCENARIOS, max_turns=5)
    text, info = env.reset()
    assert text == "Hi.\na" and info == {"system": "Broken.", "tools": list(Broken.tools), "scenario": "a"}
    assert env.step("word") == ("Go on.", 0.0, False, False, {"malformed": False})
    with pytest.raises(SimulatorError, match="silent"):
        env.step("word")
    with pytest.raises(RuntimeError, match="reset"):
        env.step("word")
    env.reset()
    assert env.step("cut")[2:4] == (False, True)


def test_unreadable_replies_are_observed_and_then_the_policy_s_failure() -> None:
    env = ToGymnasium(Broken, SCENARIOS, max_turns=5, malformed_allowance=1)
    env.reset()
    assert env.step("?") == ("say a word", 0.0, False, False, {"malformed": True})
    assert env.step("?") == ("say a word", 0.0, True, False, {"malformed": True})
    env = ToGymnasium(Broken, SCENARIOS, max_turns=1)
    env.reset()
    assert env.step("word")[2:4] == (False, True)  # out of turns: the state has a future


def test_the_seed_or_the_id_chooses_the_scenario() -> None:
    env = ToGymnasium(Broken, SCENARIOS, max_turns=5)
    assert [env.reset(seed=seed)[1]["scenario"] for seed in (None, None, 5, None, 1)] == ["a", "b", "c", "a", "b"]
    assert env.reset(options={"scenario": "c"})[1]["scenario"] == "c"
    with pytest.raises(UsageError, match="no scenario 'd'"):
        env.reset(options={"scenario": "d"})
    with pytest.raises(UsageError, match="no scenarios"):
        ToGymnasium(Broken, [], max_turns=5)


def stepped(env: Env, action: str) -> Step:
    """What the five-tuple is to say of a step."""
    try:
        step = env.step(act(action))
    except Malformed as error:
        return Step(({"role": "user", "content": str(error)},), info={"malformed": True})
    return replace(step, info={**step.info, "malformed": False})


@pytest.mark.parametrize(
    ("name", "actions"),
    [
        ("game24", ["expand 0: 1 + 1 = 2", "nonsense", "submit 0"]),
        ("service_desk", ["check photo", "give voucher", "log ledger", "close phone"]),
        ("twenty_questions", ["Is it alive?"] * 20),
        ("wiki_search", ["NAVIGATE nowhere", "BACK", "SUBMIT nothing"]),
    ],
)
def test_there_and_back_again_every_step_is_the_same(name: str, actions: list[str]) -> None:
    scenarios = envs.scenarios(name, {}, "train", 3, 0)
    make = envs.make_env(name, {})
    ours = ToGymnasium(make, scenarios, max_turns=99, malformed_allowance=99)
    back = FromGymnasium(ours, system="", read=lambda text: text)
    for number, scenario in enumerate(scenarios):
        direct = make()
        assert back.reset(Scenario(name, "train", "x", {"seed": number})) == direct.reset(scenario)
        for action in actions:
            there, here = back.step(act(action)), stepped(direct, action)
            text = "\n".join(m["content"] for m in here.messages)
            assert (there.messages[0]["content"], there.reward, there.terminated, there.truncated) == (
                text,
                here.reward,
                here.terminated,
                here.truncated,
            )
            assert there.info == here.info
            if here.terminated or here.truncated:
                break


def test_the_adapters_are_environments() -> None:
    env: Env = FromGymnasium(Guess(), system="s")
    assert env.system == "s" and env.tools == ()


@pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="gymnasium is not installed")
def test_gymnasium_itself_takes_it() -> None:
    import gymnasium

    env = as_gymnasium(
        ToGymnasium(
            envs.make_env("twenty_questions", {}), envs.scenarios("twenty_questions", {}, "train", 3, 0), max_turns=30
        )
    )
    limited = gymnasium.wrappers.TimeLimit(env, max_episode_steps=2)
    text, info = limited.reset(seed=1)
    assert text in limited.observation_space and "20 Questions" in info["system"]
    assert [limited.step("Action: Is it alive?")[2:4] for _ in range(2)] == [(False, False), (False, True)]


@pytest.mark.skipif(importlib.util.find_spec("gymnasium") is not None, reason="gymnasium is installed")
def test_without_gymnasium_it_says_what_to_install() -> None:
    with pytest.raises(UsageError, match="pip install gymnasium"):
        as_gymnasium(ToGymnasium(Broken, SCENARIOS, max_turns=5))
