"""A generated set of arithmetic problems in digits and in words, with whole-number answers. Ours.

A problem is a number and steps that are done one after the other, so that a chain of thought has one thought a step.
What is taken away is never more than what is there; products stay below 10,000.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

STEPS = {1: 1, 2: 2, 3: 4}
_LARGEST = {1: 9, 2: 20, 3: 99}
_OPS = {1: "+-", 2: "+-*", 3: "+-*"}
_MOST = 9999
_VERBS = {"+": "Add", "-": "Take away", "*": "Multiply by"}
_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


@dataclass(frozen=True)
class Problem:
    """start, then each (op, number) in turn."""

    level: int
    start: int
    steps: tuple[tuple[str, int], ...]

    @property
    def answer(self) -> int:
        return functools.reduce(lambda value, step: apply(value, *step), self.steps, self.start)

    @property
    def expression(self) -> str:
        """With brackets only where they are needed: (7 + 5) * 3 - 8."""
        text, bound = str(self.start), True
        for op, number in self.steps:
            text = f"{text if bound or op != '*' else f'({text})'} {op} {number}"
            bound = op == "*"
        return text

    def text(self, form: str) -> str:
        """The question in "digits" or in "words"."""
        if form == "digits":
            return f"What is {self.expression}?"
        told = [f"Start with {spell(self.start)}.", *(f"{_VERBS[op]} {spell(number)}." for op, number in self.steps)]
        return f"{' '.join(told)} What is the result?"


def apply(value: int, op: str, number: int) -> int:
    return value + number if op == "+" else value - number if op == "-" else value * number


def spell(number: int) -> str:
    """0 to 99 in words."""
    tens, ones = divmod(number, 10)
    return _SMALL[number] if number < 20 else _TENS[tens] + (f"-{_SMALL[ones]}" if ones else "")


@functools.lru_cache(maxsize=32)
def problems(level: int, n: int, seed: int) -> tuple[Problem, ...]:
    """n different problems of a level, or fewer where there are not so many (level 1 has 126). The first n of more are
    the same.
    """
    rng = random.Random(f"arithmetic {level} {seed}")
    found: dict[Problem, None] = {}
    for _ in range(20 * n):
        found[_problem(level, rng)] = None
        if len(found) == n:
            break
    return tuple(found)


def _problem(level: int, rng: random.Random) -> Problem:
    start = value = rng.randint(1, _LARGEST[level])
    steps: list[tuple[str, int]] = []
    for _ in range(STEPS[level]):
        fitting = [op for op in _OPS[level] if (op != "-" or value) and (op != "*" or value * 9 <= _MOST)]
        op = rng.choice(fitting)
        number = (
            rng.randint(2, 9)
            if op == "*"
            else rng.randint(1, min(_LARGEST[level], value) if op == "-" else _LARGEST[level])
        )
        steps.append((op, number))
        value = apply(value, op, number)
    return Problem(level, start, tuple(steps))
