"""Metrics of values and advantages in rows of Self-AC. A step's variances cover the whole step, however it was packed.
[ours]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stages.learn.episode_row import PackedRow
from stages.learn.later import Later
from stages.learn.returns import monte_carlo, state_mask
from stages.train import history

MOMENTS = ("n", "r", "rr", "e", "ee")  # see `moments`


def moments(values_BM: Tensor, row: PackedRow, *, gamma: float) -> Later:
    """Count, R, R^2, error and error^2, summed over states of terminated episodes, for `of_step`'s variances. The host
    works them out of the values.
    """
    here, dtype = row.on_host, values_BM.dtype

    def told(found: list[list[float]]) -> dict[str, float]:
        values = torch.tensor(found, dtype=dtype)
        returns = monte_carlo(here.rewards, values, here.n_turns, here.truncated, gamma=gamma)
        known = state_mask(here.n_turns, here.truncated, values.shape[1]) & ~here.truncated[:, None]
        r, error = returns[known].double(), (returns - values)[known].double()
        return {
            "n": float(len(r)),
            "r": float(r.sum()),
            "rr": float(r.square().sum()),
            "e": float(error.sum()),
            "ee": float(error.square().sum()),
        }

    return Later([values_BM], told)


def of_turns(advantages_J: Tensor) -> Later:
    """Means over a row's turns of A and A^2, from which `of_step` has the deviation of a step's advantages."""

    def told(found: list[float]) -> dict[str, Any]:
        found_J = torch.tensor(found, dtype=torch.float64)
        means = {"advantage_mean": float(found_J.mean()), "advantage_square": float(found_J.square().mean())}
        return means | {f"count/{name}": float(len(found)) for name in means}

    return Later([advantages_J], told)


def of_step(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its rows. Losses are already divided by the step's counts, so they add up, like
    tokens. Variances cover the whole step; the rest are means over their counts.
    """
    sums = [name for name in parts[0] if name.startswith(("value_loss", "actor_loss")) or name == "tokens"]
    found = {name: sum(part[name] for part in parts) for name in sums}
    n, r, rr, e, ee = (sum(part[name] for part in parts) for name in MOMENTS)
    variance = rr / n - (r / n) ** 2 if n else 0.0
    if variance > 1e-12:
        found["explained_variance"] = 1 - (ee / n - (e / n) ** 2) / variance
    apart = {*sums, *MOMENTS}
    rest = history.of_step([{name: part[name] for name in part if name not in apart} for part in parts])
    of_advantages = rest.pop("advantage_square") - rest["advantage_mean"] ** 2
    return found | rest | {"advantage_deviation": max(of_advantages, 0.0) ** 0.5}
