"""`turnwise compare RUN RUN ...`: what differs in the runs' configs, what they came to, and their curves, in the terminal."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from flows.book import EXPERIMENT
from flows.registry import STAGES
from flows.report import COLUMNS, emit, sparkline
from flows.rerun import stored_summary
from flows.telling import rate_text
from flows.workspace import find_home, open_workspace
from stages.frame.types import UsageError
from stages.store.runs import flat

if TYPE_CHECKING:
    from stages.store.workspace import Workspace

WIDTH = 18  # of a run's column
CURVES = {"win rate, validation": "evaluate/win_rate", **{name: metric for name, metric, _, _ in COLUMNS[1:]}}
TOTALS = ("pipeline/episodes", "pipeline/generated_tokens", "pipeline/stages_s", "pipeline/cpu_s")


@dataclass(frozen=True)
class Compared:
    """Runs side by side, in the order asked for. metrics: those at the end. curves: title -> a run's values by
    iteration, None where there is none; of stage runs there are none.
    """

    runs: Sequence[Mapping[str, Any]]  # run_id, name, status
    config: Mapping[str, Sequence[Any]]  # keys that differ -> a value a run, None where there is no such key
    metrics: Mapping[str, Sequence[float | None]]
    curves: Mapping[str, Sequence[Sequence[float | None]]]
    results: Sequence[Mapping[str, Any]]  # base, final: win rates with intervals


def compare(args: Namespace) -> int:
    """turnwise compare RUN RUN ..."""
    found = compared(args.runs, open_workspace(find_home(args.home)))
    emit(asdict(found)) if args.json else print("\n".join(told(found)))
    return 0


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


def told(found: Compared) -> list[str]:
    """As a terminal shows it: a column a run."""
    lines = [_row("", [run["run_id"][:8] for run in found.runs]), _row("", [_cut(run["name"]) for run in found.runs])]
    lines += ["", "config"] + [_row(key, [_text(one) for one in values]) for key, values in found.config.items()]
    lines += [] if found.config else ["  nothing differs"]
    if found.results:
        lines += ["", "win rate on test"]
        lines += [_row(part, [rate_text(one[part]) for one in found.results]) for part in ("base", "final")]
        lines += ["", "curves, each row on one scale", *(_row(title, _drawn(curves)) for title, curves in found.curves.items())]  # fmt: skip
    shown = found.metrics if not found.results else {key: found.metrics[key] for key in TOTALS if key in found.metrics}
    lines += ["", "cost" if found.results else "metrics"]
    return lines + [
        _row(key, ["-" if one is None else f"{one:.5g}" for one in values]) for key, values in shown.items()
    ]


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


def _drawn(curves: Sequence[Sequence[float | None]]) -> list[str]:
    """Each curve with its last value; all of them between the least and the greatest value of any."""
    known = [[value for value in one if value is not None and math.isfinite(value)] for one in curves]
    every = [value for one in known for value in one]
    low, span = min(every, default=0.0), (max(every, default=0.0) - min(every, default=0.0)) or 1.0
    return [f"{sparkline([(value - low) / span for value in one[-8:]])} {one[-1]:.3g}" if one else "-" for one in known]


def _row(title: str, cells: Sequence[str]) -> str:
    return f"  {title:<32}{''.join(f'{cell:<{WIDTH + 2}}' for cell in cells)}".rstrip()


def _text(value: Any) -> str:
    return "not set" if value is None else _cut(value if isinstance(value, str) else json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."
