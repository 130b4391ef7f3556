"""Exact arithmetic of the Game of 24: what can be made of some numbers, and a reader of expressions that never calls
eval.

All numbers are fractions, so nothing is rounded. Used as the truth of every node of the search tree. Ours.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

TARGET = Fraction(24)

Numbers = tuple[Fraction, ...]
"""Numbers left, smallest first."""

_LONGEST = 200  # characters of an expression; four numbers of two digits need 40 with every pair of brackets


class Move(NamedTuple):
    """a op b = c. Of + and * the larger number stands first, so that one move has one form."""

    a: Fraction
    op: str
    b: Fraction
    c: Fraction

    def __str__(self) -> str:
        return f"{self.a} {self.op} {self.b} = {self.c}"


def move(a: Fraction, op: str, b: Fraction) -> Move:
    """The move in its one form. Raises ZeroDivisionError."""
    if op in "+*" and a < b:
        a, b = b, a
    return Move(a, op, b, a + b if op == "+" else a - b if op == "-" else a * b if op == "*" else a / b)


def without(numbers: Numbers, made: Move) -> Numbers | None:
    """What is left after the move; None where a or b is not there."""
    left = list(numbers)
    for number in (made.a, made.b):
        if number not in left:
            return None
        left.remove(number)
    return tuple(sorted((*left, made.c)))


@functools.lru_cache(maxsize=4096)
def moves(a: Fraction, b: Fraction) -> tuple[Move, ...]:
    """The different moves of two numbers: at most 6."""
    return tuple(dict.fromkeys(move(x, op, y) for op in "+-*/" for x, y in ((a, b), (b, a)) if op != "/" or y))


def choices(numbers: Numbers) -> Iterator[Move]:
    """The different moves that a node allows."""
    return itertools.chain.from_iterable(moves(*pair) for pair, _ in _splits(numbers, 2))


@functools.lru_cache(maxsize=200_000)
def ways(numbers: Numbers) -> int:
    """How many different sequences of moves make 24 of all the numbers, of which there are at least two."""
    if len(numbers) == 2:
        return _partners(numbers[0])[numbers[1]]
    every = ((rest, made.c) for pair, rest in _splits(numbers, 2) for made in moves(*pair))
    return sum(_partners(rest[0])[c] if len(rest) == 1 else ways(tuple(sorted((*rest, c)))) for rest, c in every)


@functools.lru_cache(maxsize=200_000)
def solvable(numbers: Numbers) -> bool:
    """Whether 24 can be made of all the numbers: some expression splits them in two parts whose values go together to
    24.
    """
    if len(numbers) == 1:
        return numbers[0] == TARGET
    return any(not _partners(a).keys().isdisjoint(values(rest)) for part, rest in _parts(numbers) for a in values(part))


@functools.lru_cache(maxsize=200_000)
def values(numbers: Numbers) -> frozenset[Fraction]:
    """All values of expressions that use each number once."""
    if len(numbers) == 1:
        return frozenset(numbers)
    return frozenset(
        made.c for part, rest in _parts(numbers) for a in values(part) for b in values(rest) for made in moves(a, b)
    )


def _parts(numbers: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """The ways to part the numbers in two, the smaller part first."""
    return itertools.chain.from_iterable(_splits(numbers, size) for size in range(1, len(numbers) // 2 + 1))


def _splits(numbers: Numbers, size: int) -> dict[tuple[Numbers, Numbers], None]:
    """(so many of the numbers, the others) in every way, equal ones once."""
    every = range(len(numbers))
    sides = itertools.combinations(every, size)
    return dict.fromkeys(
        (tuple(numbers[i] for i in side), tuple(numbers[i] for i in every if i not in side)) for side in sides
    )


@functools.lru_cache(maxsize=4096)
def _partners(a: Fraction) -> Counter[Fraction]:
    """b -> how many different moves of a and b make 24."""
    quotients = (TARGET / a, TARGET * a, a / TARGET) if a else ()
    return Counter((TARGET - a, TARGET + a, a - TARGET, *quotients))


@functools.lru_cache(maxsize=1)
def quadruples() -> tuple[tuple[int, int, int, int], ...]:
    """The 1,362 of the 1,820 multisets of four numbers from 1 to 13 that make 24, in order."""
    everything = itertools.combinations_with_replacement(range(1, 14), 4)
    return tuple((a, b, c, d) for a, b, c, d in everything if solvable(numbers_of((a, b, c, d))))


def numbers_of(puzzle: tuple[int, ...]) -> Numbers:
    return tuple(Fraction(number) for number in sorted(puzzle))


def evaluate_expression(text: str, numbers: Numbers) -> Fraction:
    """Value of an expression of + - * /, brackets and unary minus that uses exactly these whole numbers, each once.

    Raises ValueError, saying what is wrong, for anything else, for a division by zero too.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"an expression has at most {_LONGEST} characters")
    if not re.fullmatch(r"[0-9+\-*/() ]+", text):
        raise ValueError("only whole numbers, + - * / and brackets are allowed")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ) as error:  # whatever the parser says, the text is no expression
        raise ValueError("that is no expression") from error
    used: list[Fraction] = []
    try:
        value = _value(tree.body, used)
    except ZeroDivisionError as error:
        raise ValueError("it divides by zero") from error
    if sorted(used) != sorted(numbers):
        raise ValueError(f"it must use {' '.join(map(str, numbers))}, each once")
    return value


def _value(node: ast.expr, used: list[Fraction]) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        used.append(Fraction(node.value))
        return used[-1]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if isinstance(node, ast.BinOp):
        a, b = _value(node.left, used), _value(node.right, used)
        match node.op:
            case ast.Add():
                return a + b
            case ast.Sub():
                return a - b
            case ast.Mult():
                return a * b
            case ast.Div():
                return a / b
    raise ValueError("only + - * / and brackets are allowed between numbers")
