"""sums: a number and steps that are done with it one after the other, in few words, for a small model.

    8, + 5, * 2.        8 + 5 = 13, 13 * 2 = 26

The whole solution is one reply, or each step is a turn (`by`). Reward 1 at the end if the last number is the answer,
else 0: only that counts, as in `math`, so that two slips can cancel out. With `pay` = "step" a share after each step
that is right for the number before it, and slips do not cancel. Return: {0, 1}, or [0, 1]. Turn limit: 1, or one turn a
step.
Source: mathematics of arXiv 2512.04601 in miniature. [ours] Departures: generated problems, a fixed form of a solution,
and with `by` = "step" the chain as turns.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from stages.envs.arithmetic import Problem, apply
from stages.envs.splits import check_split, deal, digest, draw
from stages.frame.contract import Config
from stages.frame.react import parse_react
from stages.frame.types import Ask, Env, Episode, Malformed, Message, Scenario, Step, UsageError

LOWEST, HIGHEST = 6, 30  # of a true result; low enough that slips of one lead to no number below 0
MOST_STEPS = 3
BRIEF = {"reply": "Work it out.", "step": "Work it out step by step."}
_EQUATION = re.compile(r"([0-9]{1,6}) ([-+*]) ([0-9]{1,3}) = ([0-9]{1,6})")
_SOLUTION = re.compile(rf"{_EQUATION.pattern}(?:, {_EQUATION.pattern})*")

By = Literal["reply", "step"]
Pay = Literal["end", "step"]


class Options(Config):
    """Which problems, how they are answered, and what is told."""

    by: By = Field("reply", description="A solution is one reply [paper], or each of its steps is a turn. [ours]")
    pay: Pay = Field(
        "end",
        description="Reward 1 at the end [paper], or a share after each step that is right for the number before it. [ours]",
    )
    steps: int = Field(3, ge=1, le=MOST_STEPS, description="Steps of a problem. [ours]")
    reveal: bool = Field(False, description="Tell the right answer after a wrong one. [ours; paper: no]")
    problems: int = Field(6000, ge=1, description="Generated problems; fewer where there are not so many. [ours]")
    problem_seed: int = Field(0, description="Seed of the generated problems. [ours]")
    test: float = Field(0.2, ge=0, le=1, description="Share of the problems in the test split. [ours]")
    validation: float = Field(0.1, ge=0, le=1, description="Share of the problems in the validation split. [ours]")
    split_seed: int = Field(0, description="Another number deals the problems to the splits anew. [ours]")

    @model_validator(mode="after")
    def _each_paid_step_is_a_turn(self) -> Self:
        if self.pay == "step" and self.by != "step":
            raise ValueError('pay: wanted by = "step" with pay = "step", so that a step is a turn, found by = "reply"')
        return self


OPTIONS = Options


@dataclass(frozen=True)
class Truth:
    """What a critic should have known of an action; never shown to the model. q: of somebody who does the rest right."""

    optimal: bool
    q: float
    answer: int

    def named_in(self, future: str) -> bool:
        """The future tells the answer."""
        return re.search(rf"\bit (?:is|may be) {self.answer}\b", future) is not None


class Sums:
    """One problem."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, options: Options) -> None:
        self.system = BRIEF[options.by]
        self._options = options
        self._problem: Problem | None = None
        self._said: list[int] = []

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        self._problem, self._said = problem_of(scenario), []
        return ({"role": "user", "content": opening(self._problem)},)

    def step(self, message: Message) -> Step:
        """Take a step, or a solution. Raises Malformed, and RuntimeError after the end."""
        if self._problem is None:
            raise RuntimeError("sums: there is no problem, or it is answered; call reset first")
        problem, action = self._problem, parse_react(str(message.get("content") or ""))[1]
        self._said.append(result := read(action, self._options.by, problem, self._said))
        by_step = self._options.pay == "step"
        share = _sound(problem, self._said) / len(problem.steps) if by_step else 0.0
        if self._options.by == "step" and len(self._said) < len(problem.steps):
            return _say(noted(result, problem.steps[len(self._said)]), reward=share)
        self._problem, right = None, result == problem.answer
        told = problem.answer if self._options.reveal and not right else None
        return _say(judged(result, right, told), reward=share if by_step else float(right), terminated=True)


def _sound(problem: Problem, said: Sequence[int]) -> bool:
    """The last of the results is right for the number before it."""
    before = said[-2] if len(said) > 1 else problem.start
    return apply(before, *problem.steps[len(said) - 1]) == said[-1]


def _say(text: str, *, reward: float = 0.0, terminated: bool = False) -> Step:
    return Step(({"role": "user", "content": text},), reward=reward, terminated=terminated)


def opening(problem: Problem) -> str:
    return ", ".join([str(problem.start), *(f"{op} {number}" for op, number in problem.steps)]) + "."


def noted(result: int, then: tuple[str, int]) -> str:
    """What is said to a step that is not the last one."""
    return f"{result}, now {then[0]} {then[1]}."


def judged(result: int, right: bool, told: int | None) -> str:
    """The verdict on the last number; told: the answer, where it is revealed."""
    return f"{result} is {'right' if right else 'wrong'}{'' if told is None else f', it is {told}'}."


def read(action: str, by: By, problem: Problem, said: Sequence[int]) -> int:
    """The result that an action states; of a whole solution the last one. said: the results of the steps before.

    Raises Malformed for what has not the form, and for a step that is not the next one.
    """
    if by == "reply":
        if not _SOLUTION.fullmatch(action):
            raise Malformed("not understood.")
        return int(action.split()[-1])
    op, number = problem.steps[len(said)]
    found = _EQUATION.fullmatch(action)
    if not found or found.groups()[:3] != (str(said[-1] if said else problem.start), op, str(number)):
        raise Malformed(f"not understood, now {op} {number}.")
    return int(found[4])


def equations(action: str) -> list[tuple[int, str, int, int]]:
    """(number before, op, number, result) of each step that an action states."""
    return [(int(before), op, int(number), int(result)) for before, op, number, result in _EQUATION.findall(action)]


def readable(options: Mapping[str, Any], state: Sequence[Message], reply: str) -> None:
    """Raises Malformed as the problem would: the action must be of the step that those in `state` have led to."""
    by, problem = Options(**options).by, problem_told(str(state[1]["content"]))
    said: list[int] = []
    for past in (str(m["content"]) for m in state if m["role"] == "assistant"):
        with suppress(Malformed):  # it was answered with a hint, and the step stayed
            said.append(read(parse_react(past)[1], by, problem, said))
    read(parse_react(reply)[1], by, problem, said[: len(problem.steps) - 1])


def problem_told(text: str) -> Problem:
    """The problem of an `opening`."""
    start, *steps = text.removesuffix(".").split(", ")
    return Problem(0, int(start), tuple((one.split()[0], int(one.split()[1])) for one in steps))


def problem_of(scenario: Scenario) -> Problem:
    return Problem(0, int(scenario.data["start"]), tuple((op, int(number)) for op, number in scenario.data["steps"]))


def truth(options: Mapping[str, Any], scenario: Scenario, actions: Sequence[str]) -> Truth:
    """The truth about the last of `actions`, given those before it. Raises Malformed as the problem would."""
    opts, problem, said = Options(**options), problem_of(scenario), list[int]()
    for action in actions:
        said.append(read(action, opts.by, problem, said))
    rest = problem.steps[len(said) :] if opts.by == "step" else ()
    if opts.pay == "step":
        sound = _sound(problem, said)
        return Truth(sound, (len(rest) + sound) / len(problem.steps), problem.answer)
    right = functools.reduce(lambda value, one: apply(value, *one), rest, said[-1]) == problem.answer
    return Truth(right, float(right), problem.answer)


def lessons(turns: Sequence[tuple[str, str]], *, won: bool) -> list[str | None]:
    """What a parser of the words makes of an episode: the text of the action to be learned at each turn, or None.

    A revealed answer is put in place of the last number; nothing tells which of the steps before were right.
    """
    actions: list[str | None] = [action for action, _ in turns]
    if won:
        return actions
    told = re.search(r"it is ([0-9]+)", turns[-1][1])
    last = re.sub(r"[0-9]+(?=[^0-9]*$)", told[1], turns[-1][0]) if told else None
    return [None] * (len(turns) - 1) + [last]


def n_wrong(last: str) -> int:
    """How many steps the last observation says were wrong: it never tells."""
    return 0


def describe(options: Mapping[str, Any], episodes: Sequence[Episode]) -> dict[str, float]:
    """Of the episodes with a whole solution: steps_right, the share of their steps whose result is right for the number
    before; sound, the share with no wrong step. What was won and is not sound was won by slips that cancel out.
    """
    found = []
    for episode in episodes:
        stated = [one for turn in episode.turns if not turn.malformed for one in equations(turn.action)]
        marks = [apply(before, op, number) == result for before, op, number, result in stated]
        if len(marks) >= len(problem_of(episode.scenario).steps):
            found.append(marks)
    if not found:
        return {}
    every = [mark for marks in found for mark in marks]
    return {"steps_right": sum(every) / len(every), "sound": sum(map(all, found)) / len(found)}


def make(options: Mapping[str, Any], ask: Ask | None = None) -> Callable[[], Env]:
    checked = Options(**options)
    return lambda: Sums(checked)


def scenarios(options: Mapping[str, Any], split: str, n: int | None, seed: int) -> list[Scenario]:
    """Problems of a split in an order fixed by the seed, train over and over. Raises UsageError where there are none."""
    checked = Options(**options)
    check_split("sums", split)
    shares = {"test": checked.test, "validation": checked.validation}
    made = problems(checked.steps, checked.problems, checked.problem_seed)
    mine = [p for p in made if deal(opening(p), checked.split_seed, **shares) == split]
    if not mine:
        raise UsageError(f"task.options of sums: no problem is left for {split}. Raise problems, or {split}'s share.")
    return [_scenario(split, p) for p in draw(mine, split, n, seed)]


def _scenario(split: str, problem: Problem) -> Scenario:
    data = {"start": problem.start, "steps": [list(step) for step in problem.steps]}
    return Scenario("sums", split, digest(opening(problem)), data)


@functools.lru_cache(maxsize=8)
def problems(steps: int, n: int, seed: int) -> tuple[Problem, ...]:
    """n different problems, or fewer where there are not so many. The first n of more are the same."""
    rng, found = random.Random(f"sums {steps} {seed}"), dict[Problem, None]()
    for _ in range(20 * n):
        found[new_problem(steps, rng)] = None
        if len(found) == n:
            break
    return tuple(found)


def new_problem(steps: int, rng: random.Random) -> Problem:
    """Sums and differences with 1 to 9, and at most one product, with 2 or 3; every result within LOWEST and HIGHEST."""
    start = value = rng.randint(LOWEST, HIGHEST)
    told: list[tuple[str, int]] = []
    while len(told) < steps:
        op = rng.choice("+-*")
        number = rng.randint(2, 3) if op == "*" else rng.randint(1, 9)
        after = apply(value, op, number)
        if LOWEST <= after <= HIGHEST and not (op == "*" and any(before == "*" for before, _ in told)):
            told.append((op, number))
            value = after
    return Problem(0, start, tuple(told))
