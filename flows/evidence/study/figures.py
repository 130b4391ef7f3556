"""Figures from the rows of a study: means with intervals, paired differences, win rates at equal cost, cost of a win
rate. Ours.

Intervals are 95 % percentiles of a stratified bootstrap (scipy): the seeds of each task are drawn anew, the tasks stay.
Agarwal and others (NeurIPS 2021) report few runs on several tasks like this. With few seeds it covers the truth less
often than 95 % (`python -m benchmarks.checks.coverage`). So decisions use Student's interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flows.evidence.study.rows import Point, Row, evaluated

AXES = {"episodes": "episodes", "generated_tokens": "generated tokens", "cpu_s": "CPU seconds"}
"""The axes of cost, and what they are called."""
RESAMPLES = 4999
BAND_POINTS = 60  # of a curve, where its interval is drawn


@dataclass(frozen=True)
class Mean:
    """A mean with its interval, which is NaN where a task has one seed only."""

    value: float
    low: float = math.nan
    high: float = math.nan


def stratified_mean(strata: Sequence[Sequence[float]]) -> Mean:
    """The mean over tasks of the mean over each one's seeds, with its stratified bootstrap interval.

    strata: by task, one number a seed. Raises ValueError where there is none.
    """
    value, (low, high) = _mean_of_means(*map(np.asarray, strata)), (math.nan, math.nan)
    if all(len(one) > 1 for one in strata):
        low, high = _interval([np.asarray(one, dtype=np.float64) for one in strata])
    return Mean(float(value), float(low), float(high))


def students_mean(strata: Sequence[Sequence[float]]) -> Mean:
    """The same mean with Student's 95 % interval; over several tasks with the degrees of freedom of Welch (1947).

    strata: by task, one number a seed. With few seeds the interval is wide, but right if the errors are about normal.
    Raises ValueError where there is none.
    """
    from scipy.stats import t

    samples = [np.asarray(one, dtype=np.float64) for one in strata]
    value = float(_mean_of_means(*samples))
    if any(len(one) < 2 for one in samples):
        return Mean(value)
    squared = np.array([one.var(ddof=1) / len(one) for one in samples]) / len(samples) ** 2  # of each task's share
    if not squared.any():
        return Mean(value, value, value)
    freedom = squared.sum() ** 2 / (squared**2 / [len(one) - 1 for one in samples]).sum()
    low, high = t.interval(0.95, freedom, value, math.sqrt(squared.sum()))
    return Mean(value, float(low), float(high))


def band(curves: Sequence[Sequence[Point]], axis: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The mean of a method's curves on one task against a cost, with its interval: xs, mean, low, high.

    Whole curves are drawn anew, one a seed. The band ends where the shortest curve ends.
    """
    xs = np.linspace(0.0, min(curve[-1][axis] for curve in curves), BAND_POINTS)
    rates = np.array([[at(curve, axis, x) for x in xs] for curve in curves])
    if len(curves) == 1:
        return xs, rates[0], rates[0], rates[0]
    low, high = _interval([rates])
    return xs, rates.mean(axis=0), low, high


def at(curve: Sequence[Point], axis: str, x: float, measure: str = "win_rate") -> float:
    """Win rate, or return, at a cost, linear between evaluations; NaN beyond the last one."""
    if x > curve[-1][axis]:
        return math.nan
    return float(np.interp(x, [point[axis] for point in curve], [point[measure] for point in curve]))


def checkpoints(rows: Sequence[Row], axis: str) -> list[float]:
    """Costs to compare at: a quarter, half and all of the shortest run, then doubled until the longest one ends."""
    ends = [float(evaluated(row)[-1][axis]) for row in rows]
    first = min(ends)
    if first <= 0:
        return []
    doublings = int(math.log2(max(ends) / first) + 1e-9)
    return [first / 4, first / 2, *(first * 2**k for k in range(doublings + 1))]


def reached(curve: Sequence[Point], level: float) -> Point | None:
    """The first point after the start whose win rate is at the level; None where there is none: the run is censored."""
    return next((point for point in curve if point["iteration"] >= 0 and point["win_rate"] >= level), None)


def cost_to(row: Row, level: float, axis: str) -> float:
    """The cost at which a run reached the level; infinite where it did not, which is later than all that did."""
    point = reached(evaluated(row), level)
    return math.inf if point is None else float(point[axis])


def median_cost(rows: Sequence[Row], level: float, axis: str) -> float:
    """Median over seeds of the cost at which the level was reached. A run that did not reach it counts as later than
    all others. So the median is infinite if half of the runs did not reach it.
    """
    return float(statistics.median(cost_to(row, level, axis) for row in rows))


def differences(rows: Sequence[Row], controls: Sequence[Row]) -> dict[str, list[float]]:
    """Task -> final win rate minus that of the control's run on the same task and seed, where there is one."""
    final = {(row["task"], row["seed"]): row["final"] for row in controls}
    found: dict[str, list[float]] = {}
    for row in rows:
        if (where := (row["task"], row["seed"])) in final:
            found.setdefault(row["task"], []).append(row["final"] - final[where])
    return found


def _interval(strata: Sequence[np.ndarray]) -> tuple[Any, Any]:
    """strata: (seeds, ...) by task; what follows the first axis is drawn together."""
    from scipy.stats import bootstrap

    found = bootstrap(
        strata,
        _mean_of_means,
        axis=0,
        vectorized=True,
        method="percentile",
        n_resamples=RESAMPLES,
        rng=np.random.default_rng(0),  # a report of the same rows is the same report
    ).confidence_interval
    return found.low, found.high


def _mean_of_means(*strata: np.ndarray, axis: int = 0) -> Any:
    return np.mean([one.mean(axis=axis) for one in strata], axis=0)
