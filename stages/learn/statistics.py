"""Numbers that tables report: intervals, rank correlation, AUROC, calibration, and how much of a target leaks.

Plain numpy; each function names its equation and source. Nothing here is trained on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from stages.frame.types import Row

# Words that any text holds, so that sharing them shows nothing. Not "yes" and "no": in a dialogue they are the answer.
_FUNCTION_WORDS = """
a about above after again against all also although am an and any are as at be because been before being below between both but by
can cannot could did do does doing down during each either else few for from further had has have having he her here hers him his how i
if in into is it its itself just may me might more most must my neither nor not now of off on once only or other ought our ours out
over own same shall she should since so some such than that the their theirs them then there therefore these they this those though
through thus to too under until up upon us very was we were what when where whether which while who whom whose why will with within
without would yet you your yours
"""
_FUNCTION_WORD_SET = frozenset(_FUNCTION_WORDS.split())
_WORD = re.compile(r"[^\W_]+(?:['’\-_.][^\W_]+)*")


def wilson(wins: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """Confidence interval of a win rate.

        (p + z^2/2n -+ z sqrt(p (1 - p)/n + z^2/4n^2)) / (1 + z^2/n),  p = wins / n

    n may be an effective number of rows (`share_interval`).
    Unlike p -+ z sqrt(p (1 - p)/n) it has a width at 0 and n wins. n = 0: (0, 1), nothing is known.
    Raises ValueError unless 0 <= wins <= n. Source: Wilson 1927.
    """
    if not 0 <= wins <= n:
        raise ValueError(f"wins must be in [0, n], found wins = {wins}, n = {n}")
    if n == 0:
        return 0.0, 1.0
    p, spread = wins / n, z * z / n
    centre = (p + spread / 2) / (1 + spread)
    half = math.sqrt(spread * p * (1 - p) + spread * spread / 4) / (1 + spread)
    # Exact ends where rounding would leave 1e-17 and the wrong side of the rate.
    return (0.0 if wins == 0 else centre - half), (1.0 if wins == n else centre + half)


def share_interval(values: ArrayLike, clusters: Sequence[Hashable]) -> tuple[float, float]:
    """95 % interval of a share of rows that come in clusters, such as the turns of an episode.

        v = G/(G - 1) sum_g (sum_{i in g} (y_i - p))^2 / n^2,   Wilson's interval for p at the effective number of rows
            p (1 - p) / v, at most n

    With one row a cluster that is n - 1. At p = 0 and p = 1, where v says nothing, a cluster counts as one row.
    values: (n,) of 0/1, clusters: of each row. No row: (0, 1). Raises ValueError on other values or lengths. Source:
    Kish 1965 (design effect), Wilson 1927.
    """
    y, _ = _scored(values, values)
    group = _numbered(clusters, y.size)
    if not y.size:
        return 0.0, 1.0
    p, n_groups = float(y.mean()), int(group.max()) + 1
    sums = np.bincount(group, weights=y - p)
    v = n_groups / max(n_groups - 1, 1) * float((sums**2).sum()) / y.size**2
    alike = n_groups == 1 or p in (0.0, 1.0)
    n = float(n_groups) if alike else min(p * (1 - p) / v, float(y.size)) if v > 0 else float(y.size)
    return wilson(p * n, n)


def cluster_draws(clusters: Sequence[Hashable], n: int, seed: int) -> list[np.ndarray]:
    """n draws of as many clusters as there are, with repeats: row numbers, for `bootstrap_interval`."""
    group = _numbered(clusters, len(clusters))
    members = [np.flatnonzero(group == g) for g in range(int(group.max()) + 1)] if group.size else []
    rng = np.random.default_rng(seed)
    drawn = (rng.integers(len(members), size=len(members)) for _ in range(n if members else 0))
    return [np.concatenate([members[g] for g in draw]) for draw in drawn]


def bootstrap_interval(statistic: Callable[[np.ndarray], float], draws: Sequence[np.ndarray]) -> tuple[float, float]:
    """Percentile interval, 95 %, of a statistic of row numbers over draws of whole clusters.

    Draws where it is NaN are left out; (NaN, NaN) where it is in more than half. For statistics that are no share; with
    a few dozen clusters it covers the truth a little too rarely. Source: Efron 1979; Field and Welsh 2007 (clusters).
    """
    found = np.array([statistic(rows) for rows in draws])
    known = found[~np.isnan(found)]
    if 2 * known.size <= found.size:
        return math.nan, math.nan
    low, high = np.quantile(known, [0.025, 0.975])
    return float(low), float(high)


def _numbered(clusters: Sequence[Hashable], n: int) -> np.ndarray:
    """The cluster of each row as a number from 0."""
    if len(clusters) != n:
        raise ValueError(f"one cluster a row wanted, found {len(clusters)} for {n} rows")
    names = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    return np.array([names[name] for name in clusters], dtype=np.int64)


def pass_hat(wins: int, trials: int, k: int) -> float:
    """pass^k of a scenario: the chance that k of its trials, drawn without repeats, are all won. Unbiased.

        C(wins, k) / C(trials, k)

    Raises ValueError unless 0 <= wins <= trials and 1 <= k <= trials. Source: tau-bench, arXiv 2406.12045.
    """
    if not (0 <= wins <= trials and 1 <= k <= trials):
        raise ValueError(
            f"wanted 0 <= wins <= trials, 1 <= k <= trials; found wins = {wins}, trials = {trials}, k = {k}"
        )
    return math.comb(wins, k) / math.comb(trials, k)


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Spearman's rank correlation, ties sharing their mean rank.

    Pairs with a NaN are left out. NaN where it is not defined: fewer than 2 pairs, or x or y constant.
    x, y: (n,). Raises ValueError if their shapes differ.
    """
    a, b = _pair(x, y)
    known = ~(np.isnan(a) | np.isnan(b))
    a, b = a[known], b[known]
    if a.size < 2 or np.all(a == a[0]) or np.all(b == b[0]):
        return math.nan
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def auroc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Probability that a positive has a higher score than a negative, a tie counting one half.

        (sum of the positives' ranks - n_pos (n_pos + 1)/2) / (n_pos n_neg)

    NaN if one class is missing. scores: (n,), labels: (n,) of 0/1. Raises ValueError on others, and NaN scores.
    Source: Mann and Whitney 1947.
    """
    s, y = _scored(scores, labels)
    n_pos = int(y.sum())
    n_neg = y.size - n_pos
    if n_pos == 0 or n_neg == 0:
        return math.nan
    return float((_ranks(s)[y == 1].sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg))


def calibration(scores: ArrayLike, labels: ArrayLike, bins: int, clusters: Sequence[Hashable]) -> list[Row]:
    """Observed frequency by predicted probability: a row for each of `bins` parts of [0, 1] with a score.

    Row: low, high (the part; high belongs to the next one, 1 to the last), n, mean_score, rate (share of labels 1),
    rate_low, rate_high (`share_interval`, 95 %). Calibrated: mean_score within rate_low..rate_high in about 95 % of the
    rows.
    scores: (n,) in [0, 1], labels: (n,) of 0/1, clusters: of each row. Raises ValueError on others, or bins < 1.
    """
    s, y = _scored(scores, labels)
    _numbered(clusters, y.size)
    if bins < 1 or np.any(s < 0) or np.any(s > 1):
        raise ValueError("scores must be in [0, 1] and bins >= 1")
    part = np.minimum((s * bins).astype(int), bins - 1)
    rows: list[Row] = []
    for b in np.unique(part):
        inside = part == b
        wins, n = int(y[inside].sum()), int(inside.sum())
        low, high = share_interval(y[inside], [c for c, here in zip(clusters, inside, strict=True) if here])
        ends = {"low": float(b / bins), "high": float((b + 1) / bins)}
        rows.append(
            {
                **ends,
                "n": n,
                "mean_score": float(s[inside].mean()),
                "rate": wins / n,
                "rate_low": low,
                "rate_high": high,
            }
        )
    return rows


def leak_rate(
    targets: Sequence[str], privileged: Sequence[str], known: Sequence[str], *, n: int = 1
) -> tuple[float, float]:
    """How much of what the targets say could only be known from their teacher's prompt.

        share_i = |U(target_i) & U(privileged_i) - U(known_i)| / |U(target_i)|
        returns (share of rows with share_i > 0, mean of share_i)

    U(text): its different runs of n words, lower case, that hold at least one content word (numbers are content words).
    A text without such a run has share 0. Words in neither prompt (invented, or another form) are no leak.
    It reads words, not meaning: it misses a paraphrase and counts a guess that came true. So compare it with the same
    measure on privileged texts of other rows. targets, privileged (s', reward, critique), known (student prompt): one a
    row. No row: (0, 0).
    Raises ValueError if their numbers differ or n < 1. Source: docs/reference/paper-map.md, CoT correction.
    """
    if not len(targets) == len(privileged) == len(known):
        raise ValueError(
            f"one text a row wanted, found {len(targets)} targets, {len(privileged)} privileged, {len(known)} known"
        )
    if n < 1:
        raise ValueError(f"n must be >= 1, found {n}")
    shares = [_leaked_share(*row, n) for row in zip(targets, privileged, known, strict=True)]
    if not shares:
        return 0.0, 0.0
    return sum(share > 0 for share in shares) / len(shares), sum(shares) / len(shares)


def _leaked_share(target: str, privileged: str, known: str, n: int) -> float:
    said = _units(target, n)
    leaked = (said & _units(privileged, n)) - _units(known, n)
    return len(leaked) / len(said) if said else 0.0


def _units(text: str, n: int) -> set[tuple[str, ...]]:
    words = _WORD.findall(text.lower())
    runs = (tuple(words[i : i + n]) for i in range(len(words) - n + 1))
    return {run for run in runs if any(word not in _FUNCTION_WORD_SET for word in run)}


def _ranks(x: np.ndarray) -> np.ndarray:
    """1 for the smallest; equal values share the mean of their ranks."""
    _, value, counts = np.unique(x, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[value])


def _pair(x: ArrayLike, y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape:
        raise ValueError(f"two lists of one length wanted, found shapes {a.shape} and {b.shape}")
    return a, b


def _scored(scores: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    s, y = _pair(scores, labels)
    if np.any(np.isnan(s)) or not np.all(np.isin(y, (0, 1))):
        raise ValueError("scores must not be NaN, labels must be 0 or 1")
    return s, y
