"""What is said at the service desk: the tools, the rules and the rungs of what an audit tells of them.

    rule          fail. gold refund needs give cash.       the right option of each broken rule
    fault         fail. gold refund bars give voucher.     the option that was wrong, not the right one
    count         fail. 2 wrong.
    verdict       fail.
    consequence   Ana lacks money.                         at once, behind a wrong step; who knows the words knows what was needed

A visit that nobody audits ends with a farewell, and its reward alone tells how it went. [ours]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

OPTIONS_OF = {
    "check": ("photo", "receipt", "passport"),
    "give": ("voucher", "cash", "credit", "discount"),
    "log": ("ledger", "ticket", "diary"),
    "send": ("courier", "drone", "truck"),
    "tag": ("red", "blue", "green"),
    "bill": ("weekly", "monthly", "yearly"),
    "rate": ("high", "middle", "low"),
    "close": ("phone", "email"),
}
"""Tool -> its options, in the order in which a desk with all steps wants them."""
LACKS = {
    "photo": "picture", "receipt": "price", "passport": "stamp", "voucher": "coupon", "cash": "money", "credit": "balance", "discount": "bargain",
    "ledger": "total", "ticket": "number", "diary": "date", "courier": "speed", "drone": "height", "truck": "space", "red": "alarm", "blue": "calm",
    "green": "nature", "weekly": "week", "monthly": "month", "yearly": "year", "high": "praise", "middle": "balm", "low": "blame",
    "phone": "voice", "email": "letter",
}  # fmt: skip
"""What a customer lacks where this option was needed and another one was taken."""
FAREWELL = "bye."

Audit = Literal["rule", "fault", "count", "verdict", "consequence"]


@dataclass(frozen=True)
class Rule:
    """`key` needs `tool` `option`, e.g. ("gold refund", "give", "repair")."""

    key: str
    tool: str
    option: str

    def __str__(self) -> str:
        return f"{self.key} needs {self.tool} {self.option}."


@dataclass(frozen=True)
class Fault:
    """`key` bars `tool` `option`: that it was the wrong one, and not which would have been right."""

    key: str
    tool: str
    option: str

    def __str__(self) -> str:
        return f"{self.key} bars {self.tool} {self.option}."


def system_text(tools: Sequence[str]) -> str:
    """What the agent is told: which tools there are, in the order in which the desk wants them."""
    return f"Service desk. {' '.join(tools)}."


def opening(name: str, tier: str, request: str, item: str) -> str:
    return f"{name}, {tier}, wants {request} for {item}."


def done(option: str) -> str:
    return f"{option} done."


def lack(name: str, rule: Rule) -> str:
    """What comes of a step that broke this rule."""
    return f"{name} lacks {LACKS[rule.option]}."


def audit(auditor: str, broken: Sequence[tuple[Rule, str]], kind: Audit = "rule") -> str:
    """broken: each rule with the option that was taken instead."""
    if not broken:
        return f"{auditor} audits: pass."
    said: dict[Audit, list[str]] = {
        "rule": [str(rule) for rule, _ in broken],
        "fault": [str(Fault(rule.key, rule.tool, taken)) for rule, taken in broken],
        "count": [f"{len(broken)} wrong."],
    }
    return " ".join([f"{auditor} audits: fail.", *said.get(kind, ())])


def lessons(turns: Sequence[tuple[str, str]], *, won: bool) -> list[str | None]:
    """What a parser of the words makes of a visit: the text of the action to be learned at each turn, or None.

    turns: (action's text, observation) of each. "give cash" becomes "give discount" where the last observation says "...
    needs give discount." or its own one "... lacks bargain."; None where the last one says "... bars give cash.", or where
    a lost visit names no step at all: then nothing tells the right ones apart.
    """
    last = turns[-1][1]
    names = won or any(re.search(r"\b(needs|bars|lacks|wrong)\b", observation) for _, observation in turns)
    return [_lesson(action, observation, last) if names else None for action, observation in turns]


def _lesson(action: str, observation: str, last: str) -> str | None:
    needed = dict(re.findall(r"needs (\w+) (\w+)\.", last))
    barred, lacking = re.findall(r"bars (\w+ \w+)\.", last), re.findall(r"lacks (\w+)\.", observation)
    if any(one in action for one in barred):
        return None
    for tool, options in OPTIONS_OF.items():
        wanted = [needed[tool]] if tool in needed else [one for one in options if LACKS[one] in lacking]
        for option in wanted:
            action = re.sub(rf"\b{tool} ({'|'.join(options)})\b", f"{tool} {option}", action)
    return action


def n_wrong(last: str) -> int:
    """How many steps the last observation says were wrong; 0 where it does not tell."""
    counts = re.findall(r"(\d+) wrong\.", last)
    return int(counts[0]) if counts else 0
