"""Uses of a free value function: predicting the return, choosing one of n, early abort.

Plain numpy over values that were read already. V(s_k) stands before action k, so V(s_0) .. V(s_{N-1}) have seen no
outcome; the text of the terminal state s_N may tell the verdict, and nothing here reads V(s_N). Source: Self-AC slides
name the uses; the measures are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from stages.frame.types import Row


def returns_to_go(rewards: Sequence[float], *, gamma: float) -> list[float]:
    """What values stand for, of a terminated episode: R_k = r_k + gamma R_{k+1}, R_N = r_N, the last reward.

    rewards: (N,), one a turn. Returns (N + 1,). Raises ValueError for an episode without a turn.
    Source: Self-AC slides, episode layout; `learn.episode_row.episode_ids` places the rewards alike.
    """
    if not len(rewards):
        raise ValueError("returns_to_go wants at least one reward, found none")
    found = [float(rewards[-1])]
    for reward in (0.0, *reversed(rewards[:-1])):
        found.append(reward + gamma * found[-1])
    return found[::-1]


def explained_variance(values: ArrayLike, returns: ArrayLike) -> float:
    """How much of the returns' variance the values explain.

        1 - Var[R - V] / Var[R]

    1: they tell it but for a constant; 0: no better than one; below 0: worse. NaN of equal returns, or none.
    values, returns: (n,). Raises ValueError if their shapes differ or a number is not finite.
    """
    v, r = np.asarray(values, dtype=np.float64), np.asarray(returns, dtype=np.float64)
    if v.ndim != 1 or v.shape != r.shape or not (np.isfinite(v).all() and np.isfinite(r).all()):
        raise ValueError(f"values and returns must be finite lists of one length, found shapes {v.shape} and {r.shape}")
    if r.size == 0 or np.all(r == r[0]):
        return math.nan
    return float(1 - np.var(r - v) / np.var(r))


def best_of_n(wins: ArrayLike, values: ArrayLike | None = None) -> dict[str, float]:
    """Win rate of one episode of n, chosen by chance (`random`, the mean), the largest `value`, or an `oracle`.

    wins: (S, n), 1 where episode i of a scenario was won. values: (S, n), V of the last state before its last action,
    s_{N-1} [ours]; None = there is no critic, and no `value`. Ties go to the first. Raises ValueError for other shapes,
    no episode, a win that is not 0 or 1, or NaN.
    """
    w = np.asarray(wins, dtype=np.float64)
    if w.ndim != 2 or not w.size or not np.isin(w, (0, 1)).all():
        raise ValueError(f"wins must be 0 or 1, of shape (scenarios, n), found shape {w.shape}")
    found = {"random": float(w.mean()), "oracle": float(w.max(1).mean())}
    if values is not None:
        v = np.asarray(values, dtype=np.float64)
        if v.shape != w.shape or np.isnan(v).any():
            raise ValueError(f"values must be numbers of the wins' shape {w.shape}, found shape {v.shape}")
        found["value"] = float(w[np.arange(len(w)), v.argmax(1)].mean())
    return found


def abort_table(
    values: Sequence[Sequence[float]],
    tokens: Sequence[Sequence[int]],
    wins: Sequence[bool],
    thresholds: Sequence[float],
    *,
    first: int = 1,
) -> list[Row]:
    """What would have been saved and lost, had every episode ended at its first state of a value below the threshold.

    Episode i is aborted before action k, the first k >= `first` with V(s_k) < threshold: tokens of k .. N-1 are saved.
    Row: threshold, aborted (share of episodes), tokens_saved (of all action tokens), wins_lost (of those won, or 0).
    values, tokens: per episode (N,), of states and actions 0 .. N-1. first: 1, since V(s_0) tells the scenario [ours].
    Raises ValueError where lengths differ, or there is no episode.
    """
    if (
        not len(values) == len(tokens) == len(wins)
        or not len(wins)
        or [len(v) for v in values] != [len(t) for t in tokens]
    ):
        raise ValueError("abort_table wants at least one episode, with as many values as actions and one win each")
    # An episode is over from its first low value on, so action k is saved just where the lowest value so far lies below
    # the threshold.
    lowest = [np.minimum.accumulate(np.asarray(v[first:], dtype=np.float64)) for v in values]
    at, counts = np.concatenate(lowest), np.concatenate([np.asarray(t[first:], dtype=np.float64) for t in tokens])
    ends = np.array([low[-1] if len(low) else math.inf for low in lowest])
    won, total = np.asarray(wins, dtype=bool), float(sum(map(sum, tokens)))
    rows = []
    for threshold in thresholds:
        stopped = ends < threshold
        rows.append({
            "threshold": float(threshold),
            "aborted": float(stopped.mean()),
            "tokens_saved": float(counts[at < threshold].sum()) / max(total, 1.0),
            "wins_lost": float(stopped[won].mean()) if won.any() else 0.0,
        })  # fmt: skip
    return rows


def abort_thresholds(values: Sequence[Sequence[float]], *, n: int = 20, first: int = 1) -> list[float]:
    """n + 1 thresholds from the lowest value (no abort) to the highest, at equal shares of the states; [] of none."""
    flat = [v for episode in values for v in episode[first:]]
    return [float(x) for x in np.quantile(flat, np.linspace(0, 1, n + 1))] if flat else []


def choose_threshold(rows: Sequence[Row], most_lost: float) -> float:
    """The threshold of a table that saves most tokens and loses at most this share of wins; -inf (no abort) if none.

    Chosen and judged on the same episodes it flatters: choose on validation, judge on test.
    """
    allowed = [row for row in rows if row["wins_lost"] <= most_lost]
    return float(max(allowed, key=lambda row: row["tokens_saved"])["threshold"]) if allowed else -math.inf


def binned_returns(values: ArrayLike, returns: ArrayLike, bins: int) -> list[Row]:
    """Calibration of a value: mean return by its size, in up to `bins` parts of like many states; equal ones together.

    Row: low, high (smallest and largest value), n, mean_value, mean_return. Calibrated: the two means are equal. Unlike
    `statistics.calibration` it needs no scores in [0, 1]. values, returns: (n,). Raises ValueError for others.
    """
    v, r = np.asarray(values, dtype=np.float64), np.asarray(returns, dtype=np.float64)
    if v.ndim != 1 or v.shape != r.shape or bins < 1:
        raise ValueError(
            f"two lists of one length and bins >= 1 wanted, found shapes {v.shape} and {r.shape}, bins {bins}"
        )
    # By how many values are smaller: equal ones share the number, and so the part.
    part = np.searchsorted(np.sort(v), v) * bins // max(len(v), 1)
    rows = []
    for b in np.unique(part):
        x, y = v[part == b], r[part == b]
        rows.append(
            {
                "low": float(x.min()),
                "high": float(x.max()),
                "n": len(x),
                "mean_value": float(x.mean()),
                "mean_return": float(y.mean()),
            }
        )
    return rows
