"""Combine metrics of passes into a step's, and of steps into a stage's: means, weighed by their counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def of_step(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its passes. Means are weighed by "count/<name>", without it equally. A name that
    ends in "_max" takes the largest. "count/<name>" adds up, for `fit_metrics` to weigh the step.
    """
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        having = [part for part in parts if name in part]
        if name.startswith("count/"):
            found[name] = sum(part[name] for part in having)
        else:
            found[name] = max(part[name] for part in having) if name.endswith("_max") else weighted(name, having)
    return found


def weighted(name: str, parts: Sequence[Mapping[str, float]]) -> float:
    """Mean of a metric over passes or steps that have it, each weighed by its "count/<name>", or 1."""
    if len(parts) == 1:
        return parts[0][name]  # as it is: a product with its count and back would round it
    counts = [part.get(f"count/{name}", 1.0) for part in parts]
    return sum(c * part[name] for c, part in zip(counts, parts, strict=True)) / max(sum(counts), 1e-9)


def fit_metrics(stage: str, history: list[dict[str, float]]) -> dict[str, float]:
    """First values of a fit, means of the last five steps (weighed by counts), and the number of steps. No steps, no
    losses. Where passes count tokens: those of the passes, and their share of those of the rows one by one.
    """
    metrics = {f"{stage}/steps": float(len(history))}
    tokens, apart = (sum(step.get(f"count/{name}", 0.0) for step in history) for name in ("tokens", "tokens_apart"))
    if apart:
        metrics |= {f"{stage}/tokens": tokens, f"{stage}/tokens_share": tokens / apart}
    for name in sorted({name for step in history for name in step if not name.startswith("count/")}):
        having = [step for step in history if name in step]
        metrics[f"{stage}/{name}_first"], metrics[f"{stage}/{name}"] = having[0][name], weighted(name, having[-5:])
    return metrics


def curves(stage: str, history: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, list[float]]:
    """Values step by step of those metrics that the steps have."""
    found = {f"{stage}/step_{name}": [step[name] for step in history if name in step] for name in names}
    return {name: values for name, values in found.items() if values}
