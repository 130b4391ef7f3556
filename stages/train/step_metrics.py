"""Metrics of values and advantages in rows of Self-AC. A step's variances cover the whole step, however it was packed.
[ours]
"""

from __future__ import annotations

from torch import Tensor

from stages.learn.episode_row import PackedRow
from stages.learn.returns import monte_carlo, state_mask
from stages.train import history

MOMENTS = ("n", "r", "rr", "e", "ee")  # see `moments`


def moments(values_BM: Tensor, row: PackedRow, *, gamma: float) -> dict[str, float]:
    """Count, R, R^2, error and error^2, summed over states of terminated episodes, for `of_step`'s variances."""
    returns = monte_carlo(row.rewards, values_BM, row.n_turns, row.truncated, gamma=gamma)
    known = state_mask(row.n_turns, row.truncated, values_BM.shape[1]) & ~row.truncated[:, None]
    r, error = returns[known].double(), (returns - values_BM)[known].double()
    return {
        "n": float(len(r)),
        "r": float(r.sum()),
        "rr": float(r.square().sum()),
        "e": float(error.sum()),
        "ee": float(error.square().sum()),
    }


def of_turns(advantages_J: Tensor) -> dict[str, float]:
    """Means over a row's turns of A and A^2, from which `of_step` has the deviation of a step's advantages."""
    found_J, n = advantages_J.detach().double(), float(len(advantages_J))
    means = {"advantage_mean": float(found_J.mean()), "advantage_square": float(found_J.square().mean())}
    return means | {f"count/{name}": n for name in means}


def of_step(parts: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its rows. Losses are already divided by the step's counts, so they add up, like
    tokens. Variances cover the whole step; the rest are means over their counts.
    """
    sums = [name for name in parts[0] if name.startswith(("value_loss", "actor_loss")) or name == "tokens"]
    found = {name: sum(part[name] for part in parts) for name in sums}
    n, r, rr, e, ee = (sum(part[name] for part in parts) for name in MOMENTS)
    variance = rr / n - (r / n) ** 2 if n else 0.0
    if variance > 1e-12:
        found["explained_variance"] = 1 - (ee / n - (e / n) ** 2) / variance
    # The variance explained within each row says nothing of that within the step.
    apart = {*sums, *MOMENTS, "explained_variance"}
    rest = history.of_step([{name: part[name] for name in part if name not in apart} for part in parts])
    of_advantages = rest.pop("advantage_square") - rest["advantage_mean"] ** 2
    return found | rest | {"advantage_deviation": max(of_advantages, 0.0) ** 0.5}
