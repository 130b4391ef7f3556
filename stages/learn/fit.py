"""The one training loop: batches in, a loss function, steps out. And the learning-rate factor of an iteration.

The host waits for the device once a step, when it reads losses, gradient norm and metrics together. [ours]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from stages.frame.types import Diverged
from stages.learn import ranks
from stages.learn.later import read

B = TypeVar("B")
Loss = Callable[[Any, B], tuple[Tensor, Mapping[str, Any]]]
EACH = "each/"
"""How the name of a list among the metrics begins. Lists are told once, and kept in no history."""
Lists = Mapping[str, list[Any]]


def adamw(
    model: Any, *, lr: float, weight_decay: float = 0.0, rates: Sequence[tuple[Any, float]] = ()
) -> torch.optim.AdamW:
    """AdamW over the model's trainable parameters. rates: modules within it that have a learning rate of their own.
    On a GPU a step is a few fused kernels.
    """
    own = {id(p): rate for module, rate in rates for p in module.parameters()}
    groups: dict[tuple[float, bool], list[Any]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Tensors that the ranks hold in parts take no step together with whole ones.
            groups.setdefault((own.get(id(parameter), lr), ranks.sharded(parameter)), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": params, "lr": rate} for (rate, _), params in groups.items()],
        betas=(0.9, 0.95),
        weight_decay=weight_decay,
        fused=True if any(p.is_cuda for params in groups.values() for p in params) else None,
    )


def fit(
    model: Any,
    batches: Iterable[B | list[B]],
    loss: Loss[B],
    optimiser: torch.optim.Optimizer,
    *,
    clip: float = 1.0,
    after_step: Callable[[list[dict[str, float]]], None] | None = None,
    each: Callable[[Lists], None] = lambda lists: None,
    merge: Callable[[Sequence[Mapping[str, float]]], dict[str, float]] | None = None,
    history: Sequence[dict[str, float]] = (),
) -> list[dict[str, float]]:
    """One step of the optimiser a batch; returns the metrics of every step.

    A list is one batch in parts: their losses and gradients are summed, and memory holds one part at a time. The loss
    divides each part by the count of the whole batch. merge: metrics of a batch from its parts'; else their mean.
    loss(model, batch) -> (scalar, metrics); metrics may be `Later`, to be read once the device has done the step.
    The next batch is asked for before that, so that it is made while the device works. What it raises is raised after
    the step. after_step(metrics so far) runs once the parameters have moved.
    each(lists): what the parts told as lists of JSON values (`EACH`), joined over the step; before after_step.
    history: steps done before a kill (`learn.checkpoint`); as many batches are skipped.
    Several ranks (`learn.ranks`) share out the parts, which then have `n_tokens`; each returns the metrics of all.
    Raises Diverged for a loss or gradient that is not finite, before it reaches the weights, and for bad weights.
    """
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    done = list(history)
    source = islice(batches, len(history), None)
    upcoming = _made(source)
    while (batch := upcoming()) is not None:
        step = len(done)
        optimiser.zero_grad(set_to_none=True)
        parts = batch if isinstance(batch, list) else [batch]
        owners = _owners(parts)
        values, found = _backward(model, parts, owners, loss, parameters)
        ranks.sum_gradients(parameters)
        norm = ranks.clip_norm(parameters, clip)
        upcoming = _made(source)
        *losses, size = read(found, [*values, norm])
        losses, told = _of_all(parts, owners, losses, found)
        total = _checked(losses, size, step)
        _step(optimiser, step)
        kept = [{name: x for name, x in metrics.items() if not name.startswith(EACH)} for metrics in told]
        done.append({**(merge or _mean)(kept), "loss": total, "grad_norm": size})
        lists = dict.fromkeys(name for metrics in told for name in metrics if name.startswith(EACH))
        each({name: [x for metrics in told for x in metrics.get(name, ())] for name in lists})
        if after_step:
            after_step(done)
    if done:
        check_finite(parameters, steps=len(done))
    return done


def _backward(
    model: Any, parts: Sequence[B], owners: Sequence[int], loss: Loss[B], parameters: Sequence[Tensor]
) -> tuple[list[Tensor], list[Mapping[str, Any]]]:
    """Losses and metrics of this rank's parts; their gradients are in the parameters."""
    mine = [part for part, owner in zip(parts, owners, strict=True) if owner == ranks.own()]
    values, found = [], []
    for part in mine:
        value, metrics = loss(model, part)
        value.backward()  # type: ignore[no-untyped-call]
        values.append(value.detach())
        found.append(metrics)
    if ranks.any_sharded(parameters):
        # A pass gathers weights from all ranks, so all must do as many.
        for _ in range(ranks.idle_passes(owners)):
            (0.0 * loss(model, parts[0])[0]).backward()  # type: ignore[no-untyped-call]
    return values, found


def _owners(parts: Sequence[Any]) -> list[int]:
    """The rank of each part."""
    n = ranks.count()
    return [0] * len(parts) if n == 1 else ranks.dealt([part.n_tokens for part in parts], n)


def _of_all(
    parts: Sequence[Any], owners: Sequence[int], losses: Sequence[float], found: Sequence[Mapping[str, Any]]
) -> tuple[list[float], list[Mapping[str, Any]]]:
    """Losses and metrics of all parts, in their order, from those of this rank's."""
    if ranks.count() == 1:
        return list(losses), list(found)
    sizes = [part.n_tokens for part in parts]
    mine = [[value, dict(metrics)] for value, metrics in zip(losses, found, strict=True)]
    told = ranks.gathered([sizes, mine])
    if any(theirs != sizes for theirs, _ in told):
        raise ranks.not_alike()
    each = [iter(values) for _, values in told]
    whole = [next(each[owner]) for owner in owners]
    return [value for value, _ in whole], [metrics for _, metrics in whole]


def _made(source: Iterator[B]) -> Callable[[], B | None]:
    """Makes the next batch now. Who asks for it gets it, None at the end, or the error that it made."""
    try:
        batch = next(source, None)
    except Exception as error:  # of the next step: it must not stop the one before
        failed = error

        def fail() -> None:
            raise failed

        return fail
    return lambda: batch


def _checked(losses: Sequence[float], norm: float, step: int) -> float:
    """The parts' losses together. Raises Diverged for one that is not finite, or such a gradient."""
    total = 0.0
    for loss in losses:
        total += loss
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss of step {step} is {loss}. Lower the stage's learning rate, or look at the rows of this batch"
            )
    if not math.isfinite(norm):
        raise Diverged(
            f"the gradient of step {step} is not finite, though the loss is {total}. Lower the stage's learning rate"
        )
    return total


def _step(optimiser: torch.optim.Optimizer, step: int) -> None:
    try:
        optimiser.step()
    except RuntimeError as error:
        if "without overflow" not in str(error):
            raise
        raise Diverged(
            f"step {step} is too long for a number of the weights' type. Lower the stage's learning rate"
        ) from error


def check_finite(parameters: Iterable[Tensor], *, steps: int) -> None:
    """Raises Diverged for weights that are not finite, or too large for a product of two of them to be."""
    squares = [ranks.whole(parameter.detach()).float().square().sum() for parameter in parameters]
    if not all(map(math.isfinite, read([], squares))):
        raise Diverged(
            f"after step {steps - 1}, the last one, the weights are not finite. Lower the stage's learning rate"
        )


def _mean(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each metric's mean over the parts that have it."""
    values: dict[str, list[float]] = {}
    for metrics in parts:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def flat_then_falling(done: float, flat: float) -> float:
    """Share of the learning rate after a share `done` of the steps: 1 for a share `flat`, then linear to 3 %."""
    return 1.0 if done < flat else 1.0 - 0.97 * (done - flat) / (1 - flat)


def lr_factor(iteration: int, *, start: int, end: int, final: float) -> float:
    """1 up to iteration `start`, then linear to `final` at iteration `end`, constant after it."""
    if iteration <= start or end <= start:
        return 1.0 if iteration <= start else final
    return 1.0 + (final - 1.0) * min(1.0, (iteration - start) / (end - start))
