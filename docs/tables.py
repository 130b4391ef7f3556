"""Writes the tables of the results pages from the stored rows of the studies.

    python docs/tables.py              write every table between its markers
    python docs/tables.py --check      exit 1 if a page is not what would be written
    python docs/tables.py --pictures   draw the curves of docs/results/tables.toml that are missing

A page says where a table stands:

    <!-- table ladder -->
    <!-- end -->

docs/results/tables.toml says what is in it: [tables.ladder] has its data (a file of docs/results/), its lines and its
columns. A cell is described by its table, its line and its column together; the column has the last word.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from flows.evidence.study.cells import standing
from flows.evidence.study.design import read as read_study
from flows.evidence.study.figures import at, differences, median_cost, reached, stratified_mean, students_mean
from flows.evidence.study.page import SVG, XLINK, draw
from flows.evidence.study.rows import Row, evaluated
from flows.evidence.study.tables import OWN, cost, rate

DOCS = Path(__file__).resolve().parent
RESULTS, STUDIES = DOCS / "results", DOCS.parent / "studies"
PAGES = (
    DOCS.parent / "README.md",
    DOCS / "results.md",
    DOCS / "explanation/choosing.md",
    *sorted(RESULTS.glob("*.md")),
)
MARKED = re.compile(r"(?<=<!-- table )([\w-]+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
LEVEL = 0.6

Spec = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    parser.add_argument("--pictures", action="store_true", help="draw the curves that are missing, too")
    args = parser.parse_args(arguments)
    plan = spec_file()
    old = []
    for page in PAGES:
        text = page.read_text("utf-8")
        if (new := filled(text, plan)) != text:
            old.append(page)
            if not args.check:
                page.write_text(new, "utf-8")
    if args.check and old:
        print(f"Not up to date: {', '.join(page.name for page in old)}. Run: python docs/tables.py", file=sys.stderr)
    if args.pictures:
        for name, one in plan["pictures"].items():
            if not (file := RESULTS / f"{name}.svg").exists():
                file.write_text(picture(one), "utf-8")
    return 1 if args.check and old else 0


def spec_file() -> dict[str, Any]:
    return tomllib.loads((RESULTS / "tables.toml").read_text("utf-8"))


def filled(text: str, plan: Spec) -> str:
    """A page with every table between its markers written anew. Raises KeyError for a table that the plan does not have."""
    return MARKED.sub(lambda match: f"{match[1]}{match[2]}\n{table(match[1], plan)}\n\n", text)


def table(name: str, plan: Spec) -> str:
    """One table as Markdown."""
    one = plan["tables"][name]
    columns = [plan["columns"][column] if isinstance(column, str) else column for column in one["columns"]]
    lines = [{"method": line} if isinstance(line, str) else line for line in one["lines"]]
    shared = {key: value for key, value in one.items() if key not in ("columns", "lines", "first")}
    grid = [[one.get("first", "method"), *(column["head"] for column in columns)]]
    for line in lines:
        label = line.get("label") or plan["labels"].get(line["method"], f"`{line['method']}`")
        grid.append([label, *(cell({"show": "rate", **shared, **line, **column}) for column in columns)])
    head, *body = [f"| {' | '.join(cells)} |" for cells in grid]
    return "\n".join([head, f"|{'---|' * len(grid[0])}", *body])


def cell(spec: Spec) -> str:
    """The text of a cell; "" where there is no run."""
    mine = rows(spec)
    return SHOWN[spec["show"]](mine, spec) if mine else ""


@cache
def stored(name: str) -> tuple[Row, ...]:
    return tuple(map(json.loads, (RESULTS / f"{name}.jsonl").read_text("utf-8").splitlines()))


def rows(spec: Spec) -> list[Row]:
    """The runs of a cell by seed, with the figure that is compared as their `final`."""
    part = "tuning" if spec["show"] in ("tuning", "chosen") else "table"
    found = [
        _measured(row, spec)
        for row in stored(spec["data"])
        if (row["part"], row["method"]) == (part, spec["method"])
        and spec.get("task") in (None, row["task"])
        and ("seeds" not in spec or row["seed"] in spec["seeds"])
        and ("setting" not in spec or row["setting"] == spec["setting"])
    ]
    return sorted(found, key=lambda row: row["seed"])


def _measured(row: Row, spec: Spec) -> Row:
    """Test at the end, or validation at a cost."""
    measure = spec.get("measure", "win_rate")
    if "at" in spec:
        return row | {"final": at(evaluated(row), spec.get("axis", "episodes"), spec["at"], measure)}
    return row | {"final": row["final_return"]} if measure == "return" else row


def _rate(mine: list[Row], spec: Spec) -> str:
    return rate(stratified_mean([[row["final"] for row in mine]]))


def _seeds(mine: list[Row], spec: Spec) -> str:
    return " ".join(f"{row['final']:.2f}" for row in mine)


def _minus(mine: list[Row], spec: Spec, *, turned: bool = False) -> str:
    """Its figure minus that of the runs that `of` names, pair by pair, with Student's interval."""
    of = spec["of"] if isinstance(spec["of"], dict) else {"method": spec["of"]}
    other = rows({**spec, **of})
    if not other or all(spec[key] == value for key, value in of.items()):
        return ""
    found = differences(other, mine) if turned else differences(mine, other)
    return rate(students_mean(list(found.values())), "+.2f")


def _next(mine: list[Row], spec: Spec) -> str:
    """Where one more run should lie: Student's 95 % prediction interval, which is wider than that of the mean."""
    if len(mine) < 2:
        return ""
    mean = students_mean([[row["final"] for row in mine]])
    half = (mean.high - mean.value) * (len(mine) + 1) ** 0.5
    return f"{max(0.0, mean.value - half):.2f} to {min(1.0, mean.value + half):.2f}"


def _reached(mine: list[Row], spec: Spec) -> str:
    return f"{sum(reached(evaluated(row), LEVEL) is not None for row in mine)} of {len(mine)}"


def _to(mine: list[Row], spec: Spec) -> str:
    """The median cost of the level; where half of the runs did not get there, how many did."""
    median = cost(median_cost(mine, LEVEL, spec.get("axis", "episodes")))
    return f"{median} ({_reached(mine, spec)})" if median == "not reached" else median


def _end(mine: list[Row], spec: Spec) -> str:
    return cost(statistics.median(row["curve"][-1][spec["axis"]] for row in mine))


def _tried(mine: list[Row], ties: str = "first") -> dict[tuple[str, ...], tuple[float, float]]:
    """Setting -> how its runs stand in the study's choice, in the order in which they ran."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in mine:
        found.setdefault(tuple(row["setting"]), []).append(row)
    return {setting: standing(runs, ties) for setting, runs in found.items()}


def _tuning(mine: list[Row], spec: Spec) -> str:
    return ", ".join(f"{mean:.2f}" for mean, _ in _tried(mine).values())


def _chosen(mine: list[Row], spec: Spec) -> str:
    """As the study chose. spec: `ties` as in its tuning."""
    tried = _tried(mine, spec.get("ties", "first"))
    best = max(tried, key=lambda setting: tried[setting])
    return f"`{' '.join(best)}`" if best else OWN


SHOWN: dict[str, Callable[[list[Row], Spec], str]] = {
    "rate": _rate,
    "base": lambda mine, spec: f"{statistics.mean(row['base'] for row in mine):.2f}",
    "seeds": _seeds,
    "minus": _minus,
    "less": lambda mine, spec: _minus(mine, spec, turned=True),
    "next": _next,
    "reached": _reached,
    "to": _to,
    "end": _end,
    "tuning": _tuning,
    "chosen": _chosen,
}


def picture(one: Spec) -> str:
    """The curves of a study's task, or what hangs on the number of actions, as an SVG that stands alone."""
    if "sizes" in one:
        from widths import widths

        return widths(one, stored(one["data"]))
    inside = draw(read_study(STUDIES / f"{one['study']}.toml"), one["task"], stored(one["data"]))
    head = f'<?xml version="1.0" encoding="utf-8"?>\n<svg xmlns="{SVG}" xmlns:xlink="{XLINK}" '
    return head + inside.removeprefix("<svg ")


if __name__ == "__main__":
    sys.exit(main())
