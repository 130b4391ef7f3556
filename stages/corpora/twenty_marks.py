"""Whether a reply to a prompt of the corpus of 20 Questions is right: equal to the one right answer, or one of many. Ours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stages.corpora.twenty import Action, Turn, attributes, fitting, table
from stages.frame.types import Message

REPLY = re.compile(r"Thought: (?:as told, )?(\w+)\. Action: (ask|guess) (\w+)")
FUTURE = re.compile(r"Future: (?:\w+ (?:yes|no), )+(?:won|lost)\.")
TOLD = re.compile(r"Action: \w+ (\w+)\nOptimality: No\.(?: [\w ]+, ([\w ]+)\.)?")


def right(row: Mapping[str, Any], said: str) -> dict[str, bool]:
    """Whether a reply to a row of the probe is right: the one right answer, where there is one.

    successor: it has the form. policy: the game can read it, and the thought fits. refiner: it does what it is told.
    """
    role, want = row["role"], row["reply"]
    if role in ("combine", "evaluator", "corrector"):
        return {role: said == want}
    if role == "successor":
        return {role: bool(FUTURE.fullmatch(said))}
    turns, found = turns_of(row["messages"]), REPLY.fullmatch(said)
    if not found or found[3] not in (attributes() if found[2] == "ask" else table()):
        return {role: False} | ({"policy_thought": False} if role == "policy" else {})
    thought, verb, word = found[1], found[2], found[3]
    fits = fitting(turns)
    if role == "policy":
        return {role: True, "policy_thought": thought in fits}
    before, due = TOLD.findall(row["messages"][-1]["content"])[0]
    if due.startswith("guess "):
        return {role: said == want}
    used = {before, *(t.action.word for t in turns)}
    good = word in fits and (word != before or len(fits) == 1) if verb == "guess" else word not in used
    return {role: good and thought in fits and due in (verb, "")}


def turns_of(messages: Sequence[Message]) -> list[Turn]:
    """The turns of a conversation that `state` made."""
    said = [REPLY.fullmatch(str(m["content"])) for m in messages if m["role"] == "assistant"]
    seen = [str(m["content"]).split(".")[0].split()[-1] for m in messages if m["role"] == "user"][1:]
    return [Turn(r[1], Action(r[2], r[3]), answer) for r, answer in zip(said, seen, strict=False) if r]
