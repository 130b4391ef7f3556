"""A study's report as files: `report.html`, which needs nothing beside it, `table.md`, and the curves of each task as a drawing. Ours."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.evidence.study.design import Study
from flows.evidence.study.figures import AXES, band
from flows.evidence.study.rows import Row, evaluated
from flows.evidence.study.tables import INTERVALS, arms, cost
from flows.look.pages import Table, render

TEMPLATE = "report.html.jinja"
SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
NAME = 60  # letters of a task in the name of a file
COLOURS, LINES = 10, ("-", "--", ":")  # matplotlib has ten colours; after them the lines differ
MANY = 4  # times what the cheapest run costs
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
    """The tables, for a page of docs/results/."""
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
    """Validation win rates of a task's methods against each cost, as SVG: the mean with its interval. Unless there are
    too many methods, every seed is a thin line. "" where there is no row.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found = arms(study, task, [row for row in rows if row["part"] == "table"])
    if not found:
        return ""
    curves = {f"{method} ({len(mine)})": [evaluated(row) for row in mine] for method, mine in found.items()}
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        panels = figure.subplots(1, len(AXES), sharey=True)
        for axes, (axis, label) in zip(panels, AXES.items(), strict=True):
            for number, (name, mine) in enumerate(curves.items()):
                line = {"color": f"C{number % COLOURS}", "linestyle": LINES[number // COLOURS % len(LINES)]}
                _draw_method(axes, axis, line, name, mine, seeds=len(curves) <= COLOURS)
            _scale(axes, axis, [curve for mine in curves.values() for curve in mine])
            axes.set(xlabel=label, ylim=(0, 1.02))
            axes.grid(color="0.9")
        panels[0].set_ylabel("win rate, validation")
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=5, frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return _inline(text.getvalue())


def _draw_method(
    axes: Any, axis: str, line: dict[str, str], name: str, curves: Sequence[Sequence[Any]], *, seeds: bool
) -> None:
    for curve in curves if seeds else ():
        costs, rates = [point[axis] for point in curve], [point["win_rate"] for point in curve]
        axes.plot(costs, rates, **line, linewidth=0.5, alpha=0.3)
    xs, mean, low, high = band(curves, axis)
    axes.fill_between(xs, low, high, color=line["color"], alpha=0.15 if seeds else 0.07, linewidth=0)
    axes.plot(xs, mean, **line, linewidth=1.8, label=name)


def _scale(axes: Any, axis: str, curves: Sequence[Sequence[Any]]) -> None:
    """By doublings from the first evaluation on where one run costs many times what another does, so that both are seen."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    ends = [curve[-1][axis] for curve in curves]
    axes.set_xlim(0, None)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    if min(ends) > 0 and max(ends) > MANY * min(ends):
        axes.set_xscale("log", nonpositive="mask")
        axes.set_xlim(min(point[axis] for curve in curves for point in curve if point[axis] > 0), max(ends))
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda x, _: cost(x))


def _inline(svg: str) -> str:
    """The drawing without the head of a file of its own and what names other places."""
    inside = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return re.sub(r"<svg[^>]*?viewBox=\"([^\"]*)\"[^>]*>", r'<svg viewBox="\1" role="img">', inside, count=1)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
