"""Requirements of a policy gradient on its episodes: actions sampled from the trained distribution, and groups of one
scenario to compare.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from stages.frame.contract import Context
from stages.frame.types import Row, TurnwiseError, UsageError
from stages.learn.losses import group_advantages


def check_temperature(context: Context) -> None:
    """Raises UsageError where another distribution acted than the log-probs' own, that of temperature 1."""
    if (found := context.run.roles.policy_temperature) != 1:
        raise UsageError(
            f"roles.policy_temperature: a policy gradient wants actions sampled at temperature 1, found {found:g}; set it to 1"
        )


def by_scenario(heads: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of `episodes` by scenario."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for head in heads:
        groups[head["scenario_id"]].append(head)
    return groups


def relative_advantages(groups: Iterable[Sequence[Row]], *, divided: bool = True) -> dict[str, float]:
    """Advantage of each episode relative to its group, by episode id. Raises ValueError for a group of one."""
    found: dict[str, float] = {}
    for members in groups:
        returns = torch.tensor([head["total_reward"] for head in members])
        relative = group_advantages(returns, divided=divided).tolist()
        found.update(zip([head["episode_id"] for head in members], relative, strict=True))
    return found


MAX_GAP = "Largest mean |difference| of a token's log-prob, engine against trainer, at the weights that sampled, in nats; more stops the run. [ours]"


def check_gap(stage: str, history: Sequence[Mapping[str, float]], allowed: float) -> None:
    """Checks the first step, whose loss was computed at the weights that sampled. The ratio of the clipped loss
    corrects a small gap, like any change of the policy. A large gap means another model. Raises TurnwiseError.
    """
    if len(history) == 1 and not history[0]["gap_mean"] <= allowed:
        raise TurnwiseError(
            f"{stage}: log-probs of engine and trainer differ by {history[0]['gap_mean']:.2g} nats a token on average, allowed is {allowed:g}. Check that the engine serves the model of model.path and loaded this adapter; else raise {stage}.max_gap"
        )
