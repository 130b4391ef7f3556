"""The outcome gate: keep a rewritten action only if rolling it out is no worse than rolling out the action it replaces.

The paper has no acceptance test for a_r; with a noisy critic, refinement without one stalls far from the optimum, and
with it does not (tests/theory). Option `refine.gate = "reroll"`, off by default. [ours]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stages.frame.contract import Context
from stages.frame.types import Completion
from stages.llm.roles import Roles, mix
from stages.play.environment import environment
from stages.play.rollout import rollout, rollout_settings
from stages.play.transitions import Transition


def no_worse(
    context: Context, roles: Roles, pairs: Sequence[tuple[Transition, Completion, Completion]], n: int
) -> list[bool]:
    """For each (state, old action, new action): whether n rollouts of the new one by the current policy return as much
    as n of the old one.

    False too where a rollout failed: then nothing is known. The states are reached again by replaying the episode's
    replies, so the environment must be deterministic, or be content with an estimate.
    """
    scenarios, forced = [], []
    for state, old, new in pairs:
        said = [str(m["content"]) for m in state.state if m["role"] == "assistant"]
        for action in (old, new):
            scenarios += [state.scenario] * n
            forced += [[*said, action.text]] * n
    settings = rollout_settings(context, context.adapter("critic"), seed=mix(context.seed, "gate"))
    episodes = rollout(context.engine, environment(context), scenarios, roles, settings, forced=forced)
    returns = [e.total_reward if e.outcome.trainable else None for e in episodes]
    groups = [returns[start : start + n] for start in range(0, len(returns), n)]
    return [_total(new) >= _total(old) for old, new in zip(groups[::2], groups[1::2], strict=True)]


def _total(returns: list[float | None]) -> float:
    """Their sum; NaN, of which no comparison holds, where one is not known."""
    return sum(math.nan if one is None else one for one in returns)
