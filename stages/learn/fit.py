"""The one training loop: batches in, a loss function, steps out. And the learning-rate factor of an iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

B = TypeVar("B")


def fit(
    model: Any,
    batches: Iterable[B | list[B]],
    loss: Callable[[Any, B], tuple[Tensor, dict[str, float]]],
    *,
    lr: float,
    clip: float = 1.0,
    weight_decay: float = 0.0,
    after_step: Callable[[int], None] | None = None,
    merge: Callable[[list[dict[str, float]]], dict[str, float]] | None = None,
) -> list[dict[str, float]]:
    """One AdamW step a batch on the model's trainable parameters; returns the metrics of every step.

    A list is one batch in parts, whose losses and gradients are summed, so that no more than a part is held in memory; the loss
    divides each part by what the whole batch counts. merge: the metrics of a batch from those of its parts; without it their mean.
    loss(model, batch) -> (scalar, metrics). after_step(step) runs once the parameters have moved (EMA, progress).
    Raises FloatingPointError at the first loss or gradient that is not finite, before it reaches the weights.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)
    history = []
    for step, batch in enumerate(batches):
        optimiser.zero_grad(set_to_none=True)
        total, found = 0.0, []
        for part in batch if isinstance(batch, list) else [batch]:
            value, metrics = loss(model, part)
            if not torch.isfinite(value):
                raise FloatingPointError(
                    f"the loss of step {step} is {float(value.detach())}; lower the learning rate or look at the rows of this batch"
                )
            value.backward()  # type: ignore[no-untyped-call]
            total += float(value.detach())
            found.append(metrics)
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"the gradient of step {step} is not finite, though the loss is {total}; lower the learning rate")
        optimiser.step()
        history.append({**(merge or _mean)(found), "loss": total, "grad_norm": float(norm)})
        if after_step:
            after_step(step)
    return history


def _mean(parts: list[dict[str, float]]) -> dict[str, float]:
    """Each metric's mean over the parts that have it."""
    values: dict[str, list[float]] = {}
    for metrics in parts:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def lr_factor(iteration: int, *, start: int, end: int, final: float) -> float:
    """1 up to iteration `start`, then linear to `final` at iteration `end`, constant after it."""
    if iteration <= start or end <= start:
        return 1.0 if iteration <= start else final
    return 1.0 + (final - 1.0) * min(1.0, (iteration - start) / (end - start))
