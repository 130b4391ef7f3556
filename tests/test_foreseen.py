"""What a successor foresees on the wide desk, counted against the rule book by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.evidence.foreseen import EXACT, HAS_IT, OTHER, SILENT, kind, shares
from stages.envs.wide_rules import Options, needed
from stages.envs.wide_words import VALUES_OF, spoken

OPTIONS = Options(slots=2)
WHO = {"request": "refund", "tier": "gold"}
RIGHT = needed(OPTIONS, **WHO)[0]
WRONG = tuple(next(v for v in VALUES_OF[slot] if v != right) for slot, right in zip(VALUES_OF, RIGHT, strict=False))
THIRD = next(v for v in VALUES_OF["channel"][:3] if v not in (RIGHT[1], WRONG[1]))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (f"give channel may need {RIGHT[1]}.", EXACT),
        (f"give channel may need {RIGHT[1]}. give thing may need {WRONG[0]}.", EXACT),
        (f"lend thing may need {WRONG[0]}. give channel needs {RIGHT[1]}.", EXACT),
        (f"give channel may need {WRONG[1]}.", HAS_IT),
        (f"give thing may need {RIGHT[0]}.", HAS_IT),
        (f"give channel may need {THIRD}.", OTHER),
        ("give paper may need badge.", OTHER),
        (f"lend channel may need {RIGHT[1]}.", SILENT),
        ("", SILENT),
    ],
)
def test_a_future_is_of_one_kind_by_what_it_says_first_of_the_step(said: str, expected: str) -> None:
    assert kind(f"Future: give, lend, then fail. {said}", "give", (RIGHT[0], WRONG[1]), RIGHT) == expected


def row(fresh: tuple[str, ...], after: str, *futures: str) -> dict[str, Any]:
    action = f"Thought: gold refund. Action: give {spoken(fresh)}"
    return {
        "episode_id": "e",
        "action": action,
        "futures": futures,
        "refined": after and f"Thought: x. Action: {after}",
    }


def test_shares_are_of_wrong_and_of_right_actions_and_a_rewrite_is_better_worse_or_neither() -> None:
    rows = [
        row((WRONG[0], RIGHT[1]), f"give {spoken(RIGHT)}", f"give thing may need {RIGHT[0]}.", ""),
        row(WRONG, f"give {spoken(WRONG)}", f"give thing may need {WRONG[0]}.", f"give channel may need {THIRD}."),
        row(RIGHT, f"give {spoken((WRONG[0], RIGHT[1]))}", f"give thing may need {WRONG[0]}.", "Future: then pass."),
        row(RIGHT, "give the the", f"give channel may need {THIRD}.", "Future: then pass."),
        row(WRONG, "", "this one was dropped"),
    ]
    wrong, silent, better, worse = shares(rows, {"e": WHO}, OPTIONS)
    assert wrong == {EXACT: 0.25, HAS_IT: 0.25, OTHER: 0.25, SILENT: 0.25}
    assert (silent, better, worse) == (0.5, 0.25, 0.5)
