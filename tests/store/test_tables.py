"""Rows as Arrow: lists of numbers are joined here, and are what Arrow itself makes of them."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pyarrow as pa
import pytest

from stages.store import tables


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("INTEGER[]", [[1, 2], [], [2**31 - 1, -(2**31)]]),
        ("INTEGER[]", [(1,), array("i", [5, 6]), [7]]),
        ("INTEGER[]", []),
        ("INTEGER[]", [None, [1]]),
        ("INTEGER[]", [[None], [1]]),
        ("DOUBLE[]", [[0.1 + 0.2, 1], [], [-math.inf, 5e-324]]),
        ("DOUBLE[]", [None, [None, 0.5]]),
    ],
)
def test_lists_that_are_joined_are_the_column_that_arrow_makes_of_them(kind: str, values: list[Any]) -> None:
    numbers = tables._arrow_type(kind)
    plain = [one if one is None else list(one) for one in values]
    found = tables._column(values, kind)
    found.validate(full=True)
    assert found.type == numbers and found.equals(pa.array(plain, numbers))


@pytest.mark.parametrize("wrong", [[1.5], [2**31], ["7"], "7", 7])
def test_lists_that_do_not_fit_are_refused_by_arrow(wrong: Any) -> None:
    with pytest.raises((pa.ArrowException, TypeError, ValueError, OverflowError)):
        tables._column([[1], wrong], "INTEGER[]")
