"""Choose the transitions that the critic learns from next: more often those that it predicts badly.

Source: NLAC (arXiv 2512.04601), "Replay": samples are prioritised by the critic's loss; the paper gives no formula. The
rule and the weights are those of prioritised experience replay (Schaul et al. 2016, arXiv 1511.05952, eq. 1 and section
3.4).
Departures: a batch holds no transition twice; the weights, of mean 1, are not divided by their maximum.
The losses should be length-normalised (NLL a token), or long targets win.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MANY = 100_000
"""Of how many on a few are drawn by one sum. Of fewer the clocks take 3 ms, and those are the draws of stored runs."""
BLOCK = 128  # entries that are summed before it is looked for one of them
TRIES = 20  # draws in a row of as many as are missing: where they bring few that are new, p is of few entries


def priorities(losses: Floats, alpha: float, eps: float) -> Floats:
    """Probability of each transition to be drawn first.

        p_i = (loss_i + eps)^alpha / sum_j (loss_j + eps)^alpha

    A new transition has loss NaN and counts with the largest loss known (all new: uniform), so that it is seen soon.
    alpha = 0 is uniform sampling. losses: (N,), >= 0 or NaN. alpha >= 0. eps > 0: no transition is ever given up.
    Returns (N,), sums to 1. Raises ValueError on an empty, negative or infinite loss, or alpha or eps out of range.
    """
    losses = np.asarray(losses, dtype=np.float64)
    if losses.ndim != 1 or losses.size == 0:
        raise ValueError(f"losses must be (N,) with N >= 1, found shape {losses.shape}")
    if alpha < 0 or eps <= 0:
        raise ValueError(f"alpha must be >= 0 and eps > 0, found alpha = {alpha}, eps = {eps}")
    new = np.isnan(losses)
    known = losses[~new]
    if np.any(known < 0) or np.any(np.isinf(known)):
        raise ValueError(f"losses must be finite and >= 0 (NaN = new), found {known.min()} to {known.max()}")
    filled = np.where(new, known.max() if known.size else 1.0, losses)
    weights: Floats = (filled + eps) ** alpha
    p: Floats = weights / weights.sum()
    return p


def sample_without_replacement(rng: np.random.Generator, p: Floats, n: int) -> Ints:
    """n different indices, drawn one after the other in proportion to p among those that are left.

        the n smallest of E_i / p_i,  E_i ~ Exponential(1)

    Of independent exponential clocks with rates p_i, clock i rings first with probability p_i / sum(p). Clocks have no
    memory, so the others go on by the same rule. That is one partial sort instead of n draws.
    p: (N,), >= 0, need not sum to 1. Returns (n,) in the order drawn.
    Raises ValueError if p is negative or not finite, or if fewer than n entries are above 0.
    """
    p = np.asarray(p, dtype=np.float64)
    if p.ndim != 1 or not np.all(np.isfinite(p)) or np.any(p < 0):
        raise ValueError("p must be (N,), finite and >= 0")
    n_possible = int(np.count_nonzero(p))
    if not 0 <= n <= n_possible:
        raise ValueError(f"{n} different indices wanted, {n_possible} have a probability above 0")
    return few_of_many(rng, p, n) if p.size >= MANY and 100 * n <= n_possible else by_clocks(rng, p, n)


def by_clocks(rng: np.random.Generator, p: Floats, n: int) -> Ints:
    """As `sample_without_replacement`, with a clock for every entry: for any p and n."""
    possible = np.flatnonzero(p)
    clocks = rng.standard_exponential(possible.size) / p[possible]
    first = np.argpartition(clocks, n - 1)[:n] if 0 < n < clocks.size else np.arange(n)
    drawn: Ints = possible[first[np.argsort(clocks[first])]].astype(np.int64)
    return drawn


def few_of_many(rng: np.random.Generator, p: Floats, n: int) -> Ints:
    """As `sample_without_replacement`, by one sum over p: draws with replacement, of which repeated ones do not count.

    The next one that is new is drawn in proportion to p among those that are left, as is wanted. Where a few entries
    have nearly all of p, the clocks draw what is still missing.
    """
    ends = np.cumsum(np.add.reduceat(p, np.arange(0, p.size, BLOCK)))
    drawn: Ints = np.empty(0, dtype=np.int64)
    for _ in range(TRIES):
        if drawn.size == n:
            return drawn
        both = np.concatenate([drawn, _at(rng.random(n - drawn.size) * ends[-1], p, ends)])
        drawn = both[np.sort(np.unique(both, return_index=True)[1])]
    left = p.copy()
    left[drawn] = 0
    return np.concatenate([drawn, by_clocks(rng, left, n - drawn.size)])


def _at(places: Floats, p: Floats, ends: Floats) -> Ints:
    """The entries in whose share of [0, sum p) the places are. Of a place that rounding put behind the end there is none.

    p: (N,). ends: the sum of all p up to the end of each block. An entry of probability 0 has no share.
    """
    block = np.searchsorted(ends, places, side="right")
    places, block = places[block < ends.size], block[block < ends.size]
    inside = places - np.concatenate([[0.0], ends])[block]
    entries = block[:, None] * BLOCK + np.arange(BLOCK)
    shares = np.where(entries < p.size, p[np.minimum(entries, p.size - 1)], 0)
    within = (shares.cumsum(axis=1) <= inside[:, None]).sum(axis=1)
    found: Ints = (block * BLOCK + within)[within < BLOCK]
    return found[found < p.size]


def importance_weights(p: Floats, index: Ints, beta: float) -> Floats:
    """Weight of each drawn row's loss that undoes the preference of the draw.

        w_i = (N p_i)^(-beta)

    beta = 0: all 1. The fixed point is that of the preferred rows, which differs for stochastic targets. beta = 1: mean
    1 under p, and the weighted loss estimates the uniform mean. This is exact for a single draw, and nearly so for
    batches much smaller than the replay. (Without replacement, the chance to be in a batch is n p_i only to first
    order.)
    p: (N,) as from `priorities`. index: (n,). beta in [0, 1]. Returns (n,). Raises ValueError if p does not sum to 1
    or holds a 0 at a drawn index, or if beta is out of range.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1], found {beta}")
    p = np.asarray(p, dtype=np.float64)
    if abs(p.sum() - 1) > 1e-9:
        raise ValueError(f"p must sum to 1, found {p.sum()}")
    drawn = p[index]
    if np.any(drawn <= 0):
        raise ValueError("a row of probability 0 cannot have been drawn")
    weights: Floats = (p.size * drawn) ** -beta
    return weights
