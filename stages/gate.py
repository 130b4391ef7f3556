"""The outcome gate: keep a rewritten action only if rolling it out is no worse than rolling out the action it replaces.

The paper has no acceptance test for a_r; with a noisy critic, refinement without one stalls far from the optimum, and with it
does not (tests/theory). Option `refine.gate = "reroll"`, off by default. [ours]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from stages.contract import Context
from stages.llm.roles import Roles, mix
from stages.rollout import RolloutSettings, environment, rollout

if TYPE_CHECKING:
    from stages.refine import Refinement


def reroll_gate(context: Context, roles: Roles, refined: Sequence[Refinement], n: int) -> list[Refinement]:
    """n rollouts of the old and of the new action from the same state, by the current policy; the worse ones are dropped.

    The states are reached again by replaying the episode's replies, so the environment must be deterministic, or be
    content with an estimate.
    """
    new = [r for r in refined if not r.dropped and not r.kept_action and r.learned is not None]
    scenarios, forced = [], []
    for r in new:
        said = [str(m["content"]) for m in r.state.state if m["role"] == "assistant"]
        for reply in (r.action, r.learned):
            assert reply is not None
            scenarios += [r.state.scenario] * n
            forced += [[*said, reply.text]] * n
    if not new:
        return list(refined)
    s, task = context.run.roles, context.run.task
    settings = RolloutSettings(
        context.adapter("critic"),
        s.policy_temperature,
        s.max_action_tokens,
        task.max_turns,
        task.malformed_allowance,
        256,
        3,
        mix(context.seed, "gate"),
    )
    episodes = rollout(context.engine, environment(context), scenarios, roles, settings, forced=forced)
    returns = [e.total_reward if e.outcome.trainable else None for e in episodes]
    judged = []
    for i, r in enumerate(new):
        old, fresh = returns[2 * i * n : (2 * i + 1) * n], returns[(2 * i + 1) * n : (2 * i + 2) * n]
        known = None not in old and None not in fresh
        judged.append(r if known and sum(map(float, fresh)) >= sum(map(float, old)) else replace(r, dropped="gate"))  # type: ignore[arg-type]
    return [r for r in refined if r.dropped or r.kept_action] + judged
