"""A run that learns from another run's episodes: the same stored data for every method that can use it. Ours.

    turnwise run desk+rft --set episodes_of=RUN

In each iteration it takes the other run's collect. Nothing is copied, and only evaluation plays episodes. This shows
what a method learns from given data. It does not show what the method would have played next.
"""

from __future__ import annotations

from typing import Any

from flows import presets, rerun
from flows.book import EXPERIMENT
from flows.pipeline import Call, Step
from flows.presets import RunConfig
from stages.frame.types import UsageError
from stages.store.execute import stored_run
from stages.store.runs import differences
from stages.store.workspace import StageRun, Workspace

SAME: Any = {"task": True, "model": {"path"}, "roles": {"prompts", "policy_temperature", "max_action_tokens"}}
"""Keys that must equal those of the other run."""


def step(inner: Step, run: RunConfig, workspace: Workspace) -> Step:
    """`inner`, except for collect: it returns the other run's collect. Raises UsageError where the episodes do not fit."""
    if not run.episodes_of:
        return inner
    played = _collects(run, workspace)

    def answered(call: Call) -> StageRun:
        if call.stage.name != "collect":
            return inner(call)
        return stored_run(call.stage, played[call.iteration], call.iteration, workspace.tracking)

    return answered


def _collects(run: RunConfig, workspace: Workspace) -> dict[int, str]:
    """Iteration -> the other run's collect."""
    other = workspace.tracking.find(run.episodes_of)
    if workspace.tracking.experiment(other) != EXPERIMENT:
        raise UsageError(f"episodes_of: wanted a pipeline run, found {run.episodes_of!r}. See: turnwise runs")
    stored = presets.resolve(workspace.tracking.read_json(other, "config.json"))
    own, theirs = (one.model_dump(mode="json", include=SAME) for one in (run, stored))
    if changed := differences(theirs, own):
        key, (old, new) = next(iter(changed.items()))
        raise UsageError(
            f"episodes_of: run {other[:8]} was played with {key} = {old}, but this one has {new}. Set the same value."
        )
    rows = rerun.stored_summary(workspace, other)["iterations"]
    found = {row["iteration"]: row["runs"]["collect"] for row in rows if "collect" in row["runs"]}
    if len(rows) - 1 < run.iterations or stored.sweeps != run.sweeps:
        raise UsageError(
            f"episodes_of: run {other[:8]} has episodes of {len(rows) - 1} iterations with {stored.sweeps} sweeps, but wanted {run.iterations} with {run.sweeps}. Set iterations and sweeps."
        )
    return found
