"""The final evaluation of a stored run, to be done again with changes, as the benchmarks that need it ask for it."""

from __future__ import annotations

from collections.abc import Sequence

from flows.rerun import Rerun, find_stage_run, prepare, stored_summary
from stages.frame.types import UsageError
from stages.store.workspace import Workspace


def final_evaluation(workspace: Workspace, run: str, sets: Sequence[str], *, of: str) -> Rerun:
    """of: what of the run is measured, for the error. Raises UsageError for a run that is not finished."""
    summary = stored_summary(workspace, workspace.tracking.find(run))
    if not summary["final"]:
        raise UsageError(f"wanted a finished pipeline run, found {run!r}; {of} is what is measured")
    return prepare("evaluate", find_stage_run("evaluate", summary["final"]["run_id"], workspace), workspace, sets=sets)
