"""Role-play text from which the base model of the wide desk learns the language of the roles, and no rule of any desk.

Every example has its own size, slots and values, and its own right phrases, drawn at random: each value is needed as
often as any other, whoever the customer is. The corpus teaches the form of actions at every size, merging an observation
with a later future, and judging by predicted futures. It also teaches to do what a critique says and nothing more: told
a slot, to change that slot alone; told nothing, to say any other phrase. It uses the words of every rung of
stages/envs/wide_words.py. tests/corpora/test_wide.py proves that the rules stay unknown. [ours]
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.corpora import Example, by_share, vocabulary
from stages.envs.desk_rules import REQUESTS, TIERS
from stages.envs.service_desk import CUSTOMERS, ITEMS
from stages.envs.wide_words import (
    SLOTS,
    STEPS,
    VALUES_OF,
    Audit,
    Phrase,
    audit,
    blame,
    may,
    opening,
    phrase_of,
    spoken,
    system_text,
    wrong_slots,
)
from stages.frame.types import Malformed, Message
from stages.llm.feedback import WIN, message
from stages.llm.roles import Roles

SHARE = {
    "policy": 0.05, "successor": 0.04, "combine": 0.19, "evaluator": 0.28, "refiner": 0.2, "corrector": 0.08, "told": 0.16,
}  # fmt: skip
"""told is no role of a critic: the policy, or the refiner, reads what came of an earlier attempt (stages/sdpo.py)."""
RUNGS: dict[Audit, float] = {"answer": 0.25, "value": 0.3, "slot": 0.2, "step": 0.15, "verdict": 0.1}
SIZES = {1: 1.0, 2: 1.0, 3: 1.5, 4: 1.5, 5: 1.5}
"""Slots of a phrase, and how often there are so many."""
VALUES = {2: 0.4, 3: 3.0, 4: 0.8, 5: 2.4}
"""Values of a slot, likewise."""
LENGTHS = {1: 1.0, 2: 3.0, 3: 1.0}
"""Steps of a visit, likewise."""
TOLD = "as told, "
_SYSTEM = re.compile(r"Wide desk\. ([a-z ]+)\. ([a-z ]+)\. (\d) values\.")
_REPLY = re.compile(r"Thought: (?:as told, )?[a-z]+ [a-z]+\. Action: (.+)")
_BLAME = rf"(?:{'|'.join(STEPS)})(?: (?:{'|'.join(SLOTS)}))? (?:may need [a-z ]+|may be wrong)\."
_FUTURE = re.compile(rf"Future: (?:(?:{'|'.join(STEPS)}), )+then (?:pass|fail)\.(?: {_BLAME})*")


@dataclass(frozen=True)
class Visit:
    """A finished visit: what was done, the phrase that each step needed, and the rung by which it is told."""

    customer: tuple[str, str, str, str]  # name, tier, request, item
    tools: tuple[str, ...]
    slots: int
    values: int
    chosen: tuple[Phrase, ...]
    needed: tuple[Phrase, ...]
    rung: Audit

    @property
    def last(self) -> int:
        return len(self.tools) - 1

    @property
    def passed(self) -> bool:
        return self.chosen == self.needed

    def thought(self) -> str:
        return f"{self.customer[1]} {self.customer[2]}"

    def action(self, k: int) -> str:
        return f"{self.tools[k]} {spoken(self.chosen[k])}"

    def end(self) -> str:
        """The last words of the visit."""
        steps = zip(self.tools, self.chosen, self.needed, strict=True)
        return audit([blame(*step, self.rung) for step in steps], passed=self.passed)


def act(v: Visit, k: int, phrase: Phrase, told: str = "") -> str:
    return f"Thought: {told}{v.thought()}. Action: {v.tools[k]} {spoken(phrase)}"


def future(tools: Sequence[str], *, passed: bool, said: str) -> str:
    """said: what was or may be wrong."""
    return f"Future: {''.join(f'{tool}, ' for tool in tools)}then {'pass' if passed else 'fail'}. {said}".strip()


def told(v: Visit, k: int) -> str:
    """The future from step k as the teacher saw it: facts."""
    said = v.end().removeprefix("Audit: ").partition(" ")[2]
    return future(v.tools[k:], passed=v.passed, said=said)


def phrase(slots: int, values: int, rng: random.Random) -> Phrase:
    return tuple(rng.choice(VALUES_OF[slot][:values]) for slot in SLOTS[:slots])


def other(value: str, slot: str, values: int, rng: random.Random) -> str:
    return rng.choice([one for one in VALUES_OF[slot][:values] if one != value])


def wrong_from(right: Phrase, values: int, rng: random.Random) -> Phrase:
    """A phrase whose first wrong slot is as often any one: right before it, random behind it."""
    j = rng.randrange(len(right))
    rest = [rng.choice(VALUES_OF[slot][:values]) for slot in SLOTS[j + 1 : len(right)]]
    return (*right[:j], other(right[j], SLOTS[j], values, rng), *rest)


def visit(rng: random.Random) -> Visit:
    """A visit at a random desk. What is needed is drawn from what was done, so that all that was done is random."""
    slots, values, n = by_share(rng, SIZES), by_share(rng, VALUES), by_share(rng, LENGTHS)
    skill = rng.choice((0.1, 0.5, 0.8, 1.0))
    chosen = tuple(phrase(slots, values, rng) for _ in range(n))
    right = tuple(one if rng.random() < skill else wrong_from(one, values, rng) for one in chosen)
    name = rng.choice([name for people in CUSTOMERS.values() for name in people])
    customer = (name, rng.choice(TIERS), rng.choice(REQUESTS), rng.choice(ITEMS))
    return Visit(customer, STEPS[:n], slots, values, chosen, right, by_share(rng, RUNGS))


def state(v: Visit, k: int) -> list[Message]:
    """The conversation before step k, as an episode holds it, thoughts and all."""
    found: list[Message] = [
        {"role": "system", "content": system_text(v.tools, v.slots, v.values)},
        {"role": "user", "content": opening(*v.customer)},
    ]
    for j in range(k):
        found.append({"role": "assistant", "content": act(v, j, v.chosen[j])})
        found.append({"role": "user", "content": "done."})
    return found


def policy(v: Visit, rng: random.Random, roles: Roles) -> Example:
    k = rng.randrange(len(v.tools))
    return Example("policy", tuple(roles.policy(state(v, k))), act(v, k, phrase(v.slots, v.values, rng)))


def successor(v: Visit, rng: random.Random, roles: Roles) -> Example:
    k = rng.randrange(len(v.tools))
    prompt = roles.prompt("successor", state(v, k), action=v.action(k), thought="")
    return Example("successor", tuple(prompt), may(told(v, k)))


def combine(v: Visit, rng: random.Random, roles: Roles) -> Example:
    """Mostly the end, where the truth enters."""
    k = rng.choice([*range(len(v.tools)), *[v.last] * 2])
    tool = v.tools[k]
    if k < v.last:
        later = may(told(v, k + 1))
        fields = {"observation": "done.", "reward": "none", "future": later}
        reply = later.replace("Future: ", f"Future: {tool}, ")
    elif rng.random() < 0.04:
        fields = {"observation": f"not understood. use {tool} now.", "reward": "0", "future": "none"}
        reply = "Future: not understood, then fail."
    else:
        fields = {"observation": f"done. {v.end()}", "reward": str(int(v.passed)), "future": "none"}
        reply = told(v, k)
    prompt = roles.prompt("combine", state(v, k), action=v.action(k), thought="", **fields)
    return Example("combine", tuple(prompt), reply)


@dataclass(frozen=True)
class Foreseen:
    """What a future says: whether it ends well, and what it blames, as possibilities."""

    passed: bool
    blames: tuple[str, ...] = ()


def judge(tool: str, futures: Sequence[Foreseen]) -> str:
    """The evaluator's right verdict on an action of this tool.

    Futures that pass or blame something tell; of these at least half blame this step: No, with the first reason. Else
    Yes. Where none tells anything (every one just fails): No without a reason. It takes a future at its word.
    """
    blames = [said for f in futures for said in f.blames if said.startswith(f"{tool} ")]
    telling = sum(f.passed or bool(f.blames) for f in futures)
    if blames and 2 * len(blames) >= telling:
        return f"Optimality: No. {blames[0]}"
    return "Optimality: Yes." if telling else "Optimality: No."


def evaluator(v: Visit, rng: random.Random, roles: Roles) -> Example:
    """A predicted future may blame any step, so what it says is not what came of the visit."""
    k, n = rng.randrange(len(v.tools)), rng.choice((1, 1, 1, 1, 2, 3, 4, 4))
    ends_well, silence = rng.choice((0.2, 0.5)), rng.choice((0, 0, 0.6))
    futures, texts = [], []
    for _ in range(n):
        passed, silent = rng.random() < ends_well, rng.random() < silence
        blames = [
            may(blame(tool, chosen, wrong_from(chosen, v.values, rng), v.rung))
            for tool, chosen in zip(v.tools, v.chosen, strict=True)
            if rng.random() < 0.5
        ]
        futures.append(Foreseen(passed, () if passed or silent else tuple(filter(None, blames))))
        texts.append(future(v.tools[k:], passed=passed, said=" ".join(futures[-1].blames)))
    prompt = roles.prompt("evaluator", state(v, k), action=v.action(k), thought="", futures="\n".join(texts))
    return Example("evaluator", tuple(prompt), judge(v.tools[k], futures))


def mended(before: Phrase, right: Phrase, kind: Audit) -> Phrase:
    """What an audit of this rung makes of a phrase: itself where nothing is wrong, or no slot is named.

    Told the slot alone, the right value stands for any other: it is drawn at random.
    """
    if before == right or kind in ("step", "verdict"):
        return before
    j = wrong_slots(before, right)[0]
    return right if kind == "answer" else put(before, j, right[j])


def put(phrase: Phrase, j: int, value: str) -> Phrase:
    """The phrase with this value in slot j."""
    return (*phrase[:j], value, *phrase[j + 1 :])


def refiner(v: Visit, rng: random.Random, roles: Roles) -> Example:
    k, kind = rng.randrange(len(v.tools)), by_share(rng, RUNGS)
    before = v.chosen[k]
    right = wrong_from(before, v.values, rng)
    new = mended(before, right, kind)
    while new == before:  # nothing tells the others apart
        new = phrase(v.slots, v.values, rng)
    reason = may(blame(v.tools[k], before, right, kind))
    evaluation = f"Optimality: No. {reason}".strip()
    prompt = roles.prompt("refiner", state(v, k), action=v.action(k), thought="", evaluation=evaluation)
    return Example("refiner", tuple(prompt), act(v, k, new, TOLD))


def corrector(v: Visit, rng: random.Random, roles: Roles) -> Example:
    """Facts that the teacher saw become possibilities, and what was told to the refiner goes."""
    k, draw = rng.randrange(len(v.tools)), rng.random()
    if draw < 0.6:
        text = told(v, k) if draw < 0.4 else may(told(v, k))
    else:
        text = act(v, k, phrase(v.slots, v.values, rng), TOLD if draw < 0.9 else "")
    return Example("corrector", tuple(roles.prompt("corrector", state(v, k), text=text)), may(text).replace(TOLD, ""))


def told_policy(v: Visit, rng: random.Random, roles: Roles) -> Example:
    """The words of an earlier attempt behind the policy's prompt, or in the refiner's with the action that was taken.

    Of what they leave open the policy says anything; the refiner keeps its action if another step alone is blamed.
    """
    k, shown = rng.randrange(len(v.tools)), rng.random() < 0.4
    before, right = v.chosen[k], v.needed[k]
    won = "\n".join(act(v, j, one) for j, one in enumerate(v.needed)) if v.passed or rng.random() < 0.3 else ""
    said = message(won, "" if v.passed or (won and rng.random() < 0.5) else f"done. {v.end()}")
    if won or (before != right and v.rung == "answer"):
        new = right
    elif shown:
        new = mended(before, right, v.rung)
        while new == before and (before != right or v.rung == "verdict"):
            new = phrase(v.slots, v.values, rng)
    else:
        new = phrase(v.slots, v.values, rng)
        if before != right and v.rung == "value":
            j = wrong_slots(before, right)[0]
            new = put(new, j, right[j])
    if shown:
        prompt = roles.prompt("refiner", state(v, k), action=v.action(k), thought="", evaluation=said)
    else:
        prompt = [*roles.policy(state(v, k)), {"role": "user", "content": said}]
    return Example("told", tuple(prompt), act(v, k, new))


MAKERS: dict[str, Callable[[Visit, random.Random, Roles], Example]] = {
    "policy": policy, "successor": successor, "combine": combine, "evaluator": evaluator, "refiner": refiner,
    "corrector": corrector, "told": told_policy,
}  # fmt: skip


def example(rng: random.Random, roles: Roles, role: str | None = None) -> Example:
    """One example, of the given role or of a random one by SHARE."""
    chosen = role or by_share(rng, SHARE)
    return MAKERS[chosen](visit(rng), rng, roles)


def right(row: Mapping[str, Any], said: str) -> dict[str, bool]:
    """Whether a reply to a row of the probe is right, by role and by the number of slots and of values.

    combine, corrector, evaluator: the one right answer. successor: it has the form. policy: the desk of this size can
    read it. refiner: that, and it does what the evaluation says and nothing else. told: that, and it says what it was told.
    """
    size = _SYSTEM.match(str(row["messages"][0]["content"]))
    assert size is not None
    slots, values, role = len(size[2].split()), int(size[3]), row["role"]
    good = said == row["reply"]
    if role == "successor":
        good = bool(_FUTURE.fullmatch(said))
    elif role in ("policy", "refiner", "told"):
        good = _does(row, said, slots, values)
    return {role: good, f"slots_{slots}": good, f"values_{values}": good}


def _does(row: Mapping[str, Any], said: str, slots: int, values: int) -> bool:
    """Whether an action is of the right step and size, and does as it was told."""
    wanted, last = str(row["reply"]), may(str(row["messages"][-1]["content"]))
    found, tool = _REPLY.fullmatch(said), wanted.partition("Action: ")[2].split()[0]
    if not found or found[0].split(". ")[0] != wanted.split(". ")[0]:
        return False
    shown = re.search(r"^Action: (.+)", last, re.MULTILINE)
    try:
        new = phrase_of(found[1], tool, slots, values)
        before = phrase_of(shown[1], tool, slots, values) if shown else None
    except Malformed:
        return False
    if row["role"] == "policy":
        return True
    if WIN in last:
        return said == wanted
    named = re.search(rf"\b{tool} (?:({'|'.join(SLOTS)}) )?may (?:need ([a-z ]+)|be wrong)\.", last)
    slot, needs = named.groups() if named else (None, None)
    if needs:
        return said == wanted if before or not slot else new[SLOTS.index(slot)] == needs
    if before and slot:
        return wrong_slots(before, new) == [SLOTS.index(slot)]
    if before and (named or row["role"] == "refiner" or " may " not in last):
        return before != new
    return said == wanted if before else True


def words(roles: Roles, n: int = 4000) -> list[str]:
    """The vocabulary: every word that n random examples hold, and every name the desk can speak of."""
    rng = random.Random("vocabulary")
    texts = [*REQUESTS, *TIERS, *ITEMS, *(value for values in VALUES_OF.values() for value in values)]
    texts += ["1 0 none now use not understood unreadable", roles.templates["value"], "2 3 4 5"]
    texts += [name for people in CUSTOMERS.values() for name in people]
    return vocabulary([example(rng, roles) for _ in range(n)], texts)
