"""The outcome gate: keep a rewritten action only if rolling it out is no worse than rolling out the action it replaces.

The paper has no acceptance test for a_r. With a noisy critic, refinement without a test stalls far from the optimum;
with one it does not (tests/theory). Option `refine.gate = "reroll"`, off by default. [ours]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stages.frame.contract import Context
from stages.frame.types import Completion, Episode
from stages.llm.roles import Roles, mix
from stages.play.forced import played_on
from stages.play.tally import env_steps
from stages.play.transitions import Transition


@dataclass(frozen=True)
class Trial:
    """Whether a new action was no worse than the old one, and what was played to know it."""

    passed: bool
    episodes: int = 0
    env_steps: int = 0


def no_worse(
    context: Context, roles: Roles, pairs: Sequence[tuple[Transition, Completion, Completion]], n: int
) -> list[Trial]:
    """Whether n rollouts of the new action return as much as n of the old one; not passed where a rollout failed."""
    starts = [(state, action) for state, old, new in pairs for action in (old, new)]
    groups = played_on(context, roles, starts, n=n, adapter=context.adapter("critic"), seed=mix(context.seed, "gate"))
    return [
        Trial(_total(new) >= _total(old), 2 * n, env_steps([*old, *new]))
        for old, new in zip(groups[::2], groups[1::2], strict=True)
    ]


def _total(episodes: Sequence[Episode]) -> float:
    """Their summed return; NaN, of which no comparison holds, where one is not known."""
    return sum(e.total_reward if e.outcome.trainable else math.nan for e in episodes)
