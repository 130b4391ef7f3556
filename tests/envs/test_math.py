"""math: the generated problems, the exact answer, files of problems, and how an episode ends."""

from __future__ import annotations

import importlib.util
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_data import DATA, needs

from stages import envs
from stages.envs import arithmetic
from stages.envs.exact24 import evaluate_expression
from stages.envs.math import Options
from stages.envs.math_answers import boxes, whole_answer
from stages.frame.types import Env, Malformed, Scenario, SimulatorError, Step, UsageError

MATH = DATA / "math500"
SEVEN = Scenario("math", "train", "x", {"problem": "What is 3 + 4?", "answer": "7", "level": 1})


def answer(reply: Any, scenario: Scenario = SEVEN, **options: Any) -> Step:
    env = envs.make_env("math", options)()
    env.reset(scenario)
    return env.step({"role": "assistant", "content": reply})


def said(step: Step) -> str:
    return str(step.messages[0]["content"])


def rows(path: Path, *rows: Any) -> None:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))


def row(problem: str, answer: Any = "1", level: Any = 1) -> dict[str, Any]:
    return {"problem": problem, "answer": answer, "level": level}


RIGHT = [
    "7", r"\boxed{7}", "Three and four.\n\nThat is 7.", "So it is 7.0", r"$\boxed{ 7 }$", r"I think \boxed{7}, not 8.",
    "07", "14/2", "$7$", "7%",
]  # fmt: skip
WRONG = [
    "8", "-7", "7/3", "7.5", "70", "17", r"\boxed{8} but 7", r"\boxed{7} \boxed{8}", r"\boxed{}", "seven",
    r"\boxed{x=7}", "7 or 8", "1/0", "9" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("reply", RIGHT)
def test_the_number_in_the_box_or_else_the_last_one_is_right(reply: str) -> None:
    step = answer(reply)
    assert (step.reward, step.terminated, step.truncated, said(step)) == (1.0, True, False, "Right.")


@pytest.mark.parametrize("reply", WRONG)
def test_another_number_is_wrong(reply: str) -> None:
    step = answer(reply, reveal=True)
    assert (step.reward, step.terminated) == (0.0, True)
    assert said(step).startswith("Wrong") and said(step).endswith("It is 7.")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,000", 1000),
        ("-3.5", Fraction(-7, 2)),
        ("12 - 5", 5),
        ("12 -5", -5),
        ("2-5", 5),
        ("= -5.", -5),
        ("−5", -5),
        ("a1", None),
        ("3:45", 45),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: Fraction | None) -> None:
    assert whole_answer(text, boxed_only=False) == number
    assert whole_answer(text, boxed_only=True) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{a{b}c} \boxed {d}", ["a{b}c", "d"]),
        (r"\boxed{\frac{1}{2}}", [r"\frac{1}{2}"]),
        (r"\boxed{a", []),
        (r"\boxed{a\}}", [r"a\}"]),
        ("}{", []),
        (r"\boxed{\boxed{a}b}", [r"\boxed{a}b"]),
        (r"{\boxed{a}}", ["a"]),
        (r"\boxed{a}}\boxed{b}", ["a", "b"]),
        (r"\boxed a", []),
    ],
)
def test_boxes_are_found_with_the_braces_in_them(text: str, found: list[str]) -> None:
    assert boxes(text) == found


def test_a_long_reply_is_read_in_linear_time() -> None:
    for text in (r"\boxed{" * 28_000, r"\boxed{" * 20_000 + "}" * 20_000, "{" * 200_000, "1," * 100_000, "1" * 200_000):
        assert len(text) <= 200_000
        assert answer(text).reward == 0


@pytest.mark.parametrize("reply", ["", " \n\n ", None, 7, "x" * 200_001])
def test_a_reply_without_text_is_malformed_and_may_be_mended(reply: Any) -> None:
    env = envs.make_env("math", {})()
    env.reset(SEVEN)
    with pytest.raises(Malformed):
        env.step({"role": "assistant", "content": reply})
    assert env.step({"role": "assistant", "content": "7"}).reward == 1


def test_only_a_box_counts_where_that_is_asked_for() -> None:
    assert said(answer("7", boxed_only=True)) == "Wrong: there is no answer in a box."
    assert answer(r"\boxed{7} 8", boxed_only=True).reward == 1


@given(st.text(max_size=60), st.integers(-(10**6), 10**6))
def test_a_boxed_number_is_read_whatever_stands_around_it(around: str, number: int) -> None:
    around = around.replace("\\", "").replace("{", "").replace("}", "")
    assert whole_answer(f"{around}\\boxed{{{number}}}{around}", boxed_only=True) == number
    assert whole_answer(f"{around} is \n{number}.", boxed_only=False) == number


@pytest.mark.parametrize("level", arithmetic.STEPS)
def test_generated_answers_are_those_of_the_expression_and_of_the_words(level: int) -> None:
    spelled = {arithmetic.spell(n): n for n in range(100)}
    assert len(spelled) == 100
    for problem in arithmetic.problems(level, 400, 0):
        numbers = tuple(Fraction(n) for n in (problem.start, *(n for _, n in problem.steps)))
        assert evaluate_expression(problem.expression, numbers) == problem.answer
        assert 0 <= problem.answer <= 9999 + 99 and len(problem.steps) == arithmetic.STEPS[level]
        start, *steps, question = problem.text("words").split(". ")
        value = spelled[start.removeprefix("Start with ")]
        for step in steps:
            verb, word = step.rsplit(" ", 1)
            value = arithmetic.apply(value, {"Add": "+", "Take away": "-", "Multiply by": "*"}[verb], spelled[word])
        assert (value, question) == (problem.answer, "What is the result?")


def splits(**options: Any) -> dict[str, list[Scenario]]:
    return {split: envs.scenarios("math", options, split, None, 0) for split in ("train", "validation", "test")}


def test_an_expression_is_in_one_split_in_both_forms() -> None:
    found = splits()
    digits = {split: {s.data["problem"] for s in some if s.data["problem"][-2] != "t"} for split, some in found.items()}
    assert all(len(digits[split]) * 2 == len(some) for split, some in found.items())
    assert len(set().union(*digits.values())) == sum(map(len, digits.values())) == 126 + 600 + 600
    assert {s.data["level"] for s in found["test"]} == {1, 2, 3}
    assert {s.data["level"] for s in splits(levels=[2])["test"]} == {2}
    assert all(re.fullmatch(r"What is [0-9+*() -]+\?", s.data["problem"]) for s in splits(forms=["digits"])["train"])
    assert {s.id for s in splits(problem_seed=1)["test"]} != {s.id for s in found["test"]}


def test_the_generated_set_needs_no_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert answer("7").reward == 1
    with pytest.raises(UsageError, match=r"turnwise\[math\]"):
        answer("7", path="somewhere")


def test_files_are_split_by_their_name_and_validation_is_cut_from_train(tmp_path: Path) -> None:
    rows(tmp_path / "train.jsonl", *(row(f"train {i}", level=i % 5 + 1) for i in range(100)), "", row("train 0"))
    rows(tmp_path / "test.jsonl", *(row(f"test {i}") for i in range(10)))
    found = splits(path=str(tmp_path))
    assert [len(some) for some in found.values()] == [93, 7, 10]
    assert all(
        s.data["problem"].startswith("test" if split == "test" else "train")
        for split, some in found.items()
        for s in some
    )
    assert {s.data["level"] for s in splits(path=str(tmp_path), levels=[5])["train"]} == {5}
    other = tmp_path / "other"
    other.mkdir()
    for split in ("train", "validation", "test"):
        rows(other / f"{split}.jsonl", *(row(f"{split} {i}") for i in range(7)))
    assert [len(some) for some in splits(path=str(other)).values()] == [7, 7, 7]
    (other / "train.jsonl").unlink()
    with pytest.raises(UsageError, match=r"no train\.jsonl"):
        envs.scenarios("math", {"path": str(tmp_path / "none")}, "train", None, 0)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is no JSON object"),
        (row("", "5"), "line 2 has no text 'problem'"),
        (row("q", 5), "line 2 has no text 'answer'"),
        (row("q", None), "unanswered to 'skip'"),
        (row("q", "5", "hard"), "line 2 has a 'level' that is no number"),
        (row("p"), "line 2 has a problem of train.jsonl again"),
        (row("p", "2"), "with another answer"),
        ("[" * 100000, "line 2 is not JSON"),
    ],
)
def test_a_bad_line_is_one_sentence_with_file_and_line(tmp_path: Path, bad: Any, words: str) -> None:
    rows(tmp_path / "train.jsonl", row("p"))
    rows(tmp_path / "test.jsonl", row("t"), bad)
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        envs.scenarios("math", {"path": str(tmp_path)}, "test", None, 0)
    assert "test.jsonl" in str(caught.value)


def test_rows_without_an_answer_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    rows(tmp_path / "test.jsonl", row("p"), row("q", None), row("r", ""))
    assert [
        s.data["problem"]
        for s in envs.scenarios("math", {"path": str(tmp_path), "unanswered": "skip"}, "test", None, 0)
    ] == ["p"]


def half() -> Scenario:
    return Scenario("math", "test", "x", {"problem": "p", "answer": r"\frac{1}{2}", "level": 5})


def test_problems_of_files_are_verified_and_a_hanging_one_changes_nothing(tmp_path: Path) -> None:
    env: Env = envs.make_env("math", {"path": str(tmp_path), "timeout_s": 2})()
    for reply, reward in (
        (r"It is \boxed{0.5}", 1.0),
        ("The answer is 0.5", 1.0),
        (r"\boxed{2}", 0.0),
        ("who knows", 0.0),
    ):
        env.reset(half())
        step = env.step({"role": "assistant", "content": reply})
        assert (step.reward, step.terminated, step.info["found"]) == (reward, True, reply != "who knows")
    env.reset(half())
    with pytest.raises(SimulatorError):
        env.step({"role": "assistant", "content": r"\boxed{9^{9^{9^9}}}"})
    assert env.step({"role": "assistant", "content": "0.5"}).reward == 1
    boxed: Env = envs.make_env("math", {"path": str(tmp_path), "boxed_only": True})()
    for reply, reward in (("0.5", 0.0), (r"\boxed{0.5}. The final answer is $4$.", 1.0), (r"\boxed{} $0.5$", 0.0)):
        boxed.reset(half())
        assert boxed.step({"role": "assistant", "content": reply}).reward == reward


@needs(MATH)
def test_math_500_loads_with_its_levels() -> None:
    found = splits(path=str(MATH), unanswered="skip")
    assert len(found["test"]) == 500 and len(found["train"]) + len(found["validation"]) == 7470
    assert [sum(s.data["level"] == level for s in found["test"]) for level in range(1, 6)] == [43, 90, 105, 128, 134]
    assert len(envs.scenarios("math", {"path": str(MATH), "unanswered": "skip", "levels": [5]}, "test", None, 0)) == 134
    with pytest.raises(UsageError, match=r"line 887 has no text 'answer' in .*train\.jsonl"):
        envs.scenarios("math", {"path": str(MATH)}, "train", None, 0)
    assert Options().levels == ()
