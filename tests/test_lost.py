"""`python -m benchmarks.evidence.lost`: at which steps a visit went wrong, and how often each step was taught."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from benchmarks.evidence.lost import UNREAD, fault, taught
from stages.envs import service_desk as desk

OPTIONS = desk.Options(rules_seed=7)
(CUSTOMER,) = desk.scenarios(OPTIONS.model_dump(), "train", 1, seed=0)


def _options_of(tool: str) -> tuple[str, list[str]]:
    """The right option of a step for this customer, and the wrong ones."""
    kind, choices = {name: (kind, choices) for name, kind, choices in desk.steps_of(OPTIONS)}[tool]
    key = desk.key_of(kind, str(CUSTOMER.data["request"]), str(CUSTOMER.data["tier"]))
    right = desk.rule_book(OPTIONS)[tool, key].option
    return right, [option for option in choices if option != right]


RIGHT = {tool: f"{tool} {_options_of(tool)[0]}" for tool, _, _ in desk.steps_of(OPTIONS)}


def faults(actions: Iterable[str]) -> set[str]:
    """Of a visit with these actions, of which those that are not two words were not understood."""
    found, understood = set(), list[str]()
    for action in actions:
        malformed = len(action.split()) != 2
        t: Any = SimpleNamespace(action=action, malformed=malformed, past_actions=tuple(understood), scenario=CUSTOMER)
        found.add(fault(t, OPTIONS))
        understood += [] if malformed else [action]
    return found - {""}


def test_a_visit_in_which_all_is_right_has_no_fault() -> None:
    assert faults(RIGHT.values()) == set()


def test_each_wrong_step_is_named_and_the_right_ones_are_not() -> None:
    wrong = {tool: f"{tool} {_options_of(tool)[1][0]}" for tool in ("check", "close")}
    assert faults((RIGHT | wrong).values()) == {"check", "close"}


def test_after_a_turn_that_was_not_understood_the_same_step_comes_again() -> None:
    actions = list(RIGHT.values())
    assert faults([actions[0], "hand over all", *actions[1:]]) == {UNREAD}
    assert faults(["", *actions]) == {UNREAD}


def test_labels_are_counted_by_the_step_that_was_learned_and_dropped_ones_are_not() -> None:
    def row(refined: str, dropped: str = "") -> dict[str, object]:
        return {"refined": refined, "info": {"dropped": dropped}}

    said = [f"Thought: x\nAction: {action}" for action in ("give cash", "give credit", "close note")]
    assert taught([*map(row, said), row(said[0], "refused"), row("no action at all")]) == {"give": 2, "close": 1}
