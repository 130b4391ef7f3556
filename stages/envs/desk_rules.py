"""The size of a service desk, and the hidden rules of its customers. [ours]"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from stages.envs.desk_words import OPTIONS_OF, Audit, Rule
from stages.frame.contract import Config

REQUESTS = ("refund", "exchange", "cancel", "upgrade", "delay", "invoice", "delivery", "warranty")
TIERS = ("gold", "silver", "bronze", "basic", "staff", "guest")

Kind = Literal["request", "tier", "pair"]
DeskStep = tuple[str, Kind, tuple[str, ...]]
"""A tool, what its rules hang on, its options."""
KEYED_ON: dict[str, Kind] = {
    "check": "request", "give": "pair", "log": "request", "send": "tier", "tag": "request", "bill": "tier", "rate": "request", "close": "tier",
}  # fmt: skip
"""Tool -> what its rules hang on."""


class Options(Config):
    """The size of the desk, and the seed of its rule book."""

    rules_seed: int = Field(7, description="Seed of the hidden rule book. [ours]")
    requests: int = Field(4, ge=1, le=len(REQUESTS), description="Number of requests. [ours]")
    tiers: int = Field(3, ge=1, le=len(TIERS), description="Number of customer tiers. [ours]")
    give_by: Kind = Field("pair", description="What step give is keyed on; `request` makes an easy desk. [ours]")
    steps: int = Field(
        3,
        ge=1,
        le=len(OPTIONS_OF),
        description="Steps of a visit: the first ones of check, give, log, send, tag, bill and rate, and close. [ours]",
    )
    pay: Literal["end", "step"] = Field(
        "end", description="1 at the end if every step was right, or 1 / steps at once for each right step. [ours]"
    )
    audit: Audit = Field(
        "rule",
        description="What is told of a lost visit: each broken rule with the right option; the fault, the option that was wrong; the count of wrong steps; "
        "the verdict; or, in place of an audit that names anything, the consequence of each wrong step at once. [ours]",
    )
    audited: float = Field(
        1.0, ge=0, le=1, description="Share of the visits that are audited; the others end with a farewell. [ours]"
    )
    audit_noise: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the lost visits whose audit blames a step that was right, in place of the wrong ones. [ours]",
    )
    accept_noise: float = Field(
        0.0, ge=0, le=1, description="Share of the visits with a wrong step that are taken as right. [ours]"
    )
    factored: bool = Field(
        False,
        description="The option of step give is the sum of a number of the request and one of the tier, so that a pair can be told from others. [ours]",
    )
    describe_tools: bool = Field(
        False,
        description="List tools and options in the system message, for a model that was not trained on this desk's language. [ours]",
    )
    held_out_pairs: int = Field(0, ge=0, description="(request, tier) pairs that no customer has. [ours]")
    only_held_out: bool = Field(
        False, description="Customers have the held-out pairs alone: for evaluate.test_options. [ours]"
    )

    @model_validator(mode="after")
    def _some_pairs_are_left(self) -> Self:
        most = self.requests * self.tiers - 1
        if self.held_out_pairs > most:
            raise ValueError(
                f"held_out_pairs: wanted at most {most}, so that a customer is left, found {self.held_out_pairs}"
            )
        if self.only_held_out and not self.held_out_pairs:
            raise ValueError("only_held_out needs held_out_pairs above 0")
        return self


def steps_of(options: Options) -> tuple[DeskStep, ...]:
    """(tool, what its rule is keyed on, its options), in the order in which the desk wants them."""
    *first, last = KEYED_ON
    kinds = {**KEYED_ON, "give": options.give_by}
    return tuple((tool, kinds[tool], OPTIONS_OF[tool]) for tool in [*first[: options.steps - 1], last])


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
        if kind == "pair" and options.factored:
            answers = sums(keys, choices, rng)
        book.update({(tool, key): Rule(key, tool, answer) for key, answer in zip(keys, answers, strict=True)})
    return MappingProxyType(book)


def sums(pairs: Sequence[str], choices: Sequence[str], rng: random.Random) -> list[str]:
    """An option for each "tier request": the sum of a number of each of the two words, modulo the number of options."""
    number: dict[str, int] = {}
    for i in (0, 1):
        words = sorted({pair.split()[i] for pair in pairs})
        rng.shuffle(words)
        number |= {word: n for n, word in enumerate(words)}
    return [choices[sum(number[word] for word in pair.split()) % len(choices)] for pair in pairs]


def broken_rules(
    steps: Sequence[DeskStep], book: Mapping[tuple[str, str], Rule], data: dict[str, Any], chosen: Sequence[str]
) -> list[Rule]:
    """The rules that the options chosen so far have broken, in the order of the steps."""
    needed = needed_rules(steps, book, data)
    return [rule for rule, option in zip(needed, chosen, strict=False) if rule.option != option]


def needed_rules(steps: Sequence[DeskStep], book: Mapping[tuple[str, str], Rule], data: dict[str, Any]) -> list[Rule]:
    """The rules of this customer, in the order of the steps."""
    return [book[tool, key_of(kind, data["request"], data["tier"])] for tool, kind, _ in steps]
