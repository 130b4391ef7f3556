"""Says what a run would do: for every stage, whether it would run, or which finished run would be reused."""

from __future__ import annotations

from typing import Any

from flows import champion, pipeline, played
from flows.branch import Branch
from flows.pipeline import Call
from flows.presets import RunConfig
from stages.store.workspace import StageRun, Workspace

PENDING = "(not yet)"
"""Stands for the id of a run that does not exist: no stored input equals it, so what follows runs, too."""


def plan(
    run: RunConfig, workspace: Workspace, *, force: bool = False, branch: Branch | None = None
) -> list[dict[str, Any]]:
    """The stages of a run in order. reuse: id of the run that would be reused, or None. force, branch: as for it."""
    planned: list[dict[str, Any]] = []

    def look(call: Call) -> StageRun:
        found = None if force else reusable(call, workspace)
        metrics = workspace.tracking.metrics(found) if found else {}
        return StageRun(call.stage.name, found or PENDING, call.iteration, metrics, bool(found), 0.0)

    inner = champion.goes_on(played.step(look, run, workspace), run, workspace)
    inner = branch.step(inner, workspace) if branch else inner

    def step(call: Call) -> StageRun:
        found = inner(call)
        reuse = found.run_id if found.reused else None
        planned.append({"stage": call.stage.name, "part": call.part, "iteration": call.iteration, "reuse": reuse})
        return found

    through = branch.through if branch else pipeline.LAST
    pipeline.evaluate_base(run, step)
    rows = list(pipeline.iterate(run, step, through))
    if through != pipeline.LAST:
        return planned
    known = bool(rows) and all(PENDING not in row.runs.values() for row in rows)
    if known and (best := pipeline.best_of(rows[run.first_iteration :])):
        pipeline.evaluate_final(run, step, best)
    elif rows:  # which adapter is the best is known only when all are evaluated
        planned.append({"stage": "evaluate", "part": "final", "iteration": None, "reuse": None})
    return planned


def reusable(call: Call, workspace: Workspace) -> str | None:
    """Id of the finished run with the fingerprint that this call would have."""
    if any(PENDING in runs for runs in call.inputs.values()):
        return None
    return workspace.tracking.finished(call.fingerprint(workspace), call.stage.name)
