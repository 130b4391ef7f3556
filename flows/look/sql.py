"""Queries the rows of the runs in DuckDB. The relation `runs` joins them to their runs."""

from __future__ import annotations

from typing import Any

from flows.book import EXPERIMENT
from flows.rerun import stored_summary
from stages.frame.types import MissingInput, UsageError
from stages.store.workspace import Workspace

COLUMNS = ("pipeline", "name", "run_id", "stage", "part", "iteration")


def asked(query: str, workspace: Workspace, of: str | None = None) -> Any:
    """The answer as an Arrow table. of: limits the relation `runs` to the stage runs of this pipeline run.

    Raises UsageError for a query that DuckDB cannot run, or if `of` is no pipeline run.
    """
    if not workspace.replay.path.exists() and not workspace.replay.lacking():
        raise MissingInput(f"rows were wanted, but there is no {workspace.replay.path}. Run: turnwise run demo")
    return workspace.replay.query(query, {"runs": _relation(workspace, of)})


def _relation(workspace: Workspace, of: str | None) -> Any:
    """A row for each stage run of each finished pipeline run, reused ones too. `part`: base, start, iteration or final."""
    import pyarrow as pa

    tracking = workspace.tracking
    found = [info for info in tracking.runs(EXPERIMENT) if info.status == "FINISHED"] if of is None else []
    if of is not None:
        found = [tracking.info(tracking.find(of))]
        if tracking.experiment(found[0].run_id) != EXPERIMENT:
            raise UsageError(f"--of {of}: wanted a pipeline run. See: turnwise runs")
    rows = [
        (info.run_id, info.name, *one) for info in found for one in _stage_runs(stored_summary(workspace, info.run_id))
    ]
    kinds = [pa.string()] * 5 + [pa.int32()]
    columns = list(zip(*rows, strict=True)) or [()] * len(COLUMNS)
    return pa.table([pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)], list(COLUMNS))


def _stage_runs(summary: dict[str, Any]) -> list[tuple[str, str, str, int]]:
    found = [
        (run_id, stage, "iteration" if row["iteration"] >= 0 else "start", row["iteration"])
        for row in summary["iterations"]
        for stage, run_id in row["runs"].items()
    ]
    ends = [(summary[part]["run_id"], "evaluate", part, summary[part].get("iteration", -1)) for part in ("base", "final") if summary[part]]  # fmt: skip
    return [*found, *ends]
