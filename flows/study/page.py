"""A study's report as files: `report.html`, which needs nothing beside it, `table.md`, and the curves of each task as a drawing. Ours."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.pages import render
from flows.study.figures import AXES, band
from flows.study.rows import Row, evaluated
from flows.study.tables import INTERVALS, Table, arms, cost

if TYPE_CHECKING:
    from flows.study.design import Study

TEMPLATE = "report.html.jinja"
SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
NAME = 60  # letters of a task in the name of a file
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "turnwise", "font.family": "sans-serif", "font.size": 9}


@dataclass(frozen=True)
class Report:
    """What a study says. curves: task -> an SVG."""

    title: str
    command: str
    commit: str
    tables: Sequence[Table]
    curves: dict[str, str]


def html(report: Report) -> str:
    """One page without a reference to anything outside of it."""
    return render(Path(__file__).parent / TEMPLATE, report=report, intervals=INTERVALS)


def markdown(report: Report) -> str:
    """The tables, for docs/results.md."""
    parts = [f"# {report.title}", f"    {report.command}", f"Commit: `{report.commit}`", INTERVALS]
    for table in report.tables:
        lines = [f"| {' | '.join(_cell(text) for text in row)} |" for row in table.rows]
        head = [f"| {' | '.join(map(_cell, table.head))} |", f"|{'---|' * len(table.head)}"]
        parts += [f"## {table.title}", *([table.note] if table.note else []), "\n".join([*head, *lines])]
    return "\n\n".join(parts) + "\n"


def drawings(report: Report) -> dict[str, str]:
    """Name of a file -> the curves of a task, as an SVG that stands alone."""
    head = f'<?xml version="1.0" encoding="utf-8"?>\n<svg xmlns="{SVG}" xmlns:xlink="{XLINK}" '
    found = [(task, svg) for task, svg in report.curves.items() if svg]
    return {
        f"{number}-{re.sub(r'[^a-zA-Z0-9]+', '-', task)[:NAME].strip('-')}.svg": head + svg.removeprefix("<svg ")
        for number, (task, svg) in enumerate(found, 1)
    }


def draw(study: Study, task: str, rows: Sequence[Row]) -> str:
    """Validation win rates of a task's methods against each cost, as SVG: the mean with its interval, and every seed as
    a thin line. "" where there is no row.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    found = arms(study, task, [row for row in rows if row["part"] == "table"])
    if not found:
        return ""
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        panels = figure.subplots(1, len(AXES), sharey=True)
        for axes, (axis, label) in zip(panels, AXES.items(), strict=True):
            for number, (method, mine) in enumerate(found.items()):
                _draw_method(axes, axis, f"C{number}", f"{method} ({len(mine)})", [evaluated(row) for row in mine])
            axes.set(xlabel=label, ylim=(0, 1.02), xlim=(0, None))
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.xaxis.set_major_formatter(lambda x, _: cost(x))
            axes.grid(color="0.9")
        panels[0].set_ylabel("win rate, validation")
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=5, frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return _inline(text.getvalue())


def _draw_method(axes: Any, axis: str, colour: str, name: str, curves: Sequence[Sequence[Any]]) -> None:
    for curve in curves:
        costs, rates = [point[axis] for point in curve], [point["win_rate"] for point in curve]
        axes.plot(costs, rates, color=colour, linewidth=0.5, alpha=0.3)
    xs, mean, low, high = band(curves, axis)
    axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(xs, mean, color=colour, linewidth=1.8, label=name)


def _inline(svg: str) -> str:
    """The drawing without the head of a file of its own and what names other places."""
    inside = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return re.sub(r"<svg[^>]*?viewBox=\"([^\"]*)\"[^>]*>", r'<svg viewBox="\1" role="img">', inside, count=1)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
