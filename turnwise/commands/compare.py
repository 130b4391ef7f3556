"""`turnwise compare RUN RUN ...`: differences of the runs' configs, results and curves, in the terminal."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flows.look.compare import Compared, compared
from flows.report import answer, sparkline
from flows.telling import rate_text
from flows.workspace import find_home, open_workspace

WIDTH = 18  # of a run's column
TOTALS = ("pipeline/episodes", "pipeline/generated_tokens", "pipeline/stages_s", "pipeline/cpu_s")


def compare(args: Namespace) -> int:
    """turnwise compare RUN RUN ..."""
    found = compared(args.runs, open_workspace(find_home(args.home)))
    return answer(args, asdict(found), told(found))


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


def _drawn(curves: Sequence[Sequence[float | None]]) -> list[str]:
    """Each curve with its last value. All have one scale, from the least to the greatest value of any."""
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
