"""The tables of a study's report, from its rows. Ours.

Every method stands at every checkpoint of a cost, not each at its own end; a difference names its control; what was
tried is told, and what is missing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flows.study.figures import AXES, Mean, at, checkpoints, differences, median_cost, reached, stratified_mean
from flows.study.rows import Row, best_validation, evaluated

if TYPE_CHECKING:
    from flows.study.cells import Setting
    from flows.study.design import Study

INTERVALS = "In brackets: 95 % interval of the mean over seeds, by a bootstrap that is stratified by task."


@dataclass(frozen=True)
class Table:
    """Text in rows and columns, as Markdown and HTML alike show it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def tables(study: Study, rows: Sequence[Row], chosen: Mapping[str, Setting], missing: Sequence[str]) -> list[Table]:
    """All tables that have a row. missing: of each cell without a result, its title and why."""
    table = [row for row in rows if row["part"] == "table"]
    found = [_results(study, task, table, chosen) for task in study.tasks]
    found += [_over_tasks(study, table)] if len(study.tasks) > 1 else []
    found += [_paired(study, table)]
    found += [_at_equal_cost(study, task, table, axis) for task in study.tasks for axis in AXES]
    found += [_tuning(study, rows, chosen)]
    found += [Table("Missing runs", ("run", "why"), [line.split(": ", 1) for line in missing])]
    found += [_runs(rows)]
    return [one for one in found if one.rows]


def arms(study: Study, task: str, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of a task by method, in the order of the study and of its seeds; no method without a row."""
    found = {
        method: sorted(
            (row for row in rows if (row["method"], row["task"]) == (method, task)),
            key=lambda row: study.seeds.index(row["seed"]),
        )
        for method in study.methods
    }
    return {method: mine for method, mine in found.items() if mine}


def _results(study: Study, task: str, rows: Sequence[Row], chosen: Mapping[str, Setting]) -> Table:
    level = f"{study.level:g}"
    costs = [f"{axis} to {level}, median" for axis in AXES.values()]
    head = ("method", "settings", "base", "win rate on test", "by seed", *AXES.values(), f"reached {level}", *costs)
    note = (
        f"Test split, for the adapter with the best validation win rate. {INTERVALS} Cost is of the whole run, evaluation left "
        f"out. A run reached {level} at its first evaluation on validation that did; one that never did counts as later than all others in the median."
    )
    return Table(f"Results: {task}", head, list(_result_rows(study, arms(study, task, rows), chosen)), note)


def _result_rows(
    study: Study, found: Mapping[str, Sequence[Row]], chosen: Mapping[str, Setting]
) -> Iterator[list[str]]:
    for method, mine in found.items():
        ends = [evaluated(row)[-1] for row in mine]
        hits = sum(reached(evaluated(row), study.level) is not None for row in mine)
        source = study.source(method)
        setting = "preset" if source == "preset" else " ".join(chosen[source]) or "preset (of those tried)"
        yield [
            method,
            setting,
            f"{statistics.mean(row['base'] for row in mine):.2f}",
            rate(stratified_mean([[row["final"] for row in mine]])),
            " ".join(f"{row['final']:.2f}" for row in mine),
            *(cost(statistics.mean(end[axis] for end in ends)) for axis in AXES),
            f"{hits} of {len(mine)}",
            *(cost(median_cost(mine, study.level, axis)) for axis in AXES),
        ]


def _over_tasks(study: Study, rows: Sequence[Row]) -> Table:
    """Methods that have a run of every task."""
    lines = []
    for method in study.methods:
        strata = [[row["final"] for row in arms(study, task, rows).get(method, [])] for task in study.tasks]
        if all(strata):
            lines.append([method, str(sum(map(len, strata))), rate(stratified_mean(strata))])
    return Table("Results: mean over all tasks", ("method", "runs", "win rate on test"), lines, INTERVALS)


def _paired(study: Study, rows: Sequence[Row]) -> Table:
    lines = []
    for method, one in study.methods.items():
        mine, controls = ([row for row in rows if row["method"] == name] for name in (method, one.control))
        by_task = differences(mine, controls)
        parts = [(task, [by_task[task]]) for task in study.tasks if task in by_task]
        parts += [("all tasks", list(by_task.values()))] if len(by_task) > 1 else []
        for task, strata in parts:
            every = [value for stratum in strata for value in stratum]
            higher = f"{sum(value > 0 for value in every)} of {len(every)}"
            lines.append([method, one.control, task, rate(stratified_mean(strata), "+.2f"), higher])
    head = ("method", "control", "task", "win rate minus the control's", "runs above it")
    return Table("Against the control, run by run", head, lines, f"Pairs of one task and seed. {INTERVALS}")


def _at_equal_cost(study: Study, task: str, rows: Sequence[Row], axis: str) -> Table:
    found = arms(study, task, rows)
    points = checkpoints([row for mine in found.values() for row in mine], axis) if found else []
    lines = [
        [method, *(_rate_at([at(evaluated(row), axis, x) for row in mine]) for x in points)]
        for method, mine in found.items()
        if points
    ]
    note = f"Validation win rate, linear between evaluations. {INTERVALS} Empty where a run of the method had ended."
    return Table(f"At equal {AXES[axis]}: {task}", ("method", *map(cost, points)), lines, note)


def _rate_at(rates: Sequence[float]) -> str:
    return "" if any(math.isnan(value) for value in rates) else rate(stratified_mean([rates]))


def _tuning(study: Study, rows: Sequence[Row], chosen: Mapping[str, Setting]) -> Table:
    """All that was tried, in the order of the runs' settings."""
    tried: dict[tuple[str, Setting], list[Row]] = {}
    for row in rows:
        if row["part"] == "tuning":
            tried.setdefault((row["method"], tuple(row["setting"])), []).append(row)
    lines = []
    for (method, setting), mine in sorted(tried.items(), key=lambda pair: list(study.methods).index(pair[0][0])):
        rates = [best_validation(row) for row in mine]
        taken = "chosen" if chosen.get(method) == setting else ""
        by_run = " ".join(f"{value:.2f}" for value in rates)
        lines.append([method, " ".join(setting) or "the preset's own", f"{statistics.mean(rates):.2f}", by_run, taken])
    seeds = ", ".join(map(str, study.tuning.seeds)) if study.tuning else ""
    note = f"Best validation win rate of each run, on seeds {seeds}, which no other table has, and the tasks {', '.join(study.tuning_tasks)}."
    return Table("What was tried", ("method", "setting", "mean", "by run", ""), lines, note)


def _runs(rows: Sequence[Row]) -> Table:
    lines = [
        [
            row["part"],
            row["method"],
            row["task"],
            str(row["seed"]),
            f"{row['final']:.2f}",
            row["run"][:8],
            row["commit"],
        ]
        for row in rows
    ]
    return Table("Runs", ("part", "method", "task", "seed", "win rate on test", "run", "commit"), lines)


def rate(mean: Mean, form: str = ".2f") -> str:
    if math.isnan(mean.low):
        return format(mean.value, form)
    return f"{mean.value:{form}} [{mean.low:{form}}, {mean.high:{form}}]"


def cost(value: float) -> str:
    """In words that a table has room for: "640", "38k"; "not reached" where it is infinite."""
    if math.isinf(value):
        return "not reached"
    return f"{value:.0f}" if value < 10_000 else f"{value / 1000:.0f}k"
