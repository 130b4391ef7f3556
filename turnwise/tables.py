"""What was run and kept, as pandas DataFrames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from flows import presets
from flows.book import EXPERIMENT
from flows.lineage import runs_of
from flows.look.compare import compared
from flows.look.sql import asked
from flows.presets import RunConfig
from flows.rerun import stored_summary
from stages.store.workspace import Workspace


def runs(project: Workspace, stage: str = EXPERIMENT, limit: int = 100) -> pd.DataFrame:
    """The newest pipeline runs, or those of a stage, newest first: id, name, status, times in seconds, and each metric."""
    found = project.tracking.runs(stage, limit)
    told = [
        {
            "run_id": info.run_id, "name": info.name, "status": info.status, "started": pd.Timestamp(info.started, unit="s"),
            "seconds": None if info.ended is None else info.ended - info.started, **info.metrics,
        }
        for info in found
    ]  # fmt: skip
    return pd.DataFrame(told)


def curve(project: Workspace, run: str) -> pd.DataFrame:
    """The metrics of a pipeline run by iteration, -1 being the base model."""
    summary = stored_summary(project, project.tracking.find(run))
    by_iteration = {row["iteration"]: row["metrics"] for row in summary["iterations"]}
    return pd.DataFrame.from_dict(by_iteration, orient="index").rename_axis("iteration")


def rows(project: Workspace, table: str, run: str) -> pd.DataFrame:
    """All rows that a run wrote to a table of the replay. For a pipeline run, those of all its stage runs."""
    run_id = project.tracking.find(run)
    whole = project.tracking.experiment(run_id) == EXPERIMENT
    return pd.DataFrame(project.replay.rows(table, runs_of(stored_summary(project, run_id)) if whole else [run_id]))


def episodes(project: Workspace, run: str) -> pd.DataFrame:
    """The episodes that a run played, including its evaluations. Column `split` tells them apart."""
    return rows(project, "episodes", run)


def sql(project: Workspace, query: str, run: str | None = None) -> pd.DataFrame:
    """The answer of DuckDB to a query. docs/how-to/sql.md has the tables and examples. run: limits the relation `runs`
    to this run's stage runs. Default: those of all finished pipeline runs.
    """
    return asked(query, project, run).to_pandas()


def compare(project: Workspace, *runs: str) -> pd.DataFrame:
    """Runs side by side, a column each: the config keys that differ, the win rates on test, and the metrics at the end."""
    found = compared(runs, project)
    ends = {
        (part, name): [one[part].get(name) for one in found.results]
        for part in ("base", "final") if found.results
        for name in ("win_rate", "win_low", "win_high")
    }  # fmt: skip
    parts: dict[tuple[str, str], Sequence[Any]] = {
        **{("config", key): values for key, values in found.config.items()},
        **ends,
        **{("metrics", key): values for key, values in found.metrics.items()},
    }
    columns = [run["run_id"][:8] for run in found.runs]
    return pd.DataFrame(
        list(parts.values()), index=pd.MultiIndex.from_tuples(list(parts), names=("part", "key")), columns=columns
    )


def config(project: Workspace, run: str) -> RunConfig:
    """The config of a pipeline run, to be looked at."""
    return presets.resolve(project.tracking.read_json(project.tracking.find(run), "config.json"))
