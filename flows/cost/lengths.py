"""Assumptions about quantities that only a run can tell: turns of an episode, tokens of prompts and replies, the share
of Yes.

    turnwise plan demo --assume turns=3 --assume yes=0.7 --assume train_trees=0.3

Replies are assumed to be half as long as the config allows; the rest depends on the task. Means of a first iteration
are better. [ours]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from flows.cost.rates import GPU
from stages.frame.types import UsageError

MOST_TOKENS = 1e7  # of a text: more than any model reads
LEAST_RATE, MOST_RATE = 1e-9, 1e5

SHARES = ("yes", "win", "asked")
"""Lengths that are none, but shares of 1."""


@dataclass(frozen=True)
class Lengths:
    """Means: tokens, unless said otherwise."""

    turns: float  # replies of an episode
    system: float  # system message: task, tools, and what the role adds
    first: float  # the first observation
    observation: float
    action: float  # a reply of the policy, as it is trained on, without a reasoning model's <think> part
    act: float  # the action in it, which the critic's roles read
    thought: float  # <think> part before a reply of any role
    future: float  # a future, critique or correction
    template: float  # words of a role's prompt around its fields
    critic: float  # self_ac's critic prompt
    general: float  # a row of general instruction data, of which half is the reply
    yes: float  # share of actions that the critic keeps
    win: float  # share of episodes won, over the whole run
    asked: float  # share of replies that somebody inside the environment answers
    told: float  # that answer
    cache_bytes: float  # bytes of a number in the KV cache: 2 = bfloat16, 1 = fp8 (vLLM's kv_cache_dtype)

    def state(self, k: float) -> float:
        """The policy's prompt at reply k. Thoughts of earlier replies are not in it: chat templates of reasoning models
        leave them out.
        """
        return self.system + self.first + k * (self.action + self.observation)

    def history(self, k: float) -> float:
        """The same without the system message as text for a role: actions and observations."""
        return self.first + k * (self.act + self.observation)

    @property
    def whole(self) -> int:
        """Turns of an episode as a whole number."""
        return max(1, round(self.turns))

    @property
    def middle(self) -> float:
        """The mean k of a turn."""
        return (self.turns - 1) / 2


# (turns, system, first, observation, act as a share of action, asked, told) where the config says nothing of them.
# tau_bench: turns by the published runs of another model (mean 12.3), system by four characters a token; the others by
# the prompts' length.
_BY_TASK = {
    "service_desk": (3, 20, 10, 8, 0.4, 0.0, 0),
    "wide_desk": (2, 14, 9, 6, 0.6, 0.0, 0),
    "twenty_questions": (15, 260, 20, 8, 0.3, 1.0, 3),
    "sums": (1, 8, 9, 6, 0.8, 0.0, 0),
    "math": (1, 80, 120, 4, 0.9, 0.0, 0),
    "game24": (6, 150, 60, 60, 0.3, 0.0, 0),
    "wiki_search": (6, 250, 60, 150, 0.3, 0.0, 0),
    "tau_bench": (13, 5000, 60, 180, 0.5, 0.45, 45),
}


def assumed(run: Any, changes: Sequence[str] = ()) -> Lengths:
    """Means for a config: replies half as long as their limit, the rest by task. `changes` are name=number.

    Raises UsageError for an unknown name, and for a number that no run can have.
    """
    turns, system, first, observation, act, asked, told = _BY_TASK.get(run.task.env, (6, 300, 60, 100, 0.4, 0.5, 30))
    roles = run.roles
    action = roles.max_action_tokens / 2
    found = Lengths(
        turns=min(turns, run.task.max_turns), system=system, first=first, observation=observation, action=action, act=act * action,
        thought=roles.max_thought_tokens / 2, future=roles.max_future_tokens / 2, template=20 if run.task.env in ("service_desk", "wide_desk", "sums") else 250, critic=16, general=400,
        yes=0.5, win=0.3, asked=asked if run.task.oracle != "rule" else 0.0, told=told,
        cache_bytes=2.0 if run.model.dtype == "bfloat16" else 4.0,
    )  # fmt: skip
    limits = dict.fromkeys([one.name for one in fields(Lengths)], (0.0, MOST_TOKENS))
    limits |= {
        "turns": (1.0, float(run.task.max_turns)),
        "cache_bytes": (0.5, 8.0),
        **dict.fromkeys(SHARES, (0.0, 1.0)),
    }
    for item in changes:
        name = item.partition("=")[0]
        if name not in limits:
            raise UsageError(f"--assume {item}: wanted NAME=NUMBER; names: {', '.join((*limits, *GPU))}.")
        low, high = limits[name]
        whose = " (task.max_turns)" if name == "turns" else ""
        found = replace(found, **{name: number(item, low, high, whose)})
    return found


def number(item: str, low: float, high: float, whose: str = "") -> float:
    """The number of NAME=NUMBER. whose: the key behind a limit. Raises UsageError outside the limits."""
    name, _, text = item.partition("=")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise UsageError(f"--assume {item}: wanted NAME=NUMBER, of {name} a number from {low:g} to {high:g}{whose}.")
    return value


def given_rates(changes: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """The changes that are of rates (rates.py), and the others. Raises UsageError for a rate that none can be."""
    mine = [item for item in changes if item.partition("=")[0] in GPU]
    given = {
        name: number(item, LEAST_RATE, 1.0 if "of the" in GPU[name].what else MOST_RATE)
        for item in mine
        if (name := item.partition("=")[0])
    }
    return given, [item for item in changes if item not in mine]
