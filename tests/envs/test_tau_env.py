"""tau_bench as an environment, on a miniature: how actions are read, how an episode ends, whose failure is whose, and
what the report shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import tau_small
from tau_small import CANCEL, RETURN, acted, customer, said

from stages import envs, evaluate
from stages.envs import tau_bench
from stages.envs.tau_bench import RESPOND, TauBench, parse_action, says_all
from stages.envs.tau_tools import TERMINATE
from stages.envs.tau_user import OPENING, STOP
from stages.evaluate import EvaluateConfig
from stages.frame.sections import TaskConfig
from stages.frame.types import (
    Ask,
    EngineUnavailable,
    Malformed,
    Message,
    Outcome,
    Request,
    Scenario,
    SimulatorError,
    Step,
)
from stages.llm.roles import Roles
from stages.llm.scripted import ScriptedEngine
from stages.play.rollout import RolloutSettings, rollout

CALLS = {"return": acted(RETURN["name"], **RETURN["kwargs"]), "cancel": acted(CANCEL["name"], **CANCEL["kwargs"])}
THINK = acted("think", thought="hm")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tau_small.write(tmp_path_factory.mktemp("tau"))


def scenarios(path: str, split: str) -> dict[str, Scenario]:
    return {s.id: s for s in envs.scenarios("tau_bench", {"path": path}, split, None, 0)}


def start(path: str, name: str = "dev-0", ask: Ask = customer, **options: Any) -> TauBench:
    env = tau_bench.make({"path": path} | options, ask)()
    assert isinstance(env, TauBench)
    split = name.split("-")[0].replace("dev", "validation")
    env.reset(scenarios(path, split)[name])
    return env


def test_the_prompt_holds_policy_tools_and_form_and_not_the_customer_s_instruction(path: str) -> None:
    env = start(path)
    assert env.system.startswith("# retail\nBe {kind}.\n\n# Available tools\n")
    assert all(definition["function"]["name"] in env.system for definition in env.tools) and len(env.tools) == 16
    assert 'Action: {"name": "<tool>", "arguments": {<arguments>}}' in env.system
    assert "Return a red mug" not in env.system


def test_the_customer_is_told_the_instruction_and_hears_the_agent_alone(path: str) -> None:
    heard: list[list[Message]] = []

    def listen(messages: Sequence[Message], **sampling: Any) -> str:
        heard.append(list(messages))
        return customer(messages)

    env = start(path, ask=listen)
    env.step(CALLS["return"])
    env.step(said("It is done."))
    assert [(m["role"], m["content"]) for m in heard[1][1:]] == [
        ("user", OPENING),
        ("assistant", "Hello, I need help."),
        ("user", "It is done."),
    ]
    (system,) = (m["content"] for m in heard[0] if m["role"] == "system")
    lines = system.splitlines()
    assert (
        lines[:2] == ["You are a user interacting with an agent.", ""]
        and lines[2] == "Instruction: Return a red mug and cancel #W2."
    )
    assert len(lines) == 11 and "wait until the agent says" not in system
    start(path, ask=listen, user_prompt="patient")
    patient = str(heard[-1][0]["content"])
    assert patient.startswith(system) and "wait until the agent says that it is done" in patient


def test_what_begins_with_a_brace_is_a_call_and_everything_else_is_said() -> None:
    assert parse_action('{"name": "x", "arguments": {"a": [1, 2.0]}, "more": 1}') == ("x", {"a": [1, 2.0]})
    for text in ("Hello {you}", "41", "[1]", '"hi"', "null", "call {}"):
        assert parse_action(text) == (RESPOND, {"content": text})


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ("{", "not valid JSON"),
        ('{"name": "think", "arguments": {"thought": "x"}', "not valid JSON"),
        ('{"name": "think", "arguments": {}} and then', "not valid JSON"),
        ("{'name': 'think'}", "not valid JSON"),
        ('{"arguments": {}}', "lacks name"),
        ('{"name": "think"}', "lacks arguments"),
        ('{"name": 5, "arguments": {}}', "name of a tool is a text"),
        ('{"name": "think", "arguments": "x"}', "arguments of think are no JSON object"),
        ('{"name": "think", "arguments": null}', "arguments of think are no JSON object"),
        ('{"name": "respond", "arguments": {}}', "respond says nothing"),
        ('{"name": "respond", "arguments": {"content": null}}', "respond says nothing"),
        ('{"name": "respond", "arguments": {"content": " "}}', "respond says nothing"),
        ('{"name": "think", "arguments": {"thought": ' + "[" * 5000, "nested too deeply"),
        ('{"name": "think", "arguments": {"thought": ' + "9" * 5000 + "}}", "not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_malformed_and_changes_nothing(path: str, action: str, told: str) -> None:
    env = start(path, max_steps=1)
    for message in (
        said(action),
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "think", "arguments": "{"}}]},
    ):
        with pytest.raises(
            Malformed, match=told if message["role"] == "assistant" and "content" in message else "not valid JSON"
        ):
            env.step(message)
    assert env.step(THINK).terminated  # the one step is still there


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": [{}]},
        {"tool_calls": [{"function": None}]},
        {"tool_calls": [{"function": {"name": "think"}}]},
        {"tool_calls": [{"function": {"name": "think", "arguments": "[]"}}]},
        {"tool_calls": [{"function": {"name": None, "arguments": "{}"}}]},
        {"tool_calls": [], "content": None},
        {"tool_calls": None, "content": ""},
        {"content": None},
        {},
    ],
)
def test_a_message_without_a_readable_call_or_text_is_malformed(path: str, message: Message) -> None:
    with pytest.raises(Malformed):
        start(path).step({"role": "assistant"} | message)


def test_in_openai_s_form_a_reply_without_a_call_is_said(path: str) -> None:
    env = start(path)
    nothing: tuple[Any, ...] = (None, [])
    for calls in nothing:
        assert env.step({"role": "assistant", "content": "Hi, no action here", "tool_calls": calls}).messages == (
            {"role": "user", "content": "Yes."},
        )
    function = {"name": "think", "arguments": {"thought": "x"}}
    assert env.step({"role": "assistant", "tool_calls": [{"function": function}]}).messages[0]["role"] == "tool"


@pytest.mark.parametrize(
    ("name", "actions", "reward"),
    [
        ("dev-0", ["return", "cancel", "Bye."], 1),
        ("dev-0", ["cancel", "return", "Bye."], 1),
        ("dev-0", ["return", "Bye."], 0),
        ("dev-0", ["Bye."], 0),
        ("train-0", ["return", "cancel", "Bye."], 0),
        ("test-0", ["Bye."], 0),
        ("test-0", ["It costs $1,2.3, bye"], 1),
        ("test-0", ["It costs 12", ".3, bye"], 0),
        ("test-0", ["112.35 is the sum, bye"], 1),  # a part of another number: so is the benchmark
        ("test-0", ["12.3", "cancel", "Bye."], 0),
        ("test-1", ["Bye."], 1),
        ("test-1", ["No, by no means.", "Bye."], 1),
    ],
)
def test_the_reward_is_the_right_database_and_every_output(
    path: str, name: str, actions: list[str], reward: float
) -> None:
    env = start(path, name)
    *before, last = [env.step(CALLS.get(action) or said(action)) for action in actions]
    assert not any(step.reward or step.terminated or step.truncated for step in before)
    assert (last.reward, last.terminated, last.truncated) == (reward, True, False)
    assert last.messages == ({"role": "user", "content": STOP},)
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step(THINK)


def test_outputs_may_be_said_in_several_messages_but_each_in_one() -> None:
    assert says_all([], [])
    assert says_all(["10", "Red"], ["it is RED", "1,0 of them"])
    assert not says_all(["1,0"], ["1,0"])  # commas are taken from the message alone
    assert not says_all(["10"], ["1", "0"])


def test_what_the_customer_says_is_not_said_by_the_agent(path: str) -> None:
    env = start(path, "test-0", ask=lambda messages, **_: f"Is it 12.3? {STOP if len(messages) > 4 else ''}")
    assert [env.step(said(text)).reward for text in ("Let me see.", "Hm.")] == [0, 0]


def test_a_transfer_ends_the_episode_and_is_paid_by_the_same_rule(path: str) -> None:
    cases: list[tuple[str, list[str], float]] = [
        ("test-1", [], 1),
        ("dev-0", [], 0),
        ("dev-0", ["return", "cancel"], 1),
    ]
    for name, calls, reward in cases:
        for arguments in ({"summary": "x"}, {}):  # the original ends on the name, whatever the arguments
            env = start(path, name)
            for call in calls:
                env.step(CALLS[call])
            last = env.step(acted(TERMINATE, **arguments))
            assert (last.reward, last.terminated, last.info["transferred"]) == (reward, True, True)


def test_running_out_of_steps_is_the_end_and_no_win_whatever_the_database(path: str) -> None:
    env = start(path, "train-0", max_steps=3)
    steps = [env.step(message) for message in (CALLS["return"], said("Done."), THINK)]
    assert [(s.terminated, s.truncated) for s in steps] == [(False, False), (False, False), (True, False)]
    assert steps[-1].reward == 0 and steps[-1].info["database"] and steps[-1].info["outputs"]
    env = start(path, "train-0", max_steps=3)
    # the last step may end it
    assert [env.step(message).reward for message in (CALLS["return"], THINK, said("Bye."))] == [0, 0, 1]


def test_the_end_tells_what_a_report_needs(path: str) -> None:
    def info(name: str, *messages: Message) -> dict[str, Any]:
        env = start(path, name)
        steps: list[Step] = [env.step(message) for message in messages]
        assert not any(step.info for step in steps[:-1])
        return dict(steps[-1].info)

    assert info("test-1", said("Bye.")) == {
        "needs_write": False,
        "unchanged": True,
        "transferred": False,
        "database": True,
        "outputs": True,
    }
    lost = info("dev-0", CALLS["return"], said("Bye."))
    assert lost == {"needs_write": True, "unchanged": False, "transferred": False, "database": False, "outputs": True}


def failing(on: int, error: Callable[[], str]) -> Ask:
    calls = 0

    def ask(messages: Sequence[Message], **sampling: Any) -> str:
        nonlocal calls
        calls += 1
        return error() if calls == on else customer(messages)

    return ask


def test_the_last_step_is_a_loss_to_learn_from_and_not_a_future_to_be_predicted(path: str) -> None:
    """As 20 Questions has it: the limit belongs to the benchmark, and scoring counts the episode as lost."""
    made = envs.make_env("tau_bench", {"path": path, "max_steps": 2}, customer)
    engine = ScriptedEngine(lambda prompt, request: str(THINK["content"]))
    (episode,) = rollout(engine, made, [scenarios(path, "train")["train-0"]], Roles("x", {"policy": ""}), SETTINGS)
    assert (episode.outcome, len(episode.turns), episode.total_reward) == (Outcome.SCORED, 2, 0)
    assert (episode.turns[-1].terminated, episode.turns[-1].truncated) == (True, False)


def sampled(path: str, settings: RolloutSettings, n: int = 2, **options: Any) -> list[list[tuple[float, int]]]:
    """(temperature, seed) of every line of the customer, by episode, of n episodes of one task."""
    heard: dict[int, list[tuple[float, int]]] = {}

    def ask(messages: Sequence[Message], *, temperature: float = 0.0, seed: int = 0) -> str:
        if len(messages) == 2:
            heard[len(heard)] = []
        heard[len(heard) - 1].append((temperature, seed))
        return customer(messages)

    made = envs.make_env("tau_bench", {"path": path} | options, ask)
    played = [scenarios(path, "test")["test-1"]] * n
    engine = ScriptedEngine(lambda prompt, request: str(said("Bye.")["content"]))
    episodes = rollout(engine, made, played, Roles("x", {"policy": ""}), replace(settings, slots=1))
    assert all(e.scenario.seed == 0 for e in episodes)  # not part of what is stored
    return list(heard.values())


def test_every_episode_s_customer_is_sampled_by_a_seed_of_its_own_and_runs_repeat(path: str) -> None:
    found = sampled(path, SETTINGS, n=3)
    seeds = [seed for lines in found for _, seed in lines]
    assert [len(lines) for lines in found] == [2, 2, 2] and len(set(seeds)) == 6
    assert found == sampled(path, SETTINGS, n=3) != sampled(path, replace(SETTINGS, seed=6), n=3)
    assert {temperature for lines in found for temperature, _ in lines} == {1.0}  # tau-bench sends none
    assert {t for lines in sampled(path, SETTINGS, user_temperature=0.0) for t, _ in lines} == {0.0}


def test_an_episode_that_is_tried_again_meets_a_customer_of_another_seed(path: str) -> None:
    seeds = []

    def ask(messages: Sequence[Message], *, temperature: float = 0.0, seed: int = 0) -> str:
        seeds.append(seed)
        return " " if len(seeds) == 1 else customer(messages)

    made = envs.make_env("tau_bench", {"path": path}, ask)
    played = [scenarios(path, "test")["test-1"]]
    (again,) = rollout(ScriptedEngine(reply_of), made, played, Roles("x", {"policy": ""}), SETTINGS)
    assert again.attempts == 2 and seeds[0] != seeds[1]


def down() -> str:
    raise EngineUnavailable("no answer")


@pytest.mark.parametrize(("error", "told"), [(down, "did not answer: no answer"), (lambda: " \n", "said nothing")])
def test_a_failed_customer_is_a_simulator_error_and_never_a_reward(
    path: str, error: Callable[[], str], told: str
) -> None:
    with pytest.raises(SimulatorError, match=told):
        start(path, ask=failing(1, error))
    env = start(path, "test-1", ask=failing(2, error))
    with pytest.raises(SimulatorError, match=told):
        env.step(said("Bye."))
    assert env.step(said("Bye.")).reward == 1  # nothing was lost by it
    assert [m["content"] for m in env._talk if m["role"] == "user"] == [OPENING, "Bye."]


def reply_of(prompt: str, request: Request) -> str:
    """The agent returns a mug and says goodbye."""
    return str((said("Bye.") if "API output: {" in prompt else CALLS["return"])["content"])


SETTINGS = RolloutSettings(
    adapter=None, temperature=1.0, max_tokens=900, max_turns=9, malformed_allowance=1, slots=8, attempts=2, seed=5
)


def test_in_a_rollout_the_customer_s_failure_is_counted_as_the_simulator_s(path: str) -> None:
    made = envs.make_env("tau_bench", {"path": path}, failing(2, down))
    engine = ScriptedEngine(reply_of)
    (again,) = rollout(engine, made, [scenarios(path, "train")["train-0"]], Roles("x", {"policy": ""}), SETTINGS)
    assert (again.outcome, again.attempts, again.total_reward) == (Outcome.SCORED, 2, 1)
    made = envs.make_env("tau_bench", {"path": path}, failing(2, down))
    (lost,) = rollout(
        engine, made, [scenarios(path, "train")["train-0"]], Roles("x", {"policy": ""}), replace(SETTINGS, attempts=1)
    )
    assert lost.outcome == Outcome.SIMULATOR_FAILED and not lost.outcome.trainable
    # What the policy said is all that has token ids.
    assert {turn.completion.text for turn in again.turns} == {CALLS["return"]["content"], said("Bye.")["content"]}


def test_describe_tells_the_floor_and_where_the_wins_are(path: str) -> None:
    cases: list[tuple[str, str, list[Message]]] = [
        ("train-0", "train", [CALLS["return"], said("Bye.")]),  # won by a write
        (
            "dev-0",
            "validation",
            [CALLS["return"], said("{"), said("Bye.")],
        ),  # the customer left before the second write
        ("dev-0", "validation", [acted(TERMINATE, summary="x")]),
        ("train-0", "train", [CALLS["cancel"], said("Bye.")]),  # a wrong write: not the customer's fault
        ("test-0", "test", [said("12.3, bye")]),
        ("test-1", "test", [acted(TERMINATE, summary="x")]),  # won by doing nothing
    ]
    made = envs.make_env("tau_bench", {"path": path}, customer)
    forced = [[str(message["content"]) for message in replies] for _, _, replies in cases]
    played = [scenarios(path, split)[name] for name, split, _ in cases]
    episodes = rollout(ScriptedEngine(), made, played, Roles("x", {"policy": ""}), SETTINGS, forced=forced)
    assert [(e.outcome, e.total_reward) for e in episodes] == [
        (Outcome.SCORED, reward) for reward in (1, 0, 0, 0, 1, 1)
    ]
    assert envs.describe("tau_bench", {"path": path}, episodes) == {
        "floor": 1 / 6, "needs_write": 4 / 6, "win_needs_write": 1 / 4, "win_needs_none": 1.0, "transferred": 2 / 6,
        "unchanged": 3 / 6, "unchanged_won": 2 / 3, "stopped_short": 1 / 3,
    }  # fmt: skip
    assert envs.describe("tau_bench", {"path": path}, []) == {}
    assert envs.describe("service_desk", {}, episodes) == {}


def test_evaluate_reports_what_the_environment_tells(path: str, tmp_path: Path) -> None:
    def play(prompt: str, request: Request) -> str:
        if "You are a user interacting with an agent" in prompt:
            return STOP if "Bye" in prompt else "Hello, I want a discount."
        return str(said("Bye.")["content"])

    task = TaskConfig(env="tau_bench", options={"path": path}, oracle="engine", max_turns=31)
    bench = models.Bench(tmp_path, tmp_path, engine=models.Recorder(play), task=task)
    metrics = bench.run(evaluate.STAGE, EvaluateConfig(split="test", episodes=2, audit_turns=0), {}).metrics
    assert metrics["evaluate/win_rate"] == metrics["evaluate/tau_bench/floor"] == 0.5
    assert metrics["evaluate/tau_bench/unchanged_won"] == 1
    assert "evaluate/tau_bench/win_needs_write" not in metrics
    engine: Any = bench.engine
    lines = [r for r in engine.requests if r.adapter is None and r.temperature == 1.0]
    assert len({r.seed for r in lines}) == len(lines) >= 4  # the customer's, sampled as the benchmark's is
