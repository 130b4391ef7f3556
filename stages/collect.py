"""Collect episodes with the current policy. Paper: arXiv 2512.04601, Algorithm 1, line "collect trajectories".

turnwise rerun collect --of RUN --set collect.episodes=256
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from stages import envs
from stages.frame.contract import POLICY_STAGES, Config, Context, Outputs, Stage
from stages.llm.roles import roles_of
from stages.play.played import played
from stages.play.rollout import rollout_settings
from stages.play.tally import check_environment, summary
from stages.play.transitions import episode_rows


class CollectConfig(Config):
    """How much experience an iteration gathers."""

    episodes: int = Field(64, ge=1, description="Episodes an iteration. [ours]")
    first_episodes: int = Field(64, ge=1, description="Episodes of iteration 0, when the replay is empty. [ours]")
    split: str = Field("train", description="Scenarios to act in. [ours]")
    group: int = Field(1, ge=1)
    """Episodes a scenario, side by side; GRPO compares within such a group. [paper: 4 for GRPO]"""
    slots: int = Field(256, ge=1, description="Episodes that run side by side. [ours]")
    attempts: int = Field(3, ge=1, description="Tries of an episode whose environment or simulator failed. [ours]")
    lag: int = Field(0, ge=0, le=1)
    """Iterations by which the policy that plays is older than the newest. With 1 and model.engine = "openai" the next iteration's episodes are played while this one trains. Not for on-policy methods. [ours]"""

    ADDED: ClassVar[Mapping[str, Any]] = {"lag": 0}


def run(context: Context) -> Outputs:
    """Rows of `episodes` and `turns`. Raises TurnwiseError if the environment failed in all of them."""
    config: CollectConfig = context.config
    task, roles = context.run.task, context.run.roles
    wanted = config.first_episodes if context.iteration == 0 else config.episodes
    scenarios = envs.scenarios(task.env, task.options, config.split, max(1, wanted // config.group), context.seed)
    scenarios = [s for s in scenarios for _ in range(config.group)]
    bar = context.progress("collect episodes", len(scenarios))
    settings = rollout_settings(
        context, context.policy_adapter(), seed=context.seed, slots=config.slots, attempts=config.attempts
    )
    episodes = played(context, roles_of(roles), scenarios, settings, done=bar.advance)
    check_environment(episodes)
    controls = sum(context.engine.count_controls(e.messages) for e in episodes)
    metrics = summary(episodes, "collect") | {"collect/control_tokens_neutralised": float(controls)}
    return Outputs(metrics, episode_rows(episodes, context.iteration))


STAGE = Stage(
    "collect", 2, CollectConfig, inputs=POLICY_STAGES, roles=("policy",), run=run, outputs=("episodes", "turns"), shares=True
)  # fmt: skip
