"""Differences between the configs of runs, their results and their curves."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from flows.look.pages import Table
from flows.report import duration
from flows.rerun import stored_summary
from flows.telling import rate_text
from stages.store.runs import SET, RunInfo, differences, without_password
from stages.store.workspace import Workspace

LETTERS = "AB"
CURVES = (
    "collect/return", "value/explained_variance", "audit/yes_rate_won", "audit/yes_rate_lost", "audit/verdict_accuracy",
)  # fmt: skip
"""Metrics with a curve besides the win rate and the losses."""
LOSS = re.compile(r"/(nll/\w+|\w*loss)$(?<!_first)")


@dataclass(frozen=True)
class Told:
    """A pipeline run: what the store knows, its summary and its config."""

    letter: str
    info: RunInfo
    summary: Mapping[str, Any]
    config: Mapping[str, Any]


def facts(runs: Sequence[Told]) -> Table:
    """What each run is, and its result. A column a run."""
    rows = [_facts(run) for run in runs]
    letters = [run.letter for run in runs] if len(runs) > 1 else ["this run"]
    return Table("Runs", ["", *letters], [[key, *(row[key] for row in rows)] for key in rows[0]])


def _facts(run: Told) -> dict[str, str]:
    tags, base, final = run.info.tags, run.summary["base"], run.summary["final"]
    rates = [row["win_rate"] for row in run.summary["iterations"] if row.get("win_rate") is not None]
    took = None if run.info.ended is None else run.info.ended - run.info.started
    local = " with local changes" if tags.get("git_dirty") == "true" else ""
    return {
        "run": run.info.run_id,
        "name": run.info.name,
        "status": f"{run.info.status}{f': {error}' if (error := tags.get('error')) else ''}",
        "method and task": f"{run.config['method']} on {run.config['task']['env']}, seed {run.config['seed']}",
        "win rate on test": f"base {rate_text(base)}, adapter of iteration {final['iteration']} {rate_text(final)}" if base and final else "-",
        "on validation": f"{rates[0]:.2f} -> {rates[-1]:.2f}, best {max(rates):.2f}" if rates else "-",
        "started, took": f"{datetime.fromtimestamp(run.info.started).astimezone().isoformat(' ', 'minutes')}, {duration(took)}",
        "commit": f"{tags.get('git_commit', 'unknown')[:12]}{local}",
    }  # fmt: skip


def changes(runs: Sequence[Told]) -> Table:
    """The config of one run against its preset, or of two against each other."""
    if len(runs) == 1:
        (run,) = runs
        sets = {key.removeprefix(SET): value for key, value in run.info.params.items() if key.startswith(SET)}
        preset = str(run.config.get("preset", ""))
        note = f"Against the preset {preset}." if sets else f"Nothing differs from the preset {preset}."
        rows = [[key, without_password(value)] for key, value in sets.items()]
        return Table("Config", ["key", "this run"], rows, note)
    found = differences(runs[0].config, runs[1].config)
    rows = [[key, *(_value(one) for one in pair)] for key, pair in found.items()]
    return Table("What differs in config", ["key", *LETTERS], rows, "" if rows else "Nothing.")


def iterations(runs: Sequence[Told]) -> Table:
    """The win rate after each iteration, and the stages' own seconds; those of each run."""
    by_run = [{row["iteration"]: row for row in run.summary["iterations"]} for run in runs]
    head = _columns(runs, "win rate, 95 %", "return", "seconds")
    rows = []
    for i in sorted(set().union(*by_run)):
        cells = [cell for mine in by_run for cell in _iteration(mine.get(i))]
        rows.append(["base" if i < 0 else str(i), *cells])
    note = "Win rate on validation after the iteration; return of the episodes that it collected; seconds of its stages, evaluation left out."
    return Table("Iterations", ["iteration", *head], rows, note)


def metrics(runs: Sequence[Told]) -> Table:
    """All metrics of each run's last iteration; of two runs with the difference."""
    last = [run.summary["iterations"][-1]["metrics"] if run.summary["iterations"] else {} for run in runs]
    rows = []
    for name in sorted(set().union(*last)):
        values = [mine.get(name) for mine in last]
        numbers = [value for value in values if value is not None]
        more = [f"{numbers[1] - numbers[0]:+.4g}" if len(numbers) == 2 else ""] if len(runs) == 2 else []
        rows.append([name, *("" if value is None else f"{value:.5g}" for value in values), *more])
    head = ["metric", *_columns(runs, "value"), *(["B - A"] if len(runs) == 2 else [])]
    return Table("Metrics of the last iteration", head, rows)


def curves(runs: Sequence[Told]) -> list[dict[str, Any]]:
    """Curves by iteration (-1: the base model): the win rate, then losses and others. Each has a title, and by each
    run's letter its points [iteration, value, low, high].
    """
    rates = {run.letter: _rates(run) for run in runs}
    names = dict.fromkeys(name for run in runs for row in run.summary["iterations"] for name in row["metrics"])
    wanted = [name for name in names if LOSS.search(name)] + [name for name in CURVES if name in names]
    found: list[dict[str, Any]] = [{"title": "win rate, validation", "runs": rates}]
    found += [{"title": name, "runs": {run.letter: _points(run, name) for run in runs}} for name in wanted]
    return [one for one in found if any(len(points) > 1 for points in one["runs"].values())]


def _rates(run: Told) -> list[list[float | None]]:
    rows = [row for row in run.summary["iterations"] if row.get("win_rate") is not None]
    return [[row["iteration"], row["win_rate"], row.get("win_low"), row.get("win_high")] for row in rows]


def _points(run: Told, name: str) -> list[list[float | None]]:
    rows = run.summary["iterations"]
    return [
        [row["iteration"], row["metrics"][name]] for row in rows if math.isfinite(row["metrics"].get(name, math.nan))
    ]


def _columns(runs: Sequence[Told], *names: str) -> list[str]:
    return [f"{run.letter}: {name}" if len(runs) > 1 else name for run in runs for name in names]


def _iteration(row: Mapping[str, Any] | None) -> list[str]:
    if row is None:
        return ["", "", ""]
    collected = row["metrics"].get("collect/return")
    return [rate_text(row), "" if collected is None else f"{collected:.3g}", f"{row['seconds']:.0f}"]


def _value(value: Any) -> str:
    return "not set" if value is None else without_password(str(value))


def read_run(workspace: Workspace, run_id: str, letter: str) -> Told:
    """A pipeline run as it is in the store."""
    config = workspace.tracking.read_json(run_id, "config.json")
    return Told(letter, workspace.tracking.info(run_id), stored_summary(workspace, run_id), config)
