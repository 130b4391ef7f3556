"""tau_bench's calculate: Python's numbers, none of its powers, and an answer at once whatever is asked."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.envs.tau_database import Base, Database
from stages.envs.tau_tools import COMMON, call


def calculated(expression: Any) -> str:
    return call(COMMON, Database(Base({})), "calculate", {"expression": expression})[1]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 2", 2 + 2),
        ("  7 ", 7),
        ("2 * ((350 - 122) + (499 - 127))", 2 * ((350 - 122) + (499 - 127))),
        ("2.675 * 1", 2.675),  # 2.67: cents are rounded as floats are
        ("0.1 + 0.2", 0.1 + 0.2),
        ("-3 - -2", -3 - -2),
        ("+5 / 4", 5 / 4),
        ("7 // 2", 7 // 2),
        ("2 ** 10", 2**10),
        ("2 ** -2", 2**-2),
        ("-2 ** 2", -(2**2)),
        ("1 ** 99999999999", 1),
        ("9 ** 300 // 9 ** 299", 9),
        (".5 + 5.", 5.5),
    ],
)
def test_calculate_gives_what_python_gives(expression: str, value: float) -> None:
    assert calculated(expression) == str(round(float(value), 2))


NUMBERS = st.one_of(st.integers(0, 10**6), st.decimals(0, 10**4, places=3).map(float)).map(lambda n: (str(n), n))
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
}


def joined(parts: tuple[tuple[str, Any], str, tuple[str, Any]]) -> tuple[str, Any]:
    (left, a), sign, (right, b) = parts
    value = OPERATORS[sign](a, b) if a is not None and b is not None and not (b == 0 and "/" in sign) else None
    return f"({left}) {sign} ({right})", value


@settings(deadline=None)
@given(
    st.recursive(
        NUMBERS, lambda inner: st.tuples(inner, st.sampled_from(sorted(OPERATORS)), inner).map(joined), max_leaves=8
    )
)
def test_calculate_agrees_with_python_on_any_expression(case: tuple[str, Any]) -> None:
    expression, value = case
    if value is None:
        assert calculated(expression).startswith("Error: ") and "by zero" in calculated(expression)
    else:
        assert calculated(expression) == str(round(float(value), 2))


@pytest.mark.parametrize(
    "expression",
    [
        "", " ", "()", "1 +", "1 / 0", "1 // 0", "(1)(2)", "1, 2", "1 2", "...", "0 ** -1", "(-8) ** .5", "9.9 ** 999", "007", "((1)", "x", "1e5",
        "__import__('os')", "1\n+1", "9**9**9", "9**9**9**9", "9" * 5000, "(" * 300, "(" * 150 + "1", "1+" * 499 + "1", "9**999*" * 50 + "9", "1" * 10**6,
        5, None, ["1", "+", "1"], True,
    ],
)  # fmt: skip
def test_calculate_refuses_everything_else_at_once(expression: Any) -> None:
    began = time.process_time()
    assert calculated(expression).startswith("Error: ")
    assert time.process_time() - began < 1
