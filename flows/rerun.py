"""Runs one stage again from its stored inputs, with the changes of `--set`. `flows/branch.py` also runs what follows.

    turnwise rerun critic --of RUN --set critic.lr=1e-4

It reads the same runs as the old one, so no earlier stage runs again. The tag `rerun_of` links the new run to the old
one. Nothing that is stored changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flows import presets
from flows.book import EXPERIMENT, SUMMARY
from flows.pipeline import LAST, Call
from flows.presets import RunConfig
from flows.registry import METHODS, STAGES, load_stage
from flows.telling import Changes, changes_named, changes_told
from stages.envs import nearest
from stages.frame.types import MissingInput, UsageError
from stages.store.execute import lineage_inputs
from stages.store.runs import STANDS_FOR, differences
from stages.store.workspace import Workspace


@dataclass(frozen=True)
class Rerun:
    """A stage run that is repeated: the old run's id, and the call that makes the new one."""

    old: str
    call: Call
    changed: Changes = field(default_factory=dict)
    replaces: bool = False  # takes the old run's place as the owner of weights that were dropped

    @property
    def tags(self) -> dict[str, str]:
        """What links the new run to the old one, and tells them apart."""
        own = {"rerun_of": self.old, "changed": changes_told(self.changed)}
        return {**own, STANDS_FOR: self.old} if self.replaces else own

    @property
    def whose(self) -> str:
        """What the new run is called by, after its stage and iteration: "of f775a0b1, lr 0.0005"."""
        return f"{self.old[:8]}{changes_named(self.changed, self.call.stage.name)}"


def prepare(
    stage: str, of: str, workspace: Workspace, *, sets: Sequence[str] = (), iteration: int | None = None
) -> Rerun:
    """Find the stored run and read back its config and inputs.

    of: a pipeline run (its last iteration that has the stage, or `iteration`), or a run of the stage itself. Raises
    UsageError where there is no such stage or run, or where the stage does not read a changed key.
    """
    if stage not in STAGES:
        raise UsageError(f"There is no stage {stage!r}{nearest(stage, list(STAGES))} Stages: {', '.join(STAGES)}.")
    old = find_stage_run(stage, of, workspace, iteration)
    loaded = load_stage(stage)
    read = {stage, *loaded.sections, "seed"}
    for item in sets:
        if (section := item.split("=")[0].split(".")[0]) not in read:
            raise UsageError(f"--set {item}: {stage} does not read {section!r}. It reads {', '.join(sorted(read))}.")
    before, run = stored_config(old, workspace), stored_config(old, workspace, sets)
    changed = differences(before.model_dump(mode="json"), run.model_dump(mode="json"))
    at = int(workspace.tracking.tags(old)["iteration"])
    call = Call(loaded, run, lineage_inputs(workspace, old), at, "rerun")
    return Rerun(old, call, changed, replaces=workspace.tracking.is_dropped(old) and is_same(call, old, workspace))


def is_same(call: Call, old: str, workspace: Workspace) -> bool:
    """Whether the call has the fingerprint of the old run, and so its result."""
    return call.fingerprint(workspace) == workspace.tracking.tags(old).get("fingerprint")


def stored_config(run_id: str, workspace: Workspace, sets: Sequence[str] = ()) -> RunConfig:
    """The config that a stage run had, with `sets` over it; sections that the stage does not read have their defaults."""
    stored = workspace.tracking.read_json(run_id, "config.json")
    return presets.resolve({**stored["config"], "seed": stored["seed"], "preset": f"rerun of {run_id[:8]}"}, sets)


def find_stage_run(stage: str, of: str, workspace: Workspace, iteration: int | None = None) -> str:
    """Id of the run of `stage` that `of` names, itself or through its pipeline."""
    run_id = workspace.tracking.find(of)
    experiment = workspace.tracking.experiment(run_id)
    if experiment not in (stage, EXPERIMENT):
        wanted = f"--of {of}: wanted a pipeline run or a run of {stage}, found"
        if "rerun_of" in workspace.tracking.tags(run_id) and follows(stage, experiment):
            told = f"a rerun of {experiment}, and {stage} needs what comes between. Run: turnwise rerun {experiment} --of {run_id[:8]} --through {stage}"
            raise UsageError(f"{wanted} {told}")
        raise UsageError(f"{wanted} a run of {experiment}. See: turnwise runs")
    if found := stage_run_of(stage, run_id, workspace, iteration):
        return found
    where = "no finished iteration" if iteration is None else f"no finished iteration {iteration}"
    raise UsageError(
        f"--of {of}: this pipeline run has {where} with the stage {stage}. See: turnwise show {run_id[:8]}"
    )


def follows(stage: str, other: str) -> bool:
    """Whether `stage` comes after `other` in an iteration of some method."""
    orders = [(*names, LAST) for names in METHODS.values()]
    return any(other in names and stage in names[names.index(other) + 1 :] for names in orders)


def stage_run_of(stage: str, run_id: str, workspace: Workspace, iteration: int | None = None) -> str | None:
    """The run itself, if it is of the stage; of a pipeline run its run in `iteration`, or the last one. Else None."""
    experiment = workspace.tracking.experiment(run_id)
    if experiment == EXPERIMENT:
        rows = reversed(stored_summary(workspace, run_id)["iterations"])
        return next(
            (str(row["runs"][stage]) for row in rows if stage in row["runs"] and iteration in (None, row["iteration"])),
            None,
        )
    return run_id if experiment == stage else None


def stored_summary(workspace: Workspace, run_id: str) -> dict[str, Any]:
    """A pipeline run's stored summary. A killed run has one as of its last finished iteration."""
    try:
        summary = workspace.tracking.read_json(run_id, SUMMARY)
    except MissingInput:
        return {"run_id": run_id, "base": {}, "final": {}, "iterations": []}
    return {**summary, "status": workspace.tracking.status(run_id)}
