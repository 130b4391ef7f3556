"""The tally of a desk's words, a control of the critic, against votes counted by hand."""

from __future__ import annotations

import pytest

from benchmarks.evidence.vote import tally, win_rate
from stages.envs import service_desk as desk

OPTIONS = desk.Options(requests=1, tiers=1, steps=2, audit="fault")
"""One customer, gold refund; check has three options and close two: at random 1 visit in 6 is won."""
RIGHT = {tool: rule.option for (tool, _), rule in desk.rule_book(OPTIONS).items()}
WRONG = {tool: next(o for o in desk.OPTIONS_OF[tool] if o != right) for tool, right in RIGHT.items()}


def visit(check: str, close: str, said: str, *, won: bool = False) -> tuple[str, str, bool, list[tuple[str, str]]]:
    return "refund", "gold", won, [(f"check {check}", f"{check} done."), (f"close {close}", f"{close} done. {said}")]


def blame(tool: str, option: str) -> str:
    return f"Mia audits: fail. refund bars {tool} {option}."


def test_a_blamed_option_has_a_vote_against_it_and_the_others_of_the_visit_one_for_them() -> None:
    votes = tally(OPTIONS, [visit(WRONG["check"], RIGHT["close"], blame("check", WRONG["check"]))], knows_keys=False)
    assert votes["check", "gold refund"] == {WRONG["check"]: [1, 0]}
    assert votes["close", "gold refund"] == {RIGHT["close"]: [0, 1]}


def test_a_win_is_a_vote_for_all_and_a_lost_visit_that_names_nothing_is_none() -> None:
    silent = visit(WRONG["check"], WRONG["close"], desk.FAREWELL)
    won = visit(RIGHT["check"], RIGHT["close"], "Mia audits: pass.", won=True)
    votes = tally(OPTIONS, [silent, won], knows_keys=True)
    assert {key: dict(cast) for key, cast in votes.items()} == {
        ("check", "refund"): {RIGHT["check"]: [0, 1]},
        ("close", "gold"): {RIGHT["close"]: [0, 1]},
    }


def test_an_option_that_is_named_has_the_vote_in_place_of_the_one_that_was_taken() -> None:
    said = f"Mia audits: fail. refund needs check {RIGHT['check']}."
    votes = tally(OPTIONS, [visit(WRONG["check"], RIGHT["close"], said)], knows_keys=False)
    assert votes["check", "gold refund"] == {RIGHT["check"]: [0, 1]}


@pytest.mark.parametrize("knows_keys", [False, True])
def test_of_nothing_it_wins_as_often_as_chance_and_one_lie_in_three_does_not_mislead_it(knows_keys: bool) -> None:
    assert win_rate(OPTIONS, {}, knows_keys=knows_keys) == pytest.approx(1 / 6)
    true = visit(WRONG["check"], RIGHT["close"], blame("check", WRONG["check"]))
    won = visit(RIGHT["check"], RIGHT["close"], "Mia audits: pass.", won=True)
    lie = visit(RIGHT["check"], WRONG["close"], blame("check", RIGHT["check"]))
    # check: right 2 for, 1 against; wrong 0, 2; never tried 0, 0. close: right 4 for; wrong 1 for.
    visits = [true, true, won, won, lie]
    assert win_rate(OPTIONS, tally(OPTIONS, visits, knows_keys=knows_keys), knows_keys=knows_keys) == 1
    # Told that lie alone it leaves the right option, and takes what stood beside it.
    votes = tally(OPTIONS, [lie], knows_keys=knows_keys)
    assert win_rate(OPTIONS, votes, knows_keys=knows_keys) == 0
