"""sums: only the last number of a solution counts, and a step is read where it is the next one."""

from __future__ import annotations

from typing import Any

import pytest

from stages import envs
from stages.envs import sums
from stages.envs.arithmetic import Problem, apply
from stages.frame.types import Completion, Env, Episode, Malformed, Message, Outcome, Scenario, Step, Turn, UsageError

SCENARIO = Scenario("sums", "train", "x", {"start": 8, "steps": [["+", 5], ["*", 2]]})  # 26


def said(action: str) -> Message:
    return {"role": "assistant", "content": f"Thought: work. Action: {action}"}


def begun(**options: Any) -> Env:
    env = envs.make_env("sums", options)()
    assert env.reset(SCENARIO) == ({"role": "user", "content": "8, + 5, * 2."},)
    return env


def told(step: Step) -> tuple[str, float, bool]:
    return str(step.messages[0]["content"]), step.reward, step.terminated


@pytest.mark.parametrize(
    ("action", "reveal", "wanted"),
    [
        ("8 + 5 = 13, 13 * 2 = 26", False, ("26 is right.", 1.0, True)),
        ("8 + 5 = 12, 12 * 2 = 26", False, ("26 is right.", 1.0, True)),  # the answer alone counts
        ("26 + 0 = 26", False, ("26 is right.", 1.0, True)),
        ("8 + 5 = 13, 13 * 2 = 25", False, ("25 is wrong.", 0.0, True)),
        ("8 + 5 = 13, 13 * 2 = 25", True, ("25 is wrong, it is 26.", 0.0, True)),
        ("8 + 5 = 13, 13 * 2 = 26", True, ("26 is right.", 1.0, True)),
    ],
)
def test_a_solution_is_judged_by_its_last_number(action: str, reveal: bool, wanted: tuple[str, float, bool]) -> None:
    assert told(begun(reveal=reveal).step(said(action))) == wanted


def test_a_step_goes_on_from_the_number_that_was_said_not_from_the_right_one() -> None:
    env = begun(by="step")
    assert told(env.step(said("8 + 5 = 12"))) == ("12, now * 2.", 0.0, False)
    for action in ("13 * 2 = 26", "12 * 3 = 36", "12 + 2 = 14", "12 * 2 = 24, 24 + 1 = 25", "12 * 2 = many", "12 * 2"):
        with pytest.raises(Malformed, match=r"^not understood, now \* 2\.$"):
            env.step(said(action))
    assert told(env.step(said("12 * 2 = 26"))) == ("26 is right.", 1.0, True)


def test_each_step_is_paid_by_the_number_before_it_and_slips_do_not_cancel() -> None:
    env = begun(by="step", pay="step")
    assert told(env.step(said("8 + 5 = 12"))) == ("12, now * 2.", 0.0, False)
    assert told(env.step(said("12 * 2 = 24"))) == ("24 is wrong.", 0.5, True)
    env = begun(by="step", pay="step")
    assert told(env.step(said("8 + 5 = 13"))) == ("13, now * 2.", 0.5, False)
    assert told(env.step(said("13 * 2 = 26"))) == ("26 is right.", 0.5, True)
    env = begun(by="step", pay="step")
    env.step(said("8 + 5 = 12"))
    assert told(env.step(said("12 * 2 = 26"))) == ("26 is right.", 0.0, True)


def test_only_a_step_that_is_a_turn_is_paid_by_itself() -> None:
    with pytest.raises(UsageError, match='pay: wanted by = "step" with pay = "step"'):
        envs.make_env("sums", {"pay": "step"})


@pytest.mark.parametrize(
    ("actions", "optimal", "q"),
    [
        (["8 + 5 = 13"], True, 1.0),
        (["8 + 5 = 12"], False, 0.5),
        (["8 + 5 = 12", "12 * 2 = 24"], True, 0.5),
        (["8 + 5 = 12", "12 * 2 = 26"], False, 0.0),
    ],
)
def test_q_of_a_paid_step_is_what_it_and_those_to_come_can_pay(actions: list[str], optimal: bool, q: float) -> None:
    found = sums.truth({"by": "step", "pay": "step"}, SCENARIO, actions)
    assert (found.optimal, found.q) == (optimal, q)


@pytest.mark.parametrize("action", ["26", "8 + 5 = 13 , 13 * 2 = 26", "8 + 5 = 13,", "8 / 2 = 4", "8 + 5 = 13."])
def test_a_solution_that_is_no_equations_is_unreadable(action: str) -> None:
    with pytest.raises(Malformed, match=r"^not understood\.$"):
        begun().step(said(action))


@pytest.mark.parametrize(
    ("by", "actions", "q"),
    [
        ("reply", ["8 + 5 = 12, 12 * 2 = 24"], 0.0),
        ("reply", ["8 + 5 = 12, 12 * 2 = 26"], 1.0),
        ("step", ["8 + 5 = 13"], 1.0),
        ("step", ["8 + 5 = 12"], 0.0),  # 12 * 2 is not 26 for somebody who does the rest right
        ("step", ["8 + 5 = 12", "12 * 2 = 26"], 1.0),
        ("step", ["8 + 5 = 13", "13 * 2 = 27"], 0.0),
    ],
)
def test_the_truth_of_an_action_is_what_the_rest_done_right_leads_to(by: str, actions: list[str], q: float) -> None:
    found = sums.truth({"by": by}, SCENARIO, actions)
    assert (found.q, found.optimal, found.answer) == (q, bool(q), 26)
    assert found.named_in("Future: 24 may be wrong, it may be 26.") and found.named_in("Future: 24 is wrong, it is 26.")
    assert not found.named_in("Future: 26 may be wrong, it may be 260.")


def test_the_truth_of_a_step_that_is_not_the_next_one_is_none() -> None:
    with pytest.raises(Malformed):
        sums.truth({"by": "step"}, SCENARIO, ["8 + 5 = 13", "12 * 2 = 24"])


@pytest.mark.parametrize(
    ("turns", "won", "wanted"),
    [
        ([("Action: 8 + 5 = 12", "12, now * 2."), ("Action: 12 * 2 = 24", "24 is wrong, it is 26.")], False, [None, "Action: 12 * 2 = 26"]),
        ([("Action: 8 + 5 = 12", "12, now * 2."), ("Action: 12 * 2 = 24", "24 is wrong.")], False, [None, None]),
        ([("Action: 8 + 5 = 12", "12, now * 2."), ("Action: 12 * 2 = 26", "26 is right.")], True, ["Action: 8 + 5 = 12", "Action: 12 * 2 = 26"]),
    ],
)  # fmt: skip
def test_a_parser_puts_the_answer_that_is_told_in_place_of_the_last_number(
    turns: list[tuple[str, str]], won: bool, wanted: list[str | None]
) -> None:
    assert sums.lessons(turns, won=won) == wanted
    assert sums.n_wrong(turns[-1][1]) == 0


def episode(*actions: str) -> Episode:
    turns = [
        Turn(k, 2, (), Completion("", (), (), "stop"), "", text, "", 0.0, False, False, text == "?", 0.0)
        for k, text in enumerate(actions)
    ]
    return Episode("e", SCENARIO, None, Outcome.SCORED, (), tuple(turns), 0.0, "", 1)


def test_slips_are_counted_and_a_solution_that_was_cut_short_is_not() -> None:
    found = [episode("8 + 5 = 12", "?", "12 * 2 = 24"), episode("8 + 5 = 13, 13 * 2 = 26"), episode("8 + 5 = 13")]
    assert envs.describe("sums", {}, found) == {"steps_right": 0.75, "sound": 0.5}
    assert envs.describe("sums", {}, [episode("?")]) == {}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_every_result_of_a_problem_is_within_bounds_and_slips_of_one_lead_below_none(steps: int) -> None:
    for p in sums.problems(steps, 2000, 0):
        results, least = [p.start], p.start
        for op, number in p.steps:
            results.append(apply(results[-1], op, number))
            least = apply(least, op, number) - 1
        assert len(p.steps) == steps and min(results) >= sums.LOWEST and max(results) <= sums.HIGHEST
        assert least > 0 and sum(op == "*" for op, _ in p.steps) <= 1


def test_problems_are_the_same_ones_however_many_are_made() -> None:
    assert sums.problems(3, 500, 0)[:100] == sums.problems(3, 100, 0)
    assert isinstance(sums.problems(3, 1, 0)[0], Problem)


def test_a_split_without_a_problem_is_one_sentence() -> None:
    with pytest.raises(
        UsageError, match=r"^task\.options of sums: no problem is left for test\. Raise problems, or test's share\.$"
    ):
        envs.scenarios("sums", {"test": 0.0}, "test", 1, 0)
