"""service_desk: a customer, a request, and house rules that nothing but what comes of a visit reveals.

The agent serves one customer by tool calls, in a fixed order of steps: check, give, close, and up to five more before
the closing. Each step has one right option, fixed by a hidden rule book: (request) -> check, (request, tier) -> give,
(tier) -> close. Nothing in the prompt tells the rules. Reward 1 only if every step was right, at the end (or a share
after each right step, `pay`). How much the words tell is a ladder (`audit`, stages/envs/desk_words.py), crossed with
noise and with how many visits are audited at all. Turn limit: one turn a step. Return: {0, 1}, or [0, 1]. Source:
tau-bench in miniature [ours].

The default desk has 4 requests x 3 tiers and 4 + 12 + 3 = 19 rules; a random policy wins 1 in 24.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from stages.envs.desk_rules import (
    REQUESTS,
    TIERS,
    Kind,
    Options,
    broken_rules,
    key_of,
    needed_rules,
    rule_book,
    steps_of,
)
from stages.envs.desk_words import FAREWELL, OPTIONS_OF, Rule, audit, done, lack, lessons, n_wrong, opening, system_text
from stages.frame.react import parse_react
from stages.frame.types import Ask, Env, Malformed, Message, Scenario, Step, UsageError

__all__ = [
    "FAREWELL", "OPTIONS_OF", "REQUESTS", "TIERS", "Kind", "Options", "Rule", "audit", "broken_rules", "done", "key_of", "lack", "lessons",
    "n_wrong", "needed_rules", "opening", "rule_book", "steps_of", "system_text",
]  # fmt: skip
"""What the desk's rules and words lend to those who speak of it."""

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


@lru_cache(maxsize=8)
def tools_of(options: Options) -> tuple[Mapping[str, Any], ...]:
    """One function a step, with the options that it takes."""
    found = []
    for tool, _, choices in steps_of(options):
        option = {"type": "string", "enum": list(choices)}
        parameters = {"type": "object", "properties": {"option": option}, "required": ["option"]}
        found.append({"type": "function", "function": {"name": tool, "parameters": parameters}})
    return tuple(found)


OPTIONS = Options


class ServiceDesk:
    """One customer at the desk."""

    def __init__(self, options: Options) -> None:
        self._steps = steps_of(options)
        self.system = system_text([tool for tool, _, _ in self._steps])
        if options.describe_tools:
            self.system += "".join(f" {tool}: {' or '.join(choices)}." for tool, _, choices in self._steps)
        self._options, self._book = options, rule_book(options)
        self._data: dict[str, Any] = {}
        self._drawn = ""
        self._chosen: list[str] = []
        self._over = True
        self.tools: Sequence[Mapping[str, Any]] = tools_of(options)

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        self._data, self._chosen, self._over = dict(scenario.data), [], False
        self._drawn = f"service_desk {scenario.id} {scenario.seed}"
        return ({"role": "user", "content": opening(*(self._data[k] for k in ("name", "tier", "request", "item")))},)

    def step(self, message: Message) -> Step:
        if self._over:
            raise RuntimeError("service_desk: step was called after the end of the episode; call reset first")
        _, action = parse_react(str(message.get("content") or ""))
        step = tool, _, choices = self._steps[len(self._chosen)]
        self._chosen.append(option_of(action, tool, choices))
        text, by_step = done(self._chosen[-1]), self._options.pay == "step"
        broken = broken_rules([step], self._book, self._data, self._chosen[-1:])
        share = (not broken) / len(self._steps) if by_step else 0.0
        if broken and self._options.audit == "consequence":
            text = f"{text} {lack(self._data['name'], broken[0])}"
        if len(self._chosen) < len(self._steps):
            return Step(({"role": "user", "content": text},), share)
        self._over = True
        said, accepted, wrong = self._ending()
        return Step(
            ({"role": "user", "content": f"{text} {said}"},),
            share if by_step else float(accepted),
            terminated=True,
            info={"broken": [str(rule) for rule in wrong]},
        )

    def _ending(self) -> tuple[str, bool, list[Rule]]:
        """What is said at the end, whether the visit is taken as right, and the rules that were really broken.

        What is drawn hangs on the episode and on what was done in it alone.
        """
        options, rng = self._options, random.Random(f"{self._drawn} {' '.join(self._chosen)}")
        lucky, misled, audited = (rng.random() for _ in range(3))
        broken = broken_rules(self._steps, self._book, self._data, self._chosen)
        blamed = [(rule, self._taken(rule)) for rule in broken]
        accepted = not broken or lucky < options.accept_noise
        if accepted:
            blamed = []
        elif misled < options.audit_noise and (spared := self._spared(broken)):
            blamed = [_false(rng.choice(spared), rng)]
        said = audit(self._data["auditor"], blamed, options.audit) if audited < options.audited else FAREWELL
        return said, accepted, broken

    def _taken(self, rule: Rule) -> str:
        return self._chosen[[tool for tool, _, _ in self._steps].index(rule.tool)]

    def _spared(self, broken: Sequence[Rule]) -> list[Rule]:
        """The rules of this customer that were kept."""
        needed = needed_rules(self._steps, self._book, self._data)
        return [rule for rule in needed if rule not in broken]


def _false(rule: Rule, rng: random.Random) -> tuple[Rule, str]:
    """A blame of a step that was right: another option is said to be needed."""
    other = rng.choice([option for option in OPTIONS_OF[rule.tool] if option != rule.option])
    return Rule(rule.key, rule.tool, other), rule.option


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
    if split not in CUSTOMERS:
        raise UsageError(f"there is no split {split!r} of service_desk. Splits: {', '.join(CUSTOMERS)}.")
    pairs = list(product(REQUESTS[: opts.requests], TIERS[: opts.tiers]))
    random.Random(f"held out {opts.rules_seed}").shuffle(pairs)
    wanted = pairs[: opts.held_out_pairs] if opts.only_held_out else pairs[opts.held_out_pairs :]
    people = list(product(CUSTOMERS[split], ITEMS))
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
