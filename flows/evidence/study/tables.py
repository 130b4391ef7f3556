"""The tables of a study's report, from its rows. Ours.

Methods are compared at the same checkpoints of a cost, not each at its own end. A difference names its control. The
tables also list the tried settings and the missing runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from flows.evidence.study.cells import Setting
from flows.evidence.study.design import PRESET, Study
from flows.evidence.study.figures import (
    AXES,
    Mean,
    at,
    checkpoints,
    differences,
    median_cost,
    reached,
    stratified_mean,
    students_mean,
)
from flows.evidence.study.rows import Row, best_validation, evaluated
from flows.look.pages import Table

INTERVALS = (
    "In brackets: 95 % interval of the mean, by a bootstrap over seeds that is stratified by task. "
    "With few seeds it covers the truth less often than it says: of three in about 3 of 4 cases, of five in about 5 of 6."
)
OWN = "the preset's"
"""Settings that no part of the study changed."""


def tables(study: Study, rows: Sequence[Row], chosen: Mapping[str, Setting], missing: Sequence[str]) -> list[Table]:
    """All tables that have a row. missing: of each cell without a result, its title and why."""
    table = [row for row in rows if row["part"] == "table"]
    found = [_results(study, task, table, chosen) for task in study.tasks]
    found += [_over_tasks(study, table)] if len(study.tasks) > 1 else []
    found += [_paired(study, table)]
    found += [_costs(study, task, table) for task in study.tasks]
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
    found = arms(study, task, rows)
    # Where only a win pays, and 1, it is the win rate again. Rows of before it was kept have none.
    paid = any(row.get("final_return", row["final"]) != row["final"] for mine in found.values() for row in mine)
    lines = []
    for method, mine in found.items():
        final = [row["final"] for row in mine]
        base = f"{statistics.mean(row['base'] for row in mine):.2f}"
        by_seed = " ".join(f"{value:.2f}" for value in final)
        returns = [_return_of(mine)] if paid else []
        setting = _setting_of(study, method, chosen)
        lines.append([method, base, rate(stratified_mean([final])), by_seed, *returns, setting])
    head = ("method", "base", "win rate", "by seed", *(["return"] if paid else []), "settings")
    note = "Test split, for the adapter of each run with the best validation win rate."
    return Table(f"Results: {task}", head, lines, note)


def _return_of(rows: Sequence[Row]) -> str:
    if any("final_return" not in row for row in rows):
        return "–"
    return rate(stratified_mean([[row["final_return"] for row in rows]]))


def _setting_of(study: Study, method: str, chosen: Mapping[str, Setting]) -> str:
    source = study.settings_of(method)
    if source == PRESET:
        return OWN
    of = "" if source == method else f", chosen for {source}"
    return f"{' '.join(study.setting_of(method, chosen)) or f'{OWN}, best of those tried'}{of}"


def _costs(study: Study, task: str, rows: Sequence[Row]) -> Table:
    level, lines = f"{study.level:g}", []
    for method, mine in arms(study, task, rows).items():
        curves = [evaluated(row) for row in mine]
        ends = [cost(statistics.mean(curve[-1][axis] for curve in curves)) for axis in AXES]
        hits = f"{sum(reached(curve, study.level) is not None for curve in curves)} of {len(mine)}"
        lines.append([method, *ends, hits, *(cost(median_cost(mine, study.level, axis)) for axis in AXES)])
    head = ("method", *AXES.values(), f"reached {level}", *(f"{axis} to {level}" for axis in AXES.values()))
    note = (
        f"Of the whole run, evaluation left out; then of how many runs an evaluation on validation reached {level}, and the median of "
        "what that took. A run that never reached it is censored at its end: in the median it is later than all others."
    )
    return Table(f"Cost: {task}", head, lines, note)


def _over_tasks(study: Study, rows: Sequence[Row]) -> Table:
    """Methods that have a run of every task."""
    lines = []
    for method in study.methods:
        strata = [[row["final"] for row in arms(study, task, rows).get(method, [])] for task in study.tasks]
        if all(strata):
            lines.append([method, str(sum(map(len, strata))), rate(stratified_mean(strata))])
    return Table("Results: mean over all tasks", ("method", "runs", "win rate on test"), lines)


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
            student = bounds(students_mean(strata), "+.2f") or "–"
            lines.append([method, one.control, task, rate(stratified_mean(strata), "+.2f"), student, higher])
    head = ("method", "control", "task", "win rate minus the control's", "Student's interval", "runs above it")
    note = "Pairs of one task and seed, on the test split. Decide by Student's interval: it covers the truth of few seeds as often as it says, if they err about normally."
    return Table("Against the control, run by run", head, lines, note)


def _at_equal_cost(study: Study, task: str, rows: Sequence[Row], axis: str) -> Table:
    found = arms(study, task, rows)
    points = checkpoints([row for mine in found.values() for row in mine], axis) if found else []
    lines = [
        [method, *(_rate_at([at(evaluated(row), axis, x) for row in mine]) for x in points)]
        for method, mine in found.items()
        if points
    ]
    note = "Validation win rate, linear between evaluations. –: a run of the method had ended before."
    return Table(f"At equal {AXES[axis]}: {task}", ("method", *map(cost, points)), lines, note)


def _rate_at(rates: Sequence[float]) -> str:
    return "–" if any(math.isnan(value) for value in rates) else rate(stratified_mean([rates]))


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
        lines.append([method, " ".join(setting) or OWN, f"{statistics.mean(rates):.2f}", by_run, taken])
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
    return f"{mean.value:{form}} {bounds(mean, form)}".rstrip()


def bounds(mean: Mean, form: str = ".2f") -> str:
    """Its interval; "" where there is none."""
    return "" if math.isnan(mean.low) else f"[{mean.low:{form}}, {mean.high:{form}}]"


def cost(value: float) -> str:
    """Short: "640", "38k"; "not reached" where it is infinite."""
    if math.isinf(value):
        return "not reached"
    return f"{value:.0f}" if value < 10_000 else f"{value / 1000:.0f}k"
