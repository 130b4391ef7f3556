"""Output of a running pipeline: bars and stage lines on stderr; on stdout a table row with a bar for each iteration."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from flows.pipeline import Call, Step
from flows.telling import Iteration, Summary, match_text, rate_text
from stages.frame import contract
from stages.store.workspace import StageRun

BAR_CELLS = 24
EIGHTHS = " ▏▎▍▌▋▊▉█"
LEVELS = "▁▂▃▄▅▆▇█"
COLUMNS = (
    # heading, metric, width, format
    ("episodes", "collect/episodes", 9, "{:.0f}"),
    ("return", "collect/return", 7, "{:.2f}"),
    ("L1", "critic/nll/successor", 6, "{:.2f}"),
    ("L2", "distill/nll/policy", 6, "{:.2f}"),
)
"""Between the iteration's number and its win rate. A metric that a method does not have leaves its column empty."""

EXPLAINED = "value/explained_variance"  # of the values of self_ac, on validation


class _Bar:
    """One line of the live display, gone when its total is reached."""

    def __init__(self, display: Progress, task: TaskID, total: int) -> None:
        self._display, self._task, self._left = display, task, total

    def advance(self, n: int = 1) -> None:
        self._left -= n
        self._display.advance(self._task, n)
        if self._left <= 0:
            self._display.update(self._task, visible=False)


class Display:
    """Progress on stderr: bars on a terminal, else a line a stage, nothing if quiet. rows_to: where the table goes."""

    def __init__(self, *, quiet: bool = False, rows_to: Literal["stdout", "stderr"] | None = None) -> None:
        self._quiet = quiet
        self._rows_to = rows_to
        self._console = Console(stderr=True, highlight=False)
        self._live = Progress(
            SpinnerColumn("dots" if self._console.encoding.startswith("utf") else "line"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=BAR_CELLS),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
            redirect_stdout=sys.stdout.isatty(),  # rows that go to a file must not be drawn into the display
        )
        self._headed = False

    def __enter__(self) -> Display:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def bar(self, what: str, total: int) -> contract.Progress:
        return _Bar(self._live, self._live.add_task(what, total=total), total)

    def say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, markup=False)

    def watched(self, step: Step) -> Step:
        """The same step, told of on stderr."""

        def watched(call: Call) -> StageRun:
            task = self._live.add_task(call.title, total=None)
            try:
                done = step(call)
            finally:
                self._live.remove_task(task)
            if not self._console.is_terminal:
                self.say(f"{call.title}: {'reused' if done.reused else f'{done.seconds:.1f} s'}, run {done.run_id[:8]}")
            return done

        return watched

    def row(self, row: Iteration) -> None:
        """Print one iteration as a table row. The last cell is its point of the curve, as a bar. Remarks go to stderr."""
        if self._rows_to is not None:
            rows_to = getattr(sys, self._rows_to)  # as it is now: on a terminal the rows are written above the bars
            if not self._headed:
                print(header(), file=rows_to, flush=True)
                self._headed = True
            print(table_row(row), file=rows_to, flush=True)
        for remark in remarks(row.metrics):
            self.say(f"{'base' if row.iteration < 0 else f'iteration {row.iteration}'}: {remark}")


def remarks(metrics: Mapping[str, float]) -> list[str]:
    """Problems that stop no run but mean that it learns little or nothing. A wrong limit or prompt shows early."""
    found = []
    malformed = max(metrics.get(f"{stage}/malformed_frac", 0.0) for stage in ("collect", "evaluate"))
    if malformed > 0.5:
        found.append(
            f"{malformed:.0%} of the policy's replies could not be read. Look at some (turnwise show), at roles.max_action_tokens, "
            "roles.max_thought_tokens and at roles.prompts"
        )
    for stage, what in (("refine", "action, critique or rewrite"), ("pick", "action or critique")):
        states, dropped = metrics.get(f"{stage}/states", 0.0), metrics.get(f"{stage}/dropped", 0.0)
        if states and not metrics[f"{stage}/rows"] and dropped >= states:
            found.append(f"nothing to distil: {stage} could read no {what} in any of {states:.0f} states")
    return found


def header() -> str:
    return f"{'iteration':>9}{''.join(f'{title:>{width}}' for title, _, width, _ in COLUMNS)}{'seconds':>9}  {'win rate, 95 %':<16}"


def table_row(row: Iteration) -> str:
    cells = "".join(f"{_cell(row.metrics, metric, form):>{width}}" for _, metric, width, form in COLUMNS)
    low, high = row.metrics.get("evaluate/win_low"), row.metrics.get("evaluate/win_high")
    interval = f"{low:.2f}-{high:.2f}" if low is not None and high is not None else ""
    rate = "" if row.win_rate is None else f"{row.win_rate:.2f}"
    name = "base" if row.iteration < 0 else str(row.iteration)
    return f"{name:>9}{cells}{row.seconds:>9.1f}  {rate:<5}{interval:<11}{bar(row.win_rate)}".rstrip()


def bar(share: float | None) -> str:
    """A share of 1 as a bar of eighths of a cell."""
    eighths = round((share or 0.0) * BAR_CELLS * 8)
    return EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def sparkline(shares: Sequence[float]) -> str:
    """Shares of 1 as one line of eight levels. Values below 0 or above 1 are drawn as 0 or 1."""
    return "".join(LEVELS[min(max(int(share * len(LEVELS)), 0), len(LEVELS) - 1)] for share in shares)


def ending(summary: Summary) -> list[str]:
    """The last lines of a run: the curve, the result, and where to look."""
    rates = [one["win_rate"] for one in summary.iterations if one["win_rate"] is not None]
    lines = []
    if rates:
        lines.append(f"validation  {sparkline(rates)}  {rates[0]:.2f} -> {rates[-1]:.2f}, best {max(rates):.2f}")
    if summary.base and summary.final:
        lines.append(
            f"test        base {rate_text(summary.base)} -> iteration {summary.final['iteration']} {rate_text(summary.final)}"
        )
    if summary.match:
        lines.append(f"champion    {match_text(summary.match)}")
    told = [one["metrics"][EXPLAINED] for one in summary.iterations if EXPLAINED in one.get("metrics", {})]
    if told:
        lines.append(
            f"value       {sparkline(told)}  {told[0]:.2f} -> {told[-1]:.2f} of the returns' variance explained"
        )
    short = summary.run_id[:8]
    lines.append(
        f"run {short} in {summary.seconds:.0f} s. Look: turnwise show {short}; curves in the browser: turnwise ui"
    )
    return lines


def metrics_table(old: str, new: str, before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """The metrics of a run beside those of the run that it was made from."""
    lines = [f"{key:<32}{before.get(key, math.nan):>14.5g}{value:>14.5g}" for key, value in sorted(after.items())]
    return [f"{'metric':<32}{old:>14}{new:>14}", *lines]


def comparison(old: str, new: str, compared: Sequence[Mapping[str, Any]]) -> list[str]:
    """Results of two pipeline runs side by side: win rates, or a stage's metrics."""
    if compared and "win_rate" not in {**compared[0]["old"], **compared[0]["new"]}:
        return [line for row in compared for line in (row["what"], *metrics_table(old, new, row["old"], row["new"]))]
    lines = [f"{row['what']:<20}{rate_text(row['old']):<20}{rate_text(row['new'])}".rstrip() for row in compared]
    return [f"{'win rate, 95 %':<20}{'old ' + old:<20}{'new ' + new}", *lines]


def duration(seconds: float | None) -> str:
    """In the unit that a reader thinks in: "58 s", "12 min", "3.4 h"; "-" where it is not known."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _cell(metrics: Mapping[str, float], metric: str, form: str) -> str:
    return form.format(metrics[metric]) if metric in metrics else ""


def emit(value: Any) -> None:
    """Print one JSON value; a number that JSON lacks becomes null."""
    print(json.dumps(finite(value)))


def answer(args: Namespace, value: Any, lines: Iterable[str]) -> int:
    """Print the result of a command: the value where --json asks for it, else the lines. Returns 0, the exit status."""
    emit(value) if args.json else print("\n".join(lines))
    return 0


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return value
