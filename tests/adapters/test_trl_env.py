"""TRL's side: the class by TRL's own rules (methods found on the class, errors of tools shown to the policy), without
the package.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest

from stages import envs
from stages.adapters.trl_env import trl_environment, trl_rows
from stages.frame.types import EngineUnavailable, Message, Scenario, SimulatorError, Step

SCENARIOS = envs.scenarios("game24", {}, "train", 3, 0)
MAKE = envs.make_env("game24", {})


def tools_of(made: type) -> list[str]:
    """As GRPOTrainer finds them: functions of the class that are public, but reset and get_reward."""
    names = [name for name, _ in inspect.getmembers(made, predicate=inspect.isfunction)]
    assert {"reset", "get_reward"} <= set(names)
    return [name for name in names if not name.startswith("_") and name not in ("reset", "get_reward")]


def called(env: Any, *actions: str) -> list[str]:
    """As GRPOTrainer calls a tool: an error is text for the policy."""
    found = []
    for action in actions:
        try:
            found.append(env.act(action=action))
        except Exception as error:  # that is what TRL does
            found.append(f"error: {error}")
    return found


def test_rows_and_class_are_what_trl_asks_for() -> None:
    rows = trl_rows(MAKE, SCENARIOS)
    assert [m["role"] for m in rows[0]["prompt"]] == ["system", "user"] and rows[0]["prompt"][1]["content"] == ""
    made = trl_environment(MAKE, "game24", max_turns=9)
    assert tools_of(made) == ["act"]
    doc, signature = inspect.getdoc(made.act) or "", inspect.signature(made.act)  # type: ignore[attr-defined]
    assert (
        "Args:" in doc and "action:" in doc and "Returns:" in doc and list(signature.parameters) == ["self", "action"]
    )
    env = made()
    numbers = " ".join(map(str, SCENARIOS[2].data["numbers"]))
    assert env.reset(**rows[2]).startswith(f"Node 0 is {numbers}.")


def test_its_reward_is_logged_under_its_name() -> None:
    # TRL's column is the name of the class.
    assert [trl_environment(MAKE, name, max_turns=9).__name__ for name in ("game24", "desk")] == ["game24", "desk"]


class Customer:
    """Its first line costs a call of an LLM, as tau_bench's does."""

    tools: Sequence[Any] = ()
    calls = 0

    def __init__(self, system: str) -> None:
        self.system = system

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        Customer.calls += 1
        self.system = self.system or f"Serve {scenario.id}."
        return ({"role": "user", "content": "Hi."},)

    def step(self, message: Message) -> Step:
        raise NotImplementedError


def test_rows_ask_no_customer_where_the_system_message_is_known_without() -> None:
    Customer.calls = 0
    rows = trl_rows(lambda: Customer("Serve."), SCENARIOS)
    assert [row["prompt"][0]["content"] for row in rows] == ["Serve."] * 3 and Customer.calls == 0
    rows = trl_rows(lambda: Customer(""), SCENARIOS)
    assert rows[1]["prompt"][0]["content"] == f"Serve {SCENARIOS[1].id}." and Customer.calls == 3


def test_a_row_of_another_system_message_is_refused() -> None:
    env = trl_environment(lambda: Customer("Serve others."), "desk", max_turns=9)()
    with pytest.raises(RuntimeError, match="another one than its row's"):
        env.reset(**trl_rows(lambda: Customer("Serve."), SCENARIOS)[0])


def test_an_episode_is_played_to_its_end_and_told_to_be_over() -> None:
    env = trl_environment(MAKE, "game24", max_turns=9)()
    env.reset(**trl_rows(MAKE, SCENARIOS)[0])
    first, second, third = called(env, "expand 0: 1 + 1 = 99", "submit 0", "submit 0")
    assert first.startswith("Not possible") and second.endswith("You lose.") and third == "error: The episode is over."
    assert (env.get_reward(), env.terminated, env.truncated) == (0.0, True, False)
    env.reset(**trl_rows(MAKE, SCENARIOS)[1])  # one instance, many episodes
    assert (env.get_reward(), env.terminated, env.truncated) == (0.0, False, False)


def test_a_win_is_the_reward_and_the_action_takes_the_form_that_is_asked_for() -> None:
    scenario = Scenario("math", "train", "x", {"problem": "3 + 4?", "answer": "7", "level": 1})
    make = envs.make_env("math", {})
    env = trl_environment(make, "math", max_turns=1, form=str)()
    assert env.reset(**trl_rows(make, [scenario])[0]) == "3 + 4?"
    assert called(env, "7") == ["Right."] and env.get_reward() == 1.0


def test_out_of_calls_is_truncated_and_too_many_unreadable_ones_are_the_policy_s_failure() -> None:
    env = trl_environment(MAKE, "game24", max_turns=2)()
    env.reset(**trl_rows(MAKE, SCENARIOS)[0])
    called(env, "expand 0: 1 + 1 = 99", "expand 0: 1 + 1 = 99")
    assert (env.terminated, env.truncated) == (False, True)
    env = trl_environment(MAKE, "game24", max_turns=9, malformed_allowance=1)()
    env.reset(**trl_rows(MAKE, SCENARIOS)[0])
    assert "use expand NODE" in called(env, "?", "?")[1]
    assert (env.terminated, env.truncated, env.get_reward()) == (True, False, 0.0)


class Down:
    system = "Down."
    tools: Sequence[Any] = ()

    def __init__(self, at: str, error: Exception) -> None:
        self.at, self.error = at, error

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        if self.at == "reset":
            raise self.error
        return ({"role": "user", "content": "Hi."},)

    def step(self, message: Message) -> Step:
        raise self.error


@pytest.mark.parametrize(
    "error", [SimulatorError("the user is silent"), EngineUnavailable("no oracle"), KeyError("door")]
)
def test_a_failure_that_trl_swallows_stops_the_training_at_the_reward(error: Exception) -> None:
    scenario = Scenario("down", "train", "x", {})
    row = trl_rows(lambda: Down("step", error), [scenario])[0]
    env = trl_environment(lambda: Down("step", error), "down", max_turns=9)()
    env.reset(**row)
    assert called(env, "a")[0].startswith("error: ") and called(env, "b") == ["error: The episode is over."]
    with pytest.raises(RuntimeError, match=f"has no reward: {type(error).__name__}"):
        env.get_reward()
    env.reset(**row)  # the next episode is a new one
    assert env.get_reward() == 0.0
    env = trl_environment(lambda: Down("reset", error), "down", max_turns=9)()
    with pytest.raises(type(error)):
        env.reset(**row)
    with pytest.raises(RuntimeError, match="has not begun"):
        env.get_reward()
