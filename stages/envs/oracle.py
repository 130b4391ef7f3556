"""Who answers in 20 Questions: a rule over a table of attributes, or an LLM that is handed in.

An oracle is a function (object, question) -> "yes", "no", or None where the question cannot be answered.
An LLM's answer counts only if it begins with yes or no (LMRL-Gym, twenty_questions/env/oracle.py); what else it says is
asked again and is then a SimulatorError, where LMRL-Gym takes it for a No.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from stages.envs.objects import Names, Table, Words, words
from stages.frame.types import Ask, EngineUnavailable, Message, SimulatorError

Oracle = Callable[[str, str], str | None]

_SYSTEM = "You are the oracle of a game of 20 Questions. Answer the question about the object truthfully. Answer with a single word: Yes or No."


def fold(word: str) -> str:
    """A word without its plural ending, for comparing phrases: flies -> fly, boxes -> box, legs -> leg."""
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if re.search(r"(x|ch|sh|ss|z)es$", word):
        return word[:-2]
    return word[:-1] if len(word) > 3 and re.search(r"[^sui]s$", word) else word


def rule_oracle(table: Table) -> Oracle:
    """Answers questions about the table's attributes in plain English, offline and always the same.

    The longest phrase known at each place counts. Several attributes are joined by "and", or by "or" where the question
    says so; "not" before a phrase turns it. A guess of another object is a No. A question without a known phrase: None.
    """
    names = Names(table.items.values())
    phrases: dict[Words, tuple[str, bool]] = {}
    for name, attribute in table.attributes.items():
        for asked, holds in ((attribute.yes, True), (attribute.no, False)):
            phrases.update({tuple(fold(word) for word in words(phrase)): (name, holds) for phrase in asked})
    longest = max(map(len, phrases), default=0)

    def answer(target: str, question: str) -> str | None:
        guessed = names.guessed(question)
        if guessed:
            return "yes" if target in guessed else "no"
        tokens = tuple(fold(word) for word in words(question))
        held = table.items[target].attributes
        facts, start, turned = [], 0, False
        while start < len(tokens):
            lengths = range(min(longest, len(tokens) - start), 0, -1)
            length = next((length for length in lengths if tokens[start : start + length] in phrases), 0)
            if length:
                name, holds = phrases[tokens[start : start + length]]
                facts.append(((name in held) == holds) != turned)
            # "not" reaches over "a", "made of" and the like up to the next phrase.
            turned = (turned or tokens[start] in ("not", "non", "never", "without")) and not length
            start += length or 1
        if not facts:
            return None
        return "yes" if (any if "or" in tokens else all)(facts) else "no"

    return answer


def llm_oracle(ask: Ask, *, tries: int) -> Oracle:
    """Answers by an LLM, once per object and question up to case and punctuation, so that runs repeat.

    Raises SimulatorError where the LLM is down or says neither yes nor no in `tries` replies.
    """
    known: dict[tuple[str, Words], str] = {}

    def answer(target: str, question: str) -> str:
        key = (target, words(question))
        if key not in known:
            known[key] = _asked(ask, target, question, tries)
        return known[key]

    return answer


def _asked(ask: Ask, target: str, question: str, tries: int) -> str:
    messages: list[Message] = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": f"object: {target}\nquestion: {question}\nanswer (yes or no): "},
    ]
    reply = ""
    for _ in range(tries):
        try:
            reply = ask(messages)
        except EngineUnavailable as error:
            raise SimulatorError(f"the oracle of 20 Questions did not answer: {error}") from error
        found = re.match(r"[\s\"'*]*(yes|no)\b", reply, re.IGNORECASE)
        if found:
            return found[1].lower()
        # At temperature 0 the same prompt would give the same reply.
        messages = [
            *messages,
            {"role": "assistant", "content": reply},
            {"role": "user", "content": "Answer with a single word: Yes or No."},
        ]
    raise SimulatorError(
        f"the oracle of 20 Questions should say yes or no, said {reply[:80]!r} in {tries} tries. Try another oracle model."
    )
