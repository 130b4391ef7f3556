"""Runs side by side: differences of their configs, results and curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.book import EXPERIMENT
from flows.registry import STAGES
from flows.report import COLUMNS
from flows.rerun import stored_summary
from stages.frame.types import UsageError
from stages.store.runs import flat
from stages.store.workspace import Workspace

CURVES = {"win rate, validation": "evaluate/win_rate", **{name: metric for name, metric, _, _ in COLUMNS[1:]}}


@dataclass(frozen=True)
class Compared:
    """Runs side by side, in the order asked for. metrics: those at the end. curves: title -> a run's values by
    iteration, None where there is none. Stage runs have no curves.
    """

    runs: Sequence[Mapping[str, Any]]  # run_id, name, status
    config: Mapping[str, Sequence[Any]]  # keys that differ -> a value a run, None where there is no such key
    metrics: Mapping[str, Sequence[float | None]]
    curves: Mapping[str, Sequence[Sequence[float | None]]]
    results: Sequence[Mapping[str, Any]]  # base, final: win rates with intervals


def compared(runs: Sequence[str], workspace: Workspace) -> Compared:
    """These runs, named by the start of their ids. Raises UsageError unless they are pipeline runs, or of one stage."""
    tracking, ids = workspace.tracking, list(dict.fromkeys(workspace.tracking.find(one) for one in runs))
    kinds = {run_id: tracking.experiment(run_id) for run_id in ids}
    if len(set(kinds.values())) > 1 or not set(kinds.values()) <= {EXPERIMENT, *STAGES}:
        each = ", ".join(f"{run_id[:8]} of {kind}" for run_id, kind in kinds.items())
        raise UsageError(f"compare: wanted pipeline runs, or runs of one stage, found {each}. See: turnwise runs")
    if len(ids) < 2:
        raise UsageError("compare: wanted two runs or more, found one. See: turnwise runs")
    infos = [tracking.info(run_id) for run_id in ids]
    configs = [_config(run_id, workspace) for run_id in ids]
    summaries = [stored_summary(workspace, run_id) if kinds[run_id] == EXPERIMENT else {} for run_id in ids]
    ends = [dict((summary["iterations"] or [{"metrics": {}}])[-1]["metrics"]) if summary else dict(info.metrics) for summary, info in zip(summaries, infos, strict=True)]  # fmt: skip
    return Compared(
        [{"run_id": info.run_id, "name": info.name, "status": info.status} for info in infos],
        {key: values for key, values in _aligned(configs).items() if len({json.dumps(one) for one in values}) > 1},
        _aligned(ends),
        _curves(summaries),
        [{part: summary.get(part, {}) for part in ("base", "final")} for summary in summaries if summary],
    )


def _config(run_id: str, workspace: Workspace) -> dict[str, Any]:
    """By `section.key`, as MLflow's params are named; of a stage run with its version, seed and iteration."""
    stored = workspace.tracking.read_json(run_id, "config.json")
    if "stage" in stored and "version" in stored:
        stored = {key: value for key, value in stored.items() if key != "config"} | stored["config"]
    return {key: value for key, value in flat(stored) if value != {}}


def _aligned(values: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {key: [one.get(key) for one in values] for key in dict.fromkeys(key for one in values for key in one)}


def _curves(summaries: Sequence[Mapping[str, Any]]) -> dict[str, list[list[float | None]]]:
    found = {
        title: [[row["metrics"].get(metric) for row in summary.get("iterations", ())] for summary in summaries]
        for title, metric in CURVES.items()
    }
    return {title: each for title, each in found.items() if any(value is not None for one in each for value in one)}
