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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from stages.envs.desk_rules import REQUESTS, TIERS
from stages.envs.service_desk import CUSTOMERS, ITEMS
from stages.envs.wide_words import (
    MOST_VALUES,
    SLOTS,
    STEPS,
    VALUES_OF,
    Audit,
    Phrase,
    audit,
    blame,
    described,
    lessons,
    may,
    n_wrong,
    opening,
    phrase_of,
    system_text,
    wrong_slots,
)
from stages.frame.contract import Config
from stages.frame.react import parse_react
from stages.frame.types import Ask, Env, Episode, Malformed, Message, Scenario, Step, UsageError

__all__ = ["CUSTOMERS", "ITEMS", "lessons", "n_wrong"]


class Options(Config):
    """The size of the action space, and the seed of the rule book."""

    rules_seed: int = Field(7, description="Seed of the hidden rule book. [ours]")
    slots: int = Field(3, ge=1, le=len(SLOTS), description="Slots of a phrase: s of v^s actions a step. [ours]")
    values: int = Field(3, ge=2, le=MOST_VALUES, description="Values of a slot: v of v^s actions a step. [ours]")
    steps: int = Field(2, ge=1, le=len(STEPS), description="Steps of a visit: give, lend, bill. [ours]")
    requests: int = Field(4, ge=1, le=len(REQUESTS), description="Number of requests. [ours]")
    tiers: int = Field(3, ge=1, le=len(TIERS), description="Number of customer tiers. [ours]")
    keyed: Literal["word", "pair"] = Field(
        "word",
        description="What the right value of a slot hangs on: the request or the tier, in turn from slot to slot, so that what is learned of one customer holds for others; or each pair of both. [ours]",
    )
    audit: Audit = Field(
        "value",
        description="What is told of a lost visit: of each wrong step the answer; its first wrong slot and the right value; that slot alone; the step alone; or the verdict. [ours]",
    )
    describe: bool = Field(
        False,
        description="List slots and values in the system message, for a model that was not trained on this desk's language. [ours]",
    )
    held_out_pairs: int = Field(
        0, ge=0, description="Pairs of values of give's first two slots that no customer needs. [ours]"
    )
    only_held_out: bool = Field(
        False, description="Customers need the held-out pairs alone: for evaluate.test_options. [ours]"
    )

    @model_validator(mode="after")
    def _pairs_can_be_held_out(self) -> Self:
        if self.only_held_out and not self.held_out_pairs:
            raise ValueError("only_held_out needs held_out_pairs above 0")
        most = 0 if self.slots < 2 else min(self.values, self.requests, self.tiers)
        if self.held_out_pairs and (self.held_out_pairs > most or most < 2):
            raise ValueError(
                f"held_out_pairs: wanted at most {most if most > 1 else 0}, the fewest values in use of the first two slots, found {self.held_out_pairs}"
            )
        return self


OPTIONS = Options


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


def tools_of(options: Options) -> tuple[str, ...]:
    return STEPS[: options.steps]


@lru_cache(maxsize=16)
def rule_book(options: Options) -> Mapping[tuple[str, str, str, str], str]:
    """(step, slot, request, tier) -> the right value. All values in use are right for as many keys, up to one."""
    rng = random.Random(f"wide_desk rules {options.rules_seed}")
    requests, tiers = REQUESTS[: options.requests], TIERS[: options.tiers]
    book: dict[tuple[str, str, str, str], str] = {}
    for k, tool in enumerate(tools_of(options)):
        for j, slot in enumerate(SLOTS[: options.slots]):
            by = options.keyed if options.keyed == "pair" else ("request", "tier")[(j + k) % 2]
            keys: Sequence[Any] = (
                [*product(requests, tiers)] if by == "pair" else requests if by == "request" else tiers
            )
            choices = rng.sample(VALUES_OF[slot][: options.values], options.values)
            answers = [choices[i % len(choices)] for i in range(len(keys))]
            rng.shuffle(answers)
            right = dict(zip(keys, answers, strict=True))
            for r, t in product(requests, tiers):
                book[tool, slot, r, t] = right[(r, t) if by == "pair" else r if by == "request" else t]
    return MappingProxyType(book)


def needed(options: Options, request: str, tier: str) -> list[Phrase]:
    """The right phrase of every step, for this customer."""
    book = rule_book(options)
    return [tuple(book[tool, slot, request, tier] for slot in SLOTS[: options.slots]) for tool in tools_of(options)]


@lru_cache(maxsize=16)
def held_out(options: Options) -> frozenset[tuple[str, str]]:
    """Values of give's first two slots that no training customer needs together.

    No value stands in two of the pairs, so that each one is still needed with other values.
    """
    phrases = [needed(options, *each)[0] for each in customers(options)]
    together = sorted({phrase[:2] for phrase in phrases}) if options.held_out_pairs else []
    random.Random(f"wide_desk held out {options.rules_seed}").shuffle(together)
    found = _matching(together, options.held_out_pairs)
    if len(found) < options.held_out_pairs or len(found) == len(together) > 0:
        raise UsageError(
            "task.options.held_out_pairs of wide_desk: this rule book has not so many pairs that leave a customer for training. Ask for fewer, or set another rules_seed."
        )
    return frozenset(found)


def _matching(pairs: Sequence[Phrase], n: int) -> list[tuple[str, str]]:
    """n of the pairs, no value in two of them; as many as there are by going back where one leads nowhere."""
    best: list[tuple[str, str]] = []
    for i, (one, other) in enumerate(pairs if n else ()):
        rest = [pair for pair in pairs[i + 1 :] if pair[0] != one and pair[1] != other]
        found = [(one, other), *_matching(rest, n - 1)]
        if len(found) > len(best):
            best = found
        if len(best) == n:
            break
    return best


def customers(options: Options) -> list[tuple[str, str]]:
    """(request, tier) of every kind of customer."""
    return list(product(REQUESTS[: options.requests], TIERS[: options.tiers]))


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
    opts, done = Options(**options), 0
    tools = tools_of(opts)
    for said in (str(m["content"]) for m in state if m["role"] == "assistant"):
        with suppress(Malformed):  # it was answered with a hint, and the step stayed
            phrase_of(parse_react(said)[1], tools[done], opts.slots, opts.values)
            done = min(done + 1, len(tools) - 1)
    phrase_of(parse_react(reply)[1], tools[done], opts.slots, opts.values)


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
