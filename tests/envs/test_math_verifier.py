"""math-verify in its own process: what it takes for equal, and that what it cannot decide is never a wrong answer."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from shared_data import DATA, needs

from stages.envs import math_verifier
from stages.envs.files import read_rows
from stages.envs.math_verifier import Verdict, Verifier
from stages.frame.types import Malformed, SimulatorError, UsageError

MATH = DATA / "math500"
TOWER = r"\boxed{9^{9^{9^9}}}"


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return Verifier(30.0)


@pytest.fixture(scope="module")
def impatient() -> Verifier:
    return Verifier(2.0)


@pytest.mark.parametrize(
    ("gold", "reply"),
    [
        ("5", r"so\n\n\boxed{5.0}"),
        (r"\frac{1}{2}", r"\boxed{0.5}"),
        (r"\frac{1}{2}", r"\boxed{\frac12}"),
        ("0.5", r"\boxed{50\%}"),
        ("1000", r"\boxed{1,000}"),
        ("90", r"\boxed{90^\circ}"),
        ("5", r"\boxed{5 \text{ cm}}"),
        ("5", "$x=5$"),
        ("x=5", r"\boxed{5}"),
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}"),
        ("6,9", r"\boxed{6} and \boxed{9}"),
        ("10", "The answer is 10"),
        ("5", r"first 4 then \boxed{5}"),
        ("5", r"\boxed{5}, again \boxed{5}"),
        ("1<x<2", r"\boxed{(1,2)}"),
    ],
)
def test_equal_answers_are_right(verifier: Verifier, gold: str, reply: str) -> None:
    assert verifier.check(gold, reply) == Verdict(correct=True, found=True)


@pytest.mark.parametrize(
    ("gold", "reply", "found"),
    [
        ("5", r"\boxed{4} \boxed{5}", True),  # two boxes are a set
        ("5", r"first 5 then \boxed{4}", True),  # the box wins
        ("5", "", False),
        ("5", "no number at all", False),
        (r"11\sqrt{2}", "11*sqrt(2)", True),  # not LaTeX: read as 11
        ("5", r"\boxed{\frac{1}{0}}", True),
        ("x^2", r"\boxed{x^{2", False),
        ("(1,2)", r"\boxed{1<x<2}", True),  # gold first: the other way round the two are equal
    ],
)
def test_other_answers_are_wrong(verifier: Verifier, gold: str, reply: str, found: bool) -> None:
    assert verifier.check(gold, reply) == Verdict(correct=False, found=found)


@pytest.mark.parametrize("gold", ["", " ", "$", r"\text{}"])
def test_a_gold_answer_that_cannot_be_read_is_a_failure_and_not_a_wrong_answer(verifier: Verifier, gold: str) -> None:
    with pytest.raises(SimulatorError, match="gold answer"):
        verifier.check(gold, r"\boxed{5}")
    assert verifier.check("5", r"\boxed{5}").correct


def test_a_reply_that_breaks_the_parser_is_malformed(verifier: Verifier) -> None:
    with pytest.raises(Malformed, match="cannot be read"):
        verifier.check("5", "9" * 5000)
    assert verifier.check("5", r"\boxed{5}").correct


@pytest.mark.parametrize(
    "reply", ['\\boxed{5}\n\n{"gold": 1}\r\n\x00\ud800', "漢🙂 \\boxed{5}", "x" * 100_000 + " \\boxed{5}"]
)
def test_no_text_breaks_the_line_of_the_worker(verifier: Verifier, reply: str) -> None:
    assert verifier.check("5", reply).correct


def test_a_hanging_answer_is_killed_and_the_next_one_is_verified(impatient: Verifier) -> None:
    assert impatient.check("5", "5").correct
    worker = impatient._worker
    assert worker is not None
    began = time.monotonic()
    with pytest.raises(SimulatorError, match="nothing within 2 s"):
        impatient.check("5", TOWER)
    assert time.monotonic() - began < 6
    assert worker.returncode == -signal.SIGKILL
    assert not psutil.pid_exists(worker.pid)
    assert impatient.check("5", "5").correct


def test_a_worker_that_died_is_a_failure_once(impatient: Verifier) -> None:
    assert impatient.check("5", "5").correct
    assert impatient._worker is not None
    impatient._worker.kill()
    impatient._worker.wait()
    with pytest.raises(SimulatorError, match="did not answer"):
        impatient.check("5", "5")
    assert impatient.check("5", "5").correct


def test_any_thread_may_ask_and_answers_are_not_mixed_up(verifier: Verifier) -> None:
    wrong: list[int] = []

    def ask(n: int) -> None:
        wrong.extend(i for i in range(20) if verifier.check(str(n), rf"\boxed{{{i}}}").correct != (i == n))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_worker_ends_with_its_verifier_and_with_its_process() -> None:
    verifier = Verifier(5.0)
    verifier.check("5", "5")
    assert verifier._worker is not None
    pid = verifier._worker.pid
    del verifier
    assert not psutil.pid_exists(pid)
    code = "from stages.envs.math_verifier import Verifier; import os; v = Verifier(5.0); v.check('5', '5'); print(v._worker.pid, flush=True); os._exit(1)"
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout)
    until = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


def test_the_folder_of_the_environments_does_not_shadow_the_worker_s_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(math_verifier.__file__).parent)
    assert Verifier(5.0).check("5", "5").correct


def test_without_math_verify_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"turnwise\[math\]"):
        Verifier(5.0)


NEAR_MISSES = [
    (r"\frac{1}{2}", r"\frac{1}{3}"),
    (r"\frac{1}{2}", "2"),
    ("0.5", "0.05"),
    ("-5", "5"),
    ("12", "21"),
    ("3.14", r"\pi"),
    (r"\frac{22}{7}", r"\pi"),
    (r"2\sqrt{3}", r"3\sqrt{2}"),
    (r"\sqrt{2}", "1.41"),
    ("x^2+1", "x^2-1"),
    ("x^2+1", "x+1"),
    ("(2,3)", "(3,2)"),
    ("(2,3)", "(2,3,4)"),
    ("[0,1)", "(0,1]"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\left( 3, \frac{\pi}{3} \right)"),
    ("6,9", "6"),
    ("6,9", "6,9,12"),
    (r"\text{Evelyn}", r"\text{Evan}"),
    ("10^{10}", "10^{9}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"),
    ("p - q", "q - p"),
    ("1<x<2", "1<x<3"),
]


@pytest.mark.parametrize(("gold", "answer"), NEAR_MISSES)
def test_near_misses_are_wrong(verifier: Verifier, gold: str, answer: str) -> None:
    assert verifier.check(gold, f"\\boxed{{{answer}}}") == Verdict(correct=False, found=True)
    assert verifier.check(gold, f"\\boxed{{{gold}}}").correct


@needs(MATH)
@pytest.mark.parametrize(("name", "every", "count"), [("test", 8, 63), ("train", 374, 20)])
def test_boxed_gold_answers_of_math_are_right(verifier: Verifier, name: str, every: int, count: int) -> None:
    """A fixed part of the rows; `python -m benchmarks.checks.math_gold` verifies all 500 of the test set."""
    rows = [row for _, row in read_rows(MATH / f"{name}.jsonl", "") if row["answer"]][::every]
    assert len(rows) == count
    for row in rows:
        assert verifier.check(row["answer"], f"Thus it is\n\n\\boxed{{{row['answer']}}}").correct, row["answer"]
