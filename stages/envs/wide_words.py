"""What is said at the wide desk: a phrase of slots for an action, and the rungs of what an audit tells of a wrong one.

    answer    fail. give needs the cash by mail in march.   the whole right phrase of each wrong step
    value     fail. give channel needs mail.            of each wrong step its first wrong slot, and the right value
    slot      fail. give channel is wrong.              the first wrong slot alone
    step      fail. give is wrong.                      the wrong steps alone
    verdict   fail.

Between `answer` and `step` an audit names one slot of a wrong step, the first wrong one in the order of the phrase, never
all of them. So a reason has one size for any number of slots, and narrows the v values of one slot. If it named every
wrong slot, `value` would say as much as `answer`. [ours]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from stages.frame.types import Malformed

STEPS = ("give", "lend", "bill")
VALUES_OF = {
    "thing": ("cash", "credit", "coupon", "voucher", "repair"),
    "channel": ("mail", "phone", "courier", "drone", "truck"),
    "month": ("march", "april", "june", "july", "august"),
    "place": ("shop", "bank", "depot", "office", "station"),
    "paper": ("receipt", "photo", "passport", "badge", "stamp"),
}
"""Slot -> its values, both in the order in which a desk has them. No word stands in two slots."""
SLOTS = tuple(VALUES_OF)
MOST_VALUES = 5
LEADS = {"thing": "the ", "channel": "by ", "month": "in ", "place": "at ", "paper": "with "}
"""What stands before the value of a slot. Each has its own word: without one a small model copies that value late."""

Audit = Literal["answer", "value", "slot", "step", "verdict"]
Phrase = tuple[str, ...]
"""A value for each slot, in the order of the slots."""

_STEP, _SLOT = "|".join(STEPS), "|".join(SLOTS)
_ANSWER = re.compile(rf"\b({_STEP}) needs ([a-z ]+)\.")
_VALUE = re.compile(rf"\b({_STEP}) ({_SLOT}) needs ([a-z]+)\.")
_WRONG = re.compile(rf"\b({_STEP})(?: (?:{_SLOT}))? is wrong\.")
_FIRST, *_LATER = (rf"{LEADS[slot]}(?:{'|'.join(values)})" for slot, values in VALUES_OF.items())
_PHRASE = re.compile(rf"\b({_STEP}) ({_FIRST}{''.join(f'(?: {each})?' for each in _LATER)})\b")
_LEAD_WORDS = frozenset(lead.strip() for lead in LEADS.values())


def spoken(phrase: Sequence[str]) -> str:
    """A phrase in words: "the cash by mail in march"."""
    return " ".join(f"{LEADS[slot]}{value}" for slot, value in zip(SLOTS, phrase, strict=False))


def values_in(text: str) -> Phrase:
    """The values of a phrase in words."""
    return tuple(word for word in text.split() if word not in _LEAD_WORDS)


def phrase_of(action: str, tool: str, slots: int, values: int) -> Phrase:
    """The phrase that the action chooses at the step of `tool`. Raises Malformed unless it has a known value in every
    slot, and nothing else.
    """
    found = values_in(action.removeprefix(f"{tool} "))
    known = len(found) == slots and all(
        value in VALUES_OF[slot][:values] for slot, value in zip(SLOTS, found, strict=False)
    )
    if not known or action.split() != f"{tool} {spoken(found)}".split():
        raise Malformed(f"not understood. use {tool} now.")
    return found


def system_text(tools: Sequence[str], slots: int, values: int) -> str:
    """What the agent is told: the steps in their order, the slots of a phrase in theirs, and the values of each."""
    return f"Wide desk. {' '.join(tools)}. {' '.join(SLOTS[:slots])}. {values} values."


def described(tools: Sequence[str], slots: int, values: int) -> str:
    """The same in full, for a model that was not trained on this desk's language."""
    shown = [f"{slot}: {' or '.join(VALUES_OF[slot][:values])}." for slot in SLOTS[:slots]]
    example = spoken([VALUES_OF[slot][0] for slot in SLOTS[:slots]])
    return " ".join([*shown, f"An action names a value of each, in this order: {tools[0]} {example}"])


def opening(name: str, tier: str, request: str, item: str) -> str:
    return f"{name}, {tier}, wants {request} for {item}."


def wrong_slots(chosen: Sequence[str], needed: Sequence[str]) -> list[int]:
    """The slots in which the two phrases differ, in order."""
    return [j for j, (one, other) in enumerate(zip(chosen, needed, strict=True)) if one != other]


def blame(tool: str, chosen: Phrase, needed: Phrase, kind: Audit) -> str:
    """What an audit of this rung says of a step, "" where it names nothing or nothing was wrong."""
    if not (wrong := wrong_slots(chosen, needed)):
        return ""
    slot, value = SLOTS[wrong[0]], needed[wrong[0]]
    said: dict[Audit, str] = {
        "answer": f"{tool} needs {spoken(needed)}.",
        "value": f"{tool} {slot} needs {value}.",
        "slot": f"{tool} {slot} is wrong.",
        "step": f"{tool} is wrong.",
    }
    return said.get(kind, "")


def audit(blames: Sequence[str], *, passed: bool) -> str:
    """The last words of a visit. blames: what `blame` says of its steps."""
    return " ".join(["Audit:", "pass." if passed else "fail.", *filter(None, blames)])


def may(text: str) -> str:
    """A fact as a possibility."""
    return text.replace(" needs ", " may need ").replace(" is wrong.", " may be wrong.")


def lessons(turns: Sequence[tuple[str, str]], *, won: bool) -> list[str | None]:
    """What a parser of the words makes of a visit: the text of the action to be learned at each turn, or None.

    turns: (action's text, observation) of each. Told the answer, it puts that in; told slot and value, it mends that slot
    and leaves the later ones, of which nothing was said. Told the slot or the step alone it leaves the step out: nothing
    tells the other values apart. Steps that a telling audit does not name were right. A lost visit of which nothing is
    named teaches nothing.
    """
    last = turns[-1][1]
    answers = {tool: values_in(phrase) for tool, phrase in _ANSWER.findall(last)}
    values = {tool: (SLOTS.index(slot), value) for tool, slot, value in _VALUE.findall(last)}
    wrong = set(_WRONG.findall(last))

    def mended(found: re.Match[str]) -> str:
        tool, phrase = found[1], list(values_in(found[2]))
        if tool in values:
            slot, value = values[tool]
            phrase[slot : slot + 1] = [value]
        return f"{tool} {spoken(answers.get(tool, tuple(phrase)))}"

    def lesson(action: str) -> str | None:
        done = {tool for tool, _ in _PHRASE.findall(action)}
        return None if done & wrong else _PHRASE.sub(mended, action)

    return [lesson(action) if won or answers or values or wrong else None for action, _ in turns]


def n_wrong(last: str) -> int:
    """0: no rung says how many steps were wrong without naming them, and `lessons` deals with what is named."""
    return 0
