"""The stored row of a finished run: one line of JSON with win rates, returns and costs by iteration. Ours.

The lines of docs/results/*.jsonl have this form. Those of a study also name their cell.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Point = Mapping[str, Any]

COSTS = ("episodes", "generated_tokens", "cpu_s", "stages_s")


def row(summary: Mapping[str, Any], preset: str, seed: int, sets: Sequence[str], commit: str) -> Row:
    """base, final: win rates of the test split. final_return: the mean return there, which differs where single turns
    pay. curve: validation win rate, mean return and cumulative cost, the base model first.

    summary: what `turnwise run --json` prints.
    """
    curve = []
    for point in summary["iterations"]:
        costs = {name: round(point["metrics"].get(f"pipeline/{name}", 0.0), 1) for name in COSTS}
        rates = {"win_rate": point["win_rate"], "return": point["metrics"].get("evaluate/return")}
        curve.append({"iteration": point["iteration"], **rates, **costs})
    base, final = summary["base"], summary["final"]
    ends = {"base": base["win_rate"], "final": final["win_rate"], "final_return": final["return"]}
    return {"preset": preset, "seed": seed, "sets": list(sets), "commit": commit, **ends, "curve": curve}


def evaluated(row: Row) -> list[Point]:
    """The points of the curve that have a win rate."""
    return [point for point in row["curve"] if point["win_rate"] is not None]


def best_validation(row: Row) -> float:
    """Of the adapter that the run chose: the highest of its curve, the base model left out."""
    return max(float(point["win_rate"]) for point in evaluated(row) if point["iteration"] >= 0)


def mean_validation(row: Row) -> float:
    """Of all its evaluated iterations, the base model left out: higher where a run learns sooner."""
    return statistics.mean(float(point["win_rate"]) for point in evaluated(row) if point["iteration"] >= 0)
