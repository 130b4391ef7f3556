"""Draw the transitions to back up, each with those that follow it in its episode. targets and q_critic use it.

Source: arXiv 2512.04601, "Replay": prioritised by the critic's loss. Shares, weights and several real steps are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import numpy as np
from pydantic import Field, model_validator

from stages.frame.contract import Config, Context, Reader
from stages.frame.types import MissingInput
from stages.learn.priorities import importance_weights, priorities, sample_without_replacement
from stages.play.drawing import Draw, by_episode
from stages.play.transitions import Candidate, Drawable, Transition, candidates, in_full, known_losses


class DrawConfig(Config):
    """Which transitions are backed up."""

    transitions: int = Field(256, ge=1, description="Targets made an iteration. [ours]")
    replay_size: int = Field(20000, ge=1, description="Newest transitions that can be drawn. [ours]")
    draw: Draw = "turn"
    """Draw transitions one by one, or whole episodes until there are as many. The turns of an episode share a prefix, in generation and in training. [ours]"""
    alpha: float = Field(0.6, ge=0)
    """Priority p ~ (loss + eps)^alpha. [paper: prioritised by the critic's loss; exponent ours]"""
    eps: float = Field(0.01, gt=0, description="So that no transition is ever given up. [ours]")
    beta: float = Field(0.0, ge=0, le=1)
    """Importance weights (N p)^-beta undo the preference; 0 = none. [ours]"""
    terminal_frac: float = Field(0.0, ge=0, le=1)
    """Share of terminal transitions, by priority within each kind; 0 = as they are drawn. [ours]"""
    steps: int = Field(1, ge=1)
    """Real steps that are merged before a future is sampled. A large number goes to the episode's end, off-policy. [ours; paper: 1]"""

    @model_validator(mode="after")
    def _kinds_are_of_turns(self) -> Self:
        if self.draw == "episode" and self.terminal_frac:
            raise ValueError('terminal_frac draws terminal turns apart from others; set it to 0 with draw = "episode"')
        return self


D = TypeVar("D", bound=Drawable)


@dataclass(frozen=True)
class Drawn(Generic[D]):
    """What is to be backed up: a transition and those that follow it, before they are read in full."""

    chain: tuple[D, ...]
    weight: float

    @property
    def t(self) -> D:
        return self.chain[0]


def usable(pool: Sequence[D]) -> list[D]:
    """Transitions that a critic can learn from: every one but a reply that was unreadable and then mended."""
    return [t for t in pool if t.has_target]


def draw(
    pool: Sequence[D], losses: dict[tuple[str, int], float], config: DrawConfig, rng: np.random.Generator
) -> list[Drawn[D]]:
    """A prioritised sample without replacement. Transitions: `terminal_frac` draws terminal and other ones apart.
    Episodes: the weight is the sum of their transitions' weights.
    """
    if config.draw == "episode":
        return draw_episodes(pool, losses, config, rng)
    terminal = [i for i, t in enumerate(pool) if t.terminal]
    other = [i for i, t in enumerate(pool) if not t.terminal]
    total = min(config.transitions, len(pool))
    if not config.terminal_frac or not other:
        parts = [(list(range(len(pool))), total)]
    else:
        n_terminal = min(round(total * config.terminal_frac), len(terminal))
        n_other = min(total - n_terminal, len(other))
        parts = [(terminal, n_terminal), (other, n_other)]
    chosen, by_key = [], {t.key: t for t in pool}
    for members, n in parts:
        if n:
            p = priorities(np.array([losses.get(pool[i].key, math.nan) for i in members]), config.alpha, config.eps)
            picked = sample_without_replacement(rng, p, n)
            weights = importance_weights(p, picked, config.beta)
            chosen += [
                Drawn(following(pool[members[j]], by_key, config.steps), float(w))
                for j, w in zip(picked, weights, strict=True)
            ]
    return chosen


def draw_episodes(
    pool: Sequence[D], losses: dict[tuple[str, int], float], config: DrawConfig, rng: np.random.Generator
) -> list[Drawn[D]]:
    p = priorities(np.array([losses.get(t.key, math.nan) for t in pool]), config.alpha, config.eps)
    chosen, p_E, of = by_episode(pool, p, config.transitions, rng)
    weights = importance_weights(np.array(p_E), np.array(of), config.beta)
    by_key = {t.key: t for t in pool}
    every = [Drawn(following(pool[i], by_key, config.steps), float(w)) for i, w in zip(chosen, weights, strict=True)]
    return every[: config.transitions]  # of the last episode the first turns


def following(t: D, by_key: Mapping[tuple[str, int], D], steps: int) -> tuple[D, ...]:
    """The transition and those behind it, at most `steps`; fewer at the end or before an unreadable reply."""
    chain = [t]
    while len(chain) < steps and not chain[-1].terminal and (after := by_key.get((t.key[0], chain[-1].key[1] + 1))):
        chain.append(after)
    return tuple(chain)


def read_in_full(replay: Reader, drawn: Sequence[Drawn[Candidate]]) -> list[tuple[tuple[Transition, ...], float]]:
    """The drawn chains with their texts, and their weights."""
    read = iter(in_full(replay, [t for one in drawn for t in one.chain]))
    return [(tuple(next(read) for _ in one.chain), one.weight) for one in drawn]


def drawn_chains(context: Context, stage: str, critic: str) -> tuple[list[tuple[tuple[Transition, ...], float]], int]:
    """The stage's draw by the losses of `critic`, and of how many transitions. Raises MissingInput where there is none."""
    pool = pool_of(context)
    if not pool:
        n = len(context.inputs["collect"])
        raise MissingInput(f"{stage} needs transitions from collect, found none in its {n} runs; collect more episodes")
    return drawn_from(context, pool, critic), len(pool)


def pool_of(context: Context) -> list[Candidate]:
    """The transitions that the stage may draw."""
    return usable(candidates(context.replay, context.inputs["collect"], newest=context.config.replay_size))


def drawn_from(context: Context, pool: Sequence[Candidate], critic: str) -> list[tuple[tuple[Transition, ...], float]]:
    """The draw by the losses of `critic`, which the stage's seed fixes."""
    losses = known_losses(context.replay, context.inputs.get(critic, ()))
    return read_in_full(context.replay, draw(pool, losses, context.config, np.random.default_rng(context.seed)))
