r"""math: one problem, one free-text answer; the whole reply is the action, and the episode ends with it.

Reward range: {0, 1}. Turn limit: 1. An empty reply is malformed; one without an answer is wrong. The shipped set is
arithmetic made by code (stages/envs/arithmetic.py): there the answer is a whole number, compared exactly, in \boxed{}
or the last number of the reply; several boxes must agree. With `path`, problems of files, verified by math-verify
(stages/envs/math_verifier.py; the extra `math`): a box counts before other numbers, boxes that differ are one set of
answers. An answer that it cannot decide is a SimulatorError, never a reward of 0.
Source: MATH, arXiv 2103.03874; chain of thought as an agent: Self-AC slides, where the rollout cuts the reply into
thoughts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from stages.envs import arithmetic
from stages.envs.files import bad_file, read_rows, text_of
from stages.envs.math_answers import boxes, whole_answer
from stages.envs.math_verifier import Verdict, Verifier
from stages.envs.splits import SPLITS, check_split, deal, digest, draw
from stages.frame.contract import Config, DataPath
from stages.frame.types import Ask, Env, Malformed, Message, Scenario, Step, UsageError

_WANTED = "Give JSONL with a text 'problem', a text 'answer' (LaTeX) and a number 'level'."
_LONGEST = 200_000  # characters of a reply that is verified

_SYSTEM = r"""Solve the problem. Think in short steps with an empty line between them. End with the answer as \boxed{answer}."""


class Options(Config):
    """Which problems, and what counts as an answer."""

    path: DataPath = Field(
        "",
        description="Folder with train.jsonl and test.jsonl of problem, answer, level; empty = generated arithmetic. [ours]",
    )
    unanswered: Literal["refuse", "skip"] = Field(
        "refuse", description="Rows of `path` without an answer: an error, or left out. [ours]"
    )
    levels: tuple[int, ...] = Field(
        (), description="Only these levels; empty = all. Level 5 of MATH-500 is MATH500-Hard. [ours]"
    )
    boxed_only: bool = Field(False, description="Only an answer in a box counts. [ours]")
    reveal: bool = Field(False, description="Tell the right answer after a wrong one. [ours]")
    timeout_s: float = Field(
        10.0, gt=0, description="Longest verification by math-verify; longer is a failure of the environment. [ours]"
    )
    problems: int = Field(600, ge=1, description="Generated expressions a level; level 1 has 126. [ours]")
    forms: tuple[Literal["digits", "words"], ...] = Field(
        ("digits", "words"), min_length=1, description="How generated problems are told. [ours]"
    )
    problem_seed: int = Field(0, description="Seed of the generated problems. [ours]")
    test: float = Field(0.2, ge=0, le=1, description="Share of generated expressions in the test split. [ours]")
    validation: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of expressions, or of train.jsonl without a validation.jsonl, in that split. [ours]",
    )
    split_seed: int = Field(0, description="Another number deals the problems to the splits anew. [ours]")


OPTIONS = Options

Check = Callable[[str, str], Verdict]
"""(gold, reply) -> verdict."""


class Math:
    """One problem."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, options: Options, check: Check) -> None:
        self.system = _SYSTEM
        self._options, self._check = options, check
        self._data: Mapping[str, Any] | None = None

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        self._data = scenario.data
        return ({"role": "user", "content": str(self._data["problem"])},)

    def step(self, message: Message) -> Step:
        """Judge the reply. Raises Malformed, SimulatorError, and RuntimeError after the end."""
        if self._data is None:
            raise RuntimeError("math: there is no problem, or it is answered; call reset first")
        reply = _whole(message.get("content"))
        gold = str(self._data["answer"])
        verdict = self._check(gold, reply)
        self._data = None
        text = (
            "Right." if verdict.correct else "Wrong." if verdict.found else f"Wrong: there is no answer{self._where}."
        )
        if self._options.reveal and not verdict.correct:
            text = f"{text} It is {gold}."
        return Step(
            ({"role": "user", "content": text},), float(verdict.correct), terminated=True, info={"found": verdict.found}
        )

    @property
    def _where(self) -> str:
        return " in a box" if self._options.boxed_only else " in the reply"


def _whole(reply: Any) -> str:
    if not isinstance(reply, str) or not reply.strip():
        raise Malformed("the reply is empty. give an answer")
    if len(reply) > _LONGEST:
        raise Malformed(f"the reply has more than {_LONGEST} characters")
    return reply


def readable(options: Mapping[str, Any], state: Sequence[Message], reply: str) -> None:
    """Raises Malformed as the problem would: for nothing, and for far too much."""
    _whole(reply)


def make(options: Mapping[str, Any], ask: Ask | None = None) -> Callable[[], Env]:
    """All environments of one maker share a verifier. Raises UsageError where math-verify is needed and not there."""
    checked = Options.model_validate(dict(options))
    check = _by_math_verify(Verifier(checked.timeout_s), checked) if checked.path else _exactly(checked)
    return lambda: Math(checked, check)


def _exactly(options: Options) -> Check:
    def check(gold: str, reply: str) -> Verdict:
        answer = whole_answer(reply, boxed_only=options.boxed_only)
        return Verdict(answer == int(gold), answer is not None)

    return check


def _by_math_verify(verifier: Verifier, options: Options) -> Check:
    def check(gold: str, reply: str) -> Verdict:
        if not options.boxed_only:
            return verifier.check(gold, reply)
        inside = boxes(reply)
        # Only the boxes are handed on: math-verify would take another number where it cannot read a box.
        return (
            verifier.check(gold, " ".join(f"\\boxed{{{box}}}" for box in inside))
            if inside
            else Verdict(correct=False, found=False)
        )

    return check


def scenarios(options: Mapping[str, Any], split: str, n: int | None, seed: int) -> list[Scenario]:
    """Problems of a split in an order fixed by the seed, train over and over. Raises UsageError for an unusable file."""
    checked = Options.model_validate(dict(options))
    check_split("math", split)
    found = _of_files(Path(checked.path), split, checked) if checked.path else _generated(split, checked)
    return draw([s for s in found if not checked.levels or s.data["level"] in checked.levels], split, n, seed)


def _scenario(split: str, problem: str, answer: str, level: int) -> Scenario:
    return Scenario("math", split, digest(problem), {"problem": problem, "answer": answer, "level": level})


def _generated(split: str, options: Options) -> list[Scenario]:
    """An expression is in one split, in all its forms."""
    shares = {"test": options.test, "validation": options.validation}
    made = [p for level in arithmetic.STEPS for p in arithmetic.problems(level, options.problems, options.problem_seed)]
    mine = [p for p in made if deal(p.expression, options.split_seed, **shares) == split]
    return [
        _scenario(split, p.text(form), str(p.answer), p.level) for p in mine for form in dict.fromkeys(options.forms)
    ]


def _of_files(folder: Path, split: str, options: Options) -> list[Scenario]:
    """Validation is cut from train by the hash of the problem where it has no file. Raises UsageError, too where splits
    share a problem.
    """
    files = _loaded(folder, options.unanswered == "skip")
    source = split if split in files or split == "test" else "train"
    if source not in files:
        raise UsageError(f"task.options.path: there is no {source}.jsonl in {str(folder)!r}. {_WANTED}")
    cut = "validation" not in files and split != "test"
    shares = {"test": 0.0, "validation": options.validation}
    return [
        _scenario(split, *row)
        for row in files[source]
        if not cut or deal(row[0], options.split_seed, **shares) == split
    ]


@functools.lru_cache(maxsize=4)
def _loaded(folder: Path, skip_unanswered: bool) -> dict[str, list[tuple[str, str, int]]]:
    """(problem, answer, level) of the files that are there; a problem that comes again in its own file is taken once."""
    files = {split: path for split in SPLITS if (path := folder / f"{split}.jsonl").exists()}
    seen: dict[str, tuple[str, str]] = {}
    found: dict[str, list[tuple[str, str, int]]] = {split: [] for split in files}
    for split, path in files.items():
        for where, row in read_rows(path, _WANTED):
            problem = text_of(row, "problem", path, where, _WANTED)
            if skip_unanswered and row.get("answer") in (None, ""):
                continue
            answer = text_of(
                row,
                "answer",
                path,
                where,
                f"{_WANTED} Set task.options.unanswered to 'skip' to leave out rows without an answer.",
            )
            level = row.get("level", 0)
            if not isinstance(level, int):
                raise bad_file(path, f"{where} has a 'level' that is no number", _WANTED)
            of, known = seen.setdefault(problem, (split, answer))
            if of != split or known != answer:
                raise bad_file(
                    path,
                    f"{where} has a problem of {of}.jsonl again" + (", with another answer" if known != answer else ""),
                    _WANTED,
                )
            found[split].append((problem, answer, level))
    return {split: list(dict.fromkeys(rows)) for split, rows in found.items()}
