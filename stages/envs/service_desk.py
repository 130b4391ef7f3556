"""service_desk: a customer, a request, and house rules that only the closing audit reveals.

The agent serves one customer by tool calls, in a fixed order of steps: check, give, (log,) close. Each step has one
right option, fixed by a hidden rule book: (request) -> check, (request, tier) -> give, (tier) -> close. Nothing in the
prompt tells the rules. Reward 1 only if every step was right, at the end (or a share after each right step, `pay`); the
last observation is an audit that names each broken rule in words. Turn limit: one turn a step. Return: {0, 1}, or [0,
1]. Source: tau-bench in miniature [ours].

The default desk has 4 requests x 3 tiers and 4 + 12 + 3 = 19 rules; a random policy wins 1 in 24.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from stages.frame.contract import Config
from stages.frame.react import parse_react
from stages.frame.types import Ask, Env, Malformed, Message, Scenario, Step, UsageError

REQUESTS = ("refund", "exchange", "cancel", "upgrade", "delay", "invoice", "delivery", "warranty")
TIERS = ("gold", "silver", "bronze", "basic", "staff", "guest")
OPTIONS_OF = {
    "check": ("photo", "receipt", "passport"),
    "give": ("voucher", "cash", "credit", "discount"),
    "log": ("ledger", "ticket", "diary"),
    "close": ("phone", "email"),
}
ITEMS = ("lamp", "kettle", "chair", "radio", "camera", "clock", "desk", "scarf", "bike", "tent", "mirror", "guitar")
AUDITORS = ("Mia", "Omar", "Lena", "Raj", "Zoe", "Finn", "Ida", "Hugo")
# People of one split never appear in another.
CUSTOMERS = {
    "train": (
        "Ana",
        "Ben",
        "Cleo",
        "Dan",
        "Eva",
        "Gus",
        "Hana",
        "Ivan",
        "Jo",
        "Kim",
        "Leo",
        "Mara",
        "Nils",
        "Olga",
        "Paul",
        "Rita",
    ),
    "validation": ("Sam", "Tara", "Ugo", "Vera", "Will", "Xena"),
    "test": ("Yann", "Zita", "Abel", "Bea", "Carl", "Dora", "Emil", "Faye"),
}

Kind = Literal["request", "tier", "pair"]


class Options(Config):
    """The size of the desk, and the seed of its rule book."""

    rules_seed: int = Field(7, description="Seed of the hidden rule book. [ours]")
    requests: int = Field(4, ge=1, le=len(REQUESTS), description="Number of requests. [ours]")
    tiers: int = Field(3, ge=1, le=len(TIERS), description="Number of customer tiers. [ours]")
    give_by: Kind = Field("pair", description="What step give is keyed on; `request` makes an easy desk. [ours]")
    log: bool = Field(False, description="A fourth step, log, before the closing, keyed on the request. [ours]")
    pay: Literal["end", "step"] = Field(
        "end", description="1 at the end if every step was right, or 1 / steps at once for each right step. [ours]"
    )
    audit: Literal["rule", "verdict"] = Field(
        "rule",
        description="What the audit says of a lost visit: each broken rule with the right option, or fail. [ours]",
    )
    describe_tools: bool = Field(
        False,
        description="List tools and options in the system message, for a model that was not trained on this desk's language. [ours]",
    )
    held_out_pairs: int = Field(0, ge=0, description="(request, tier) pairs that only the split `pairs` has. [ours]")


@dataclass(frozen=True)
class Rule:
    """`key` needs `tool` `option`, e.g. ("gold refund", "give", "repair")."""

    key: str
    tool: str
    option: str

    def __str__(self) -> str:
        return f"{self.key} needs {self.tool} {self.option}."


@dataclass(frozen=True)
class Truth:
    """What a critic should have known of an action; never shown to the model."""

    optimal: bool  # the action is the right one for its step
    q: float  # exact Q*(s, a): 1 while nothing is broken yet and the rest can still be done right, else 0; paid by step, all that can still be earned
    cause: str  # the rule that the action breaks, "" if none
    broken: tuple[str, ...]  # every rule broken so far

    def named_in(self, future: str) -> bool:
        """The future tells the cause, as a fact ("needs") or as a possibility ("may need")."""
        return bool(self.cause) and (self.cause in future or self.cause.replace("needs", "may need") in future)


def steps_of(options: Options) -> tuple[tuple[str, Kind, tuple[str, ...]], ...]:
    """(tool, what its rule is keyed on, its options), in the order in which the desk wants them."""
    kinds: dict[str, Kind] = {"check": "request", "give": options.give_by, "log": "request", "close": "tier"}
    return tuple((tool, kind, OPTIONS_OF[tool]) for tool, kind in kinds.items() if tool != "log" or options.log)


def key_of(kind: Kind, request: str, tier: str) -> str:
    return {"request": request, "tier": tier, "pair": f"{tier} {request}"}[kind]


@lru_cache(maxsize=8)  # every episode has a desk of its own; a third of what a short one cost was its book
def rule_book(options: Options) -> Mapping[tuple[str, str], Rule]:
    """(tool, key) -> the hidden rule. Every option of a tool is right somewhere, as far as there are keys."""
    rng = random.Random(f"service_desk rules {options.rules_seed}")
    book = {}
    for tool, kind, choices in steps_of(options):
        keys = sorted({key_of(kind, r, t) for r, t in product(REQUESTS[: options.requests], TIERS[: options.tiers])})
        answers = [choices[i % len(choices)] for i in range(len(keys))]
        rng.shuffle(answers)
        book.update({(tool, key): Rule(key, tool, answer) for key, answer in zip(keys, answers, strict=True)})
    return MappingProxyType(book)


def system_text(tools: Sequence[str]) -> str:
    """What the agent is told: which tools there are, in the order in which the desk wants them."""
    return f"Service desk. {' '.join(tools)}."


@lru_cache(maxsize=8)
def tools_of(options: Options) -> tuple[Mapping[str, Any], ...]:
    """One function a step, with the options that it takes."""
    found = []
    for tool, _, choices in steps_of(options):
        option = {"type": "string", "enum": list(choices)}
        parameters = {"type": "object", "properties": {"option": option}, "required": ["option"]}
        found.append({"type": "function", "function": {"name": tool, "parameters": parameters}})
    return tuple(found)


def opening(name: str, tier: str, request: str, item: str) -> str:
    return f"{name}, {tier}, wants {request} for {item}."


def done(option: str) -> str:
    return f"{option} done."


def audit(auditor: str, broken: Sequence[Rule], *, names: bool = True) -> str:
    if not broken:
        return f"{auditor} audits: pass."
    return " ".join([f"{auditor} audits: fail.", *(str(rule) for rule in broken if names)])


OPTIONS = Options


class ServiceDesk:
    """One customer at the desk."""

    def __init__(self, options: Options) -> None:
        self._steps = steps_of(options)
        self.system = system_text([tool for tool, _, _ in self._steps])
        if options.describe_tools:
            self.system += "".join(f" {tool}: {' or '.join(choices)}." for tool, _, choices in self._steps)
        self._book, self._by_step, self._names = rule_book(options), options.pay == "step", options.audit == "rule"
        self._data: dict[str, Any] = {}
        self._chosen: list[str] = []
        self._over = True
        self.tools: Sequence[Mapping[str, Any]] = tools_of(options)

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        self._data, self._chosen, self._over = dict(scenario.data), [], False
        return ({"role": "user", "content": opening(*(self._data[k] for k in ("name", "tier", "request", "item")))},)

    def step(self, message: Message) -> Step:
        if self._over:
            raise RuntimeError("service_desk: step was called after the end of the episode; call reset first")
        _, action = parse_react(str(message.get("content") or ""))
        step = tool, _, choices = self._steps[len(self._chosen)]
        self._chosen.append(option_of(action, tool, choices))
        text = done(self._chosen[-1])
        right = not broken_rules([step], self._book, self._data, self._chosen[-1:])
        share = right / len(self._steps) if self._by_step else 0.0
        if len(self._chosen) < len(self._steps):
            return Step(({"role": "user", "content": text},), share)
        self._over = True
        broken = broken_rules(self._steps, self._book, self._data, self._chosen)
        text = f"{text} {audit(self._data['auditor'], broken, names=self._names)}"
        reward = share if self._by_step else float(not broken)
        return Step(
            ({"role": "user", "content": text},),
            reward,
            terminated=True,
            info={"broken": [str(rule) for rule in broken]},
        )


def told(action: str, audit: str) -> str:
    """An action's text as the audit's words want it: "give cash" becomes "give discount" where the audit says "... needs
    give discount."; the same text where it says nothing of that step. What a parser gets out of the words that a
    critic reads.
    """
    for tool, option in re.findall(r"needs (\w+) (\w+)\.", audit):
        action = re.sub(rf"\b{tool} ({'|'.join(OPTIONS_OF[tool])})\b", f"{tool} {option}", action)
    return action


def option_of(action: str, tool: str, choices: Sequence[str]) -> str:
    """The option that the action chooses at the step of `tool`. Raises Malformed."""
    words = action.split()
    if len(words) != 2 or words[0] != tool or words[1] not in choices:
        raise Malformed(f"not understood. use {tool} now.")
    return words[1]


def readable(options: Mapping[str, Any], state: Sequence[Message], reply: str) -> None:
    """Raises Malformed as the desk would: the action must be of the step that the actions in `state` have led to."""
    steps, done = steps_of(Options(**options)), 0
    for said in (str(m["content"]) for m in state if m["role"] == "assistant"):
        with suppress(Malformed):  # it was answered with a hint, and the step stayed
            option_of(parse_react(said)[1], steps[done][0], steps[done][2])
            done = min(done + 1, len(steps) - 1)
    tool, _, choices = steps[done]
    option_of(parse_react(reply)[1], tool, choices)


def broken_rules(
    steps: Sequence[tuple[str, Kind, tuple[str, ...]]],
    book: Mapping[tuple[str, str], Rule],
    data: dict[str, Any],
    chosen: Sequence[str],
) -> list[Rule]:
    """The rules that the options chosen so far have broken, in the order of the steps."""
    needed = [book[tool, key_of(kind, data["request"], data["tier"])] for tool, kind, _ in steps]
    return [rule for rule, option in zip(needed, chosen, strict=False) if rule.option != option]


def truth(options: Mapping[str, Any], scenario: Scenario, actions: Sequence[str]) -> Truth:
    """The truth about the last of `actions` (texts such as "check photo"), given those before it. Raises Malformed as
    the desk would.
    """
    opts = Options(**options)
    steps = steps_of(opts)
    chosen = [option_of(action, tool, choices) for action, (tool, _, choices) in zip(actions, steps, strict=False)]
    broken = broken_rules(steps, rule_book(opts), dict(scenario.data), chosen)
    tool = steps[len(actions) - 1][0]
    cause = next((str(rule) for rule in broken if rule.tool == tool), "")
    q = (len(steps) - len(actions) + (not cause)) / len(steps) if opts.pay == "step" else float(not broken)
    return Truth(not cause, q, cause, tuple(str(rule) for rule in broken))


def make(options: Mapping[str, Any], ask: Ask | None = None) -> Callable[[], Env]:
    opts = Options(**options)
    return lambda: ServiceDesk(opts)


def scenarios(options: Mapping[str, Any], split: str, n: int | None, seed: int) -> list[Scenario]:
    """n customers of a split, every (request, tier) equally often, in an order that depends on the seed alone; None =
    every customer once.
    """
    opts = Options(**options)
    if split not in (*CUSTOMERS, "pairs"):
        raise UsageError(f"there is no split {split!r} of service_desk. Splits: {', '.join(CUSTOMERS)}, pairs.")
    pairs = list(product(REQUESTS[: opts.requests], TIERS[: opts.tiers]))
    random.Random(f"held out {opts.rules_seed}").shuffle(pairs)
    wanted = pairs[: opts.held_out_pairs] if split == "pairs" else pairs[opts.held_out_pairs :]
    people = list(product(CUSTOMERS["test" if split == "pairs" else split], ITEMS))
    if n is None:
        return [_scenario(split, *person, *pair) for person in people for pair in wanted]
    rng = random.Random(f"service_desk {split} {seed}")
    found: list[Scenario] = []
    while wanted and len(found) < n:
        found += [_scenario(split, *rng.choice(people), *pair) for pair in rng.sample(wanted, len(wanted))]
    return found[:n]


def _scenario(split: str, name: str, item: str, request: str, tier: str) -> Scenario:
    content = opening(name, tier, request, item)
    digest = hashlib.sha256(content.encode()).hexdigest()
    data = {
        "name": name,
        "tier": tier,
        "request": request,
        "item": item,
        "auditor": AUDITORS[int(digest, 16) % len(AUDITORS)],
    }
    return Scenario("service_desk", split, digest[:12], data)
