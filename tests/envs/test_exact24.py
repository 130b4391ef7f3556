"""Exact arithmetic of the Game of 24 against slow twins, and the reader of expressions."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.envs.exact24 import evaluate_expression, numbers_of, quadruples, ways

ALL = list(itertools.combinations_with_replacement(range(1, 14), 4))


def brute(numbers: tuple[int, ...]) -> bool:
    """Slow twin of `solvable`: every order, operator and bracketing, with fractions."""

    def op(a: Fraction | None, sign: str, b: Fraction | None) -> Fraction | None:
        if a is None or b is None or (sign == "/" and b == 0):
            return None
        return {"+": a + b, "-": a - b, "*": a * b}[sign] if sign != "/" else a / b

    for a, b, c, d in set(itertools.permutations(map(Fraction, numbers))):
        for x, y, z in itertools.product("+-*/", repeat=3):
            left, middle, right = op(a, x, b), op(b, y, c), op(c, z, d)
            forms = (
                op(op(left, y, c), z, d),
                op(op(a, x, middle), z, d),
                op(left, y, right),
                op(a, x, op(middle, z, d)),
                op(a, x, op(b, y, right)),
            )
            if 24 in forms:
                return True
    return False


def test_1362_of_the_1820_quadruples_make_24() -> None:
    assert len(ALL) == 1820
    assert len(quadruples()) == len(set(quadruples())) == 1362
    assert set(quadruples()) <= set(ALL)


@pytest.mark.parametrize("seed", range(2))
def test_solvable_equals_every_bracketing_tried(seed: int) -> None:
    known = set(quadruples())
    for numbers in random.Random(seed).sample(ALL, 25):
        assert (numbers in known) == brute(numbers)
    assert brute((3, 3, 8, 8)) and (3, 3, 8, 8) in known  # only by fractions: 8 / (3 - 8 / 3)


def test_ways_equals_the_sequences_of_steps_counted_one_by_one() -> None:
    def sequences(numbers: tuple[Fraction, ...]) -> set[tuple[str, ...]]:
        if len(numbers) == 1:
            return {()} if numbers[0] == 24 else set()
        found = set()
        for i, j in itertools.permutations(range(len(numbers)), 2):
            a, b = numbers[i], numbers[j]
            rest = tuple(n for k, n in enumerate(numbers) if k not in (i, j))
            results = (
                {f"{a} - {b}": a - b}
                | ({f"{a} / {b}": a / b} if b else {})
                | ({f"{a} + {b}": a + b, f"{a} * {b}": a * b} if a >= b else {})
            )
            found |= {(step, *later) for step, c in results.items() for later in sequences((*rest, c))}
        return found

    for numbers in [(3, 3, 8, 8), (1, 1, 1, 1), (4, 6, 8, 8), (2, 3, 4, 12), *random.Random(0).sample(ALL, 4)]:
        assert ways(numbers_of(numbers)) == len(sequences(numbers_of(numbers)))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "a",
        "1 if 1 else 2",
        "[1][0]",
        "+1",
        "~1",
        "1, 2",
        "",
        " ",
        "9**9**9",
        "1 2",
        "007",
        "1_0",
        "True",
        "(1).real",
    ],
)
def test_no_expression_but_arithmetic_is_evaluated(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        evaluate_expression(text, numbers_of((1, 1, 1, 1)))


EXPRESSION = st.recursive(
    st.integers(0, 99).map(lambda n: (str(n), Fraction(n), [n])),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda t: joined(*t)),
    max_leaves=6,
)
Value = tuple[str, Fraction | None, list[int]]


def joined(one: Value, op: str, other: Value) -> Value:
    (s, a, m), (t, b, n) = one, other
    if a is None or b is None or (op == "/" and not b):
        return f"({s} {op} {t})", None, m + n
    if op == "+":
        return f"({s} + -{t})", a - b, m + n
    return f"({s} {op} {t})", a - b if op == "-" else a * b if op == "*" else a / b, m + n


@given(EXPRESSION)
def test_the_reader_of_expressions_is_exact(expression: Value) -> None:
    text, value, used = expression
    if value is None:
        with pytest.raises(ValueError, match="zero"):
            evaluate_expression(text, numbers_of(tuple(used)))
    else:
        assert evaluate_expression(text, numbers_of(tuple(used))) == value
        with pytest.raises(ValueError, match="each once"):
            evaluate_expression(text, numbers_of((*used, 1)))
