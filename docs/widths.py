"""The figure of the width study: win rates, and differences between arms, against the number of actions a step has.

`python docs/tables.py --pictures` draws it from docs/results/width.jsonl, where docs/results/tables.toml asks for it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from flows.evidence.study.figures import Mean, differences, students_mean
from flows.evidence.study.rows import Row


def widths(one: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """An SVG that stands alone. Left the mean win rate on test with its seeds, right paired differences with Student's
    95 % interval. one: `sizes` (task -> actions), `arms` (method -> label) and `minus` (label -> two methods).
    A difference has the colour of its second method, which is one of the arms.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    table = [row for row in rows if row["part"] == "table" and row["task"] in one["sizes"]]
    of = {method: [row for row in table if row["method"] == method] for method in {r["method"] for r in table}}
    with rc_context({"svg.hashsalt": "turnwise", "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 4.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        colours = {method: f"C{n}" for n, method in enumerate(one["arms"])}
        for method, label in one["arms"].items():
            _rates(left, of.get(method, []), one["sizes"], label, colours[method])
        for n, (label, (method, other)) in enumerate(one["minus"].items()):
            pairs = differences(of.get(method, []), of.get(other, []))
            _differences(right, pairs, one["sizes"], label, colours[other], 1 + 0.06 * n)
        right.axhline(0, color="0.4", linewidth=0.8)
        left.set(ylabel="win rate, test", ylim=(-0.02, 1.02))
        right.set(ylabel="difference of win rates", ylim=(-1.02, 1.02))
        for axes in (left, right):
            axes.set_xscale("log")
            axes.set_xticks(list(one["sizes"].values()), [str(n) for n in one["sizes"].values()])
            axes.minorticks_off()
            axes.set_xlabel("actions a step")
            axes.grid(color="0.9")
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False, fontsize="small")
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _rates(axes: Any, rows: Sequence[Row], sizes: Mapping[str, int], label: str, colour: str) -> None:
    by_size = {n: [row["final"] for row in rows if row["task"] == task] for task, n in sizes.items()}
    found = {n: finals for n, finals in by_size.items() if finals}
    for n, finals in found.items():
        axes.plot([n] * len(finals), finals, ".", color=colour, alpha=0.4, markersize=4)
    axes.plot(list(found), [sum(each) / len(each) for each in found.values()], color=colour, label=label)


def _differences(
    axes: Any, pairs: Mapping[str, list[float]], sizes: Mapping[str, int], label: str, colour: str, aside: float
) -> None:
    found = means(pairs, sizes)
    ends = [[abs(getattr(one, end) - one.value) for one in found.values()] for end in ("low", "high")]
    places = [x * aside for x in found]  # beside each other
    axes.errorbar(places, [one.value for one in found.values()], ends, color=colour, capsize=3, label=label)


def means(pairs: Mapping[str, list[float]], sizes: Mapping[str, int]) -> dict[int, Mean]:
    """Actions a step -> mean difference with Student's interval, which is NaN where there is one pair."""
    return {n: students_mean([pairs[task]]) for task, n in sizes.items() if task in pairs}
