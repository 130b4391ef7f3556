"""Plays a stage's episodes in the run's own task, all here or in shards (`run.shards`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stages.frame.contract import Context
from stages.frame.types import Episode, Scenario
from stages.llm.roles import Roles
from stages.play.environment import environment
from stages.play.rollout import Hopeless, RolloutSettings, rollout


def played(
    context: Context,
    roles: Roles,
    scenarios: Sequence[Scenario],
    settings: RolloutSettings,
    *,
    hopeless: Hopeless | None = None,
    done: Callable[[int], None],
) -> list[Episode]:
    """As `rollout`. An episode keeps its number, and with it its seeds, in whichever shard it is played."""
    make_env = environment(context)

    def play(part: Sequence[tuple[int, Scenario]]) -> list[Episode]:
        return rollout(
            context.engine, make_env, [one for _, one in part], roles, settings, numbers=[number for number, _ in part],
            hopeless=hopeless, done=done,
        )  # fmt: skip

    return context.share(list(enumerate(scenarios)), play, Episode, done)
