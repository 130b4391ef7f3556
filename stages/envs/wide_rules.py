"""The hidden rule book of the wide desk: its size, the right phrase of every customer, and pairs that are held out. [ours]"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from stages.envs.desk_rules import REQUESTS, TIERS
from stages.envs.wide_words import MOST_VALUES, SLOTS, STEPS, VALUES_OF, Audit, Phrase
from stages.frame.contract import Config
from stages.frame.types import UsageError


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
