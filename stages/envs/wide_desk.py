"""wide_desk: a desk whose actions are phrases, so that a step has 3 to 3,125 of them.

The agent serves one customer in `steps` steps. An action is a phrase with one of v values in each of s slots ("give the
cash by mail in march"): v^s actions. A hidden rule book fixes the right value of every slot, by the request or by the
tier in turn, or by both (`keyed`). Nothing in the prompt tells the rules. Reward 1 at the end if every slot of every step was
right, else 0. How much the closing audit tells is a ladder (`audit`, stages/envs/wide_words.py). Turn limit: one turn a
step. Return: {0, 1}. Source: the large action spaces of arXiv 2512.04601, sections 1 and 4.2, in miniature. [ours]

A random policy wins 1 visit in v^(s steps): with the defaults 1 in 729. A bare "fail" takes away one action of v^s; a
reason that names a slot leaves its v values.

With `held_out_pairs` some pairs of values of the first two slots are needed by no training customer. Each of the two is
needed with other values (with `keyed` "word"). Customers who need such a pair are all that `only_held_out` leaves.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from stages.envs.service_desk import CUSTOMERS, ITEMS
from stages.envs.wide_rules import Options, customers, held_out, needed, tools_of
from stages.envs.wide_words import (
    SLOTS,
    Phrase,
    audit,
    blame,
    described,
    lessons,
    may,
    n_wrong,
    opening,
    phrase_of,
    spoken,
    system_text,
    wrong_slots,
)
from stages.frame.react import parse_react
from stages.frame.types import Ask, Env, Episode, Malformed, Message, Scenario, Step, UsageError

__all__ = ["CUSTOMERS", "ITEMS", "lessons", "n_wrong"]

OPTIONS = Options
_CUSTOMER = re.compile(r"\w+, (?P<tier>\w+), wants (?P<request>\w+) for")
_ACTION = re.compile(r"^Action: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Truth:
    """What a critic should have known of an action; never shown to the model."""

    optimal: bool  # every slot of the action is right
    q: float  # exact Q*(s, a): 1 while nothing is wrong yet and the rest can still be done right, else 0
    cause: str  # what the audit would name of the action, "" if nothing
    broken: tuple[str, ...]  # every wrong slot so far, with its right value

    def named_in(self, future: str) -> bool:
        """The future tells the cause, as a fact or as a possibility."""
        return bool(self.cause) and (self.cause in future or may(self.cause) in future)


class WideDesk:
    """One customer at the desk."""

    def __init__(self, options: Options) -> None:
        self._options, self._tools = options, tools_of(options)
        size = (self._tools, options.slots, options.values)
        self.system = " ".join([system_text(*size), *([described(*size)] if options.describe else [])])
        self.tools: Sequence[Mapping[str, Any]] = ()
        self._needed: list[Phrase] = []
        self._chosen: list[Phrase] = []
        self._over = True

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        data = scenario.data
        self._needed, self._chosen, self._over = needed(self._options, data["request"], data["tier"]), [], False
        return ({"role": "user", "content": opening(*(data[key] for key in ("name", "tier", "request", "item")))},)

    def step(self, message: Message) -> Step:
        if self._over:
            raise RuntimeError("wide_desk: step was called after the end of the episode; call reset first")
        _, action = parse_react(str(message.get("content") or ""))
        tool = self._tools[len(self._chosen)]
        self._chosen.append(phrase_of(action, tool, self._options.slots, self._options.values))
        if len(self._chosen) < len(self._tools):
            return Step(({"role": "user", "content": "done."},), 0.0)
        self._over = True
        steps = list(zip(self._tools, self._chosen, self._needed, strict=True))
        said = audit([blame(*step, self._options.audit) for step in steps], passed=self._chosen == self._needed)
        return Step(
            ({"role": "user", "content": f"done. {said}"},),
            float(self._chosen == self._needed),
            terminated=True,
            info={"broken": [one for step in steps for one in named(*step)]},
        )


def named(tool: str, chosen: Phrase, right: Phrase) -> list[str]:
    """Every wrong slot of a step with its right value."""
    return [f"{tool} {SLOTS[j]} needs {right[j]}." for j in wrong_slots(chosen, right)]


def readable(options: Mapping[str, Any], state: Sequence[Message], reply: str) -> None:
    """Raises Malformed as the desk would: the action must be of the step that the actions in `state` have led to."""
    opts = Options(**options)
    tools = tools_of(opts)
    tool = tools[min(len(_done(state, opts)), len(tools) - 1)]
    phrase_of(parse_react(reply)[1], tool, opts.slots, opts.values)


def _done(state: Sequence[Message], options: Options) -> list[Phrase]:
    """The phrases of the steps that are done. A reply that the desk could not read got a hint, and the step stayed."""
    tools, found = tools_of(options), list[Phrase]()
    for said in (str(m["content"]) for m in state if m["role"] == "assistant"):
        if len(found) < len(tools) and (phrase := _read(said, tools[len(found)], options)):
            found.append(phrase)
    return found


def truth(options: Mapping[str, Any], scenario: Scenario, actions: Sequence[str]) -> Truth:
    """The truth about the last of `actions` (texts such as "give the cash by mail"), given those before it. Raises
    Malformed as the desk would.
    """
    opts = Options(**options)
    tools, right = tools_of(opts), needed(opts, scenario.data["request"], scenario.data["tier"])
    chosen = [phrase_of(a, tool, opts.slots, opts.values) for a, tool in zip(actions, tools, strict=False)]
    last = (tools[len(chosen) - 1], chosen[-1], right[len(chosen) - 1])
    broken = [one for step in zip(tools, chosen, right, strict=False) for one in named(*step)]
    return Truth(chosen[-1] == last[2], float(not broken), blame(*last, opts.audit), tuple(broken))


def describe(options: Mapping[str, Any], episodes: Sequence[Episode]) -> dict[str, float]:
    """slots_right: the share of slots that were right, of all that were filled; steps_right: the share of steps with no
    wrong slot. They tell what is learned where v^s is so large that nothing is won yet.
    """
    opts = Options(**options)
    tools, slots, steps = tools_of(opts), [], []
    for episode in episodes:
        right = needed(opts, episode.scenario.data["request"], episode.scenario.data["tier"])
        acts = [turn.action for turn in episode.turns if not turn.malformed]
        for action, tool, phrase in zip(acts, tools, right, strict=False):
            wrong = wrong_slots(phrase_of(action, tool, opts.slots, opts.values), phrase)
            slots += [j not in wrong for j in range(opts.slots)]
            steps.append(not wrong)
    return {"slots_right": sum(slots) / len(slots), "steps_right": sum(steps) / len(steps)} if steps else {}


def perfect(options: Mapping[str, Any], role: str, messages: Sequence[Message]) -> str:
    """What a perfect successor, evaluator or refiner says to this prompt of its role (`roles.oracle`).

    The successor foresees right steps behind the action. It and the evaluator name what the audit of this rung names.
    The refiner says the right phrase, whatever it is told.
    """
    opts = Options(**options)
    tools = tools_of(opts)
    who, taken = _CUSTOMER.match(str(messages[1]["content"])), _ACTION.search(str(messages[-1]["content"]))
    assert who is not None
    right, done = needed(opts, who["request"], who["tier"]), _done(messages[:-1], opts)
    tool, wanted = tools[len(done)], right[len(done)]
    if role == "refiner":
        return f"Thought: {who['tier']} {who['request']}. Action: {tool} {spoken(wanted)}"
    chosen = _read(f"Action: {taken[1]}", tool, opts) if taken else None
    if role == "evaluator":
        reason = may(blame(tool, chosen, wanted, opts.audit)) if chosen else ""
        return "Optimality: Yes." if chosen == wanted else f"Optimality: No. {reason}".strip()
    if not chosen:
        return "Future: not understood, then fail."
    steps = [*zip(tools, [*done, chosen], right, strict=False)]
    reasons = filter(None, (may(blame(*step, opts.audit)) for step in steps))
    passed = all(phrase == need for _, phrase, need in steps)
    names = "".join(f"{name}, " for name in tools[len(done) :])
    return " ".join([f"Future: {names}then {'pass' if passed else 'fail'}.", *reasons])


def _read(reply: str, tool: str, options: Options) -> Phrase | None:
    """The phrase of a reply; None where the desk cannot read it."""
    with suppress(Malformed):
        return phrase_of(parse_react(reply)[1], tool, options.slots, options.values)
    return None


def make(options: Mapping[str, Any], ask: Ask | None = None) -> Callable[[], Env]:
    opts = Options(**options)
    return lambda: WideDesk(opts)


def scenarios(options: Mapping[str, Any], split: str, n: int | None, seed: int) -> list[Scenario]:
    """n customers of a split, every (request, tier) equally often, in an order that depends on the seed alone; None =
    every customer once. People of one split never appear in another.
    """
    opts = Options(**options)
    if split not in CUSTOMERS:
        raise UsageError(f"there is no split {split!r} of wide_desk. Splits: {', '.join(CUSTOMERS)}.")
    apart = held_out(opts)
    wanted = [each for each in customers(opts) if (needed(opts, *each)[0][:2] in apart) == opts.only_held_out]
    people = list(product(CUSTOMERS[split], ITEMS))
    if n is None:
        return [_scenario(split, *person, *each) for person in people for each in wanted]
    rng = random.Random(f"wide_desk {split} {seed}")
    found: list[Scenario] = []
    while len(found) < n:
        found += [_scenario(split, *rng.choice(people), *each) for each in rng.sample(wanted, len(wanted))]
    return found[:n]


def _scenario(split: str, name: str, item: str, request: str, tier: str) -> Scenario:
    digest = hashlib.sha256(opening(name, tier, request, item).encode()).hexdigest()
    data = {"name": name, "tier": tier, "request": request, "item": item}
    return Scenario("wide_desk", split, digest[:12], data)
