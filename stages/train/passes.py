"""Training rows as steps, a step as one pass or several, and the loss of a pass: rows of every kind in every step, padded
batches of like length, losses of passes that add up to the step's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stages.learn.batches import Batch, pad_rows
from stages.learn.losses import completion_nll
from stages.train.rows import TrainRow


def half(device: Any, on: bool) -> torch.autocast:
    """Passes within it compute in bfloat16 where torch's autocast does, if `on`. Losses belong outside, in fp32."""
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=on)


@dataclass(frozen=True)
class Part:
    """Rows of one kind within a step: their batch, weights and keys.

    normaliser: what the whole step's loss is divided by, where this is a part of it; None = what its own rows count.
    share: its completion tokens among those of its kind in the step.
    """

    batch: Batch
    weights_B: Tensor
    rows: tuple[TrainRow, ...]
    normaliser: float | None = None
    share: float = 1.0


def mixed_batches(
    kinds: Mapping[str, tuple[Sequence[TrainRow], int]],
    *,
    main: str,
    epochs: int,
    rng: random.Random,
    pad_id: int,
    device: Any,
    pass_tokens: int = 0,
) -> Iterator[list[dict[str, Part]]]:
    """Batches that hold rows of every kind: kind -> (rows, rows a batch).

    `main` is gone through `epochs` times in a new order each time; the other kinds are drawn from, without repeats
    inside a batch. Kinds with no rows are left out. Every step then holds every kind: training the critic alone
    destroys the policy within a stage (docs/decisions.md). A step is one pass, or several of at most `pass_tokens`,
    each with one kind.
    """
    rows, size = kinds[main]
    for _ in range(epochs):
        order = rng.sample(range(len(rows)), len(rows))
        for start in range(0, len(order), size):
            chosen = {main: [rows[i] for i in order[start : start + size]]}
            for kind, (pool, count) in kinds.items():
                if kind != main and pool and count:
                    chosen[kind] = rng.sample(list(pool), min(count, len(pool)))
            yield step_passes(chosen, pass_tokens, pad_id, device)


def step_passes(
    chosen: Mapping[str, Sequence[TrainRow]], pass_tokens: int, pad_id: int, device: Any
) -> list[dict[str, Part]]:
    """One step's rows as passes whose losses add up to the step's. A row that is longer than `pass_tokens` is a pass of
    its own.
    """
    if not pass_tokens:
        return [{kind: make_part(picked, pad_id, device) for kind, picked in chosen.items()}]
    normaliser = sum(r.weight * len(r.completion_ids) for picked in chosen.values() for r in picked)
    found = []
    for kind, picked in chosen.items():
        tokens = sum(len(r.completion_ids) for r in picked)
        for group in by_length(picked, pass_tokens):
            share = sum(len(r.completion_ids) for r in group) / tokens
            found.append(
                {kind: replace(make_part(group, pad_id, device), normaliser=max(normaliser, 1e-9), share=share)}
            )
    return found


def by_length(rows: Sequence[TrainRow], pass_tokens: int) -> list[list[TrainRow]]:
    """Rows of like length together, as many as fit into `pass_tokens` when padded to the longest, at least one."""
    groups: list[list[TrainRow]] = []
    longest = 0
    for row in sorted(rows, key=lambda r: -len(r.prompt_ids) - len(r.completion_ids)):
        if not groups or (len(groups[-1]) + 1) * longest > pass_tokens:
            groups.append([])
            longest = len(row.prompt_ids) + len(row.completion_ids)
        groups[-1].append(row)
    return groups


def make_part(rows: Sequence[TrainRow], pad_id: int, device: Any) -> Part:
    batch = pad_rows([r.prompt_ids for r in rows], [r.completion_ids for r in rows], pad_id=pad_id)
    batch = Batch(batch.ids.to(device), batch.completion.to(device), batch.n_completion.to(device))
    return Part(batch, torch.tensor([r.weight for r in rows], device=device), tuple(rows))


def mixed_nll(
    model: Any, parts: Mapping[str, Part], *, autocast: bool = False
) -> tuple[Tensor, dict[str, float], dict[str, Tensor]]:
    """Weighted mean NLL a token over all rows of all kinds: (loss, "nll/<kind>" a token, row NLL (B,) by kind).

    L = sum_kinds sum_i w_i |y_i| nll_i / sum_kinds sum_i w_i |y_i|,   the sum below over all rows of the step, if these
    are a part of it
    """
    total, count, metrics, by_row = torch.zeros(()), torch.zeros(()), {}, {}
    whole = next((part.normaliser for part in parts.values()), None)
    for kind, part in parts.items():
        with half(part.batch.ids.device, autocast):
            nll_B, _ = completion_nll(model, part.batch)
        weight_B = part.weights_B * part.batch.n_completion
        total, count = total + (weight_B * nll_B).sum(), count + weight_B.sum()
        metrics[f"nll/{kind}"] = float(((weight_B * nll_B).sum() / weight_B.sum().clamp(min=1e-9)).detach())
        metrics[f"count/nll/{kind}"] = float(weight_B.sum())
        by_row[kind] = nll_B.detach()
    return (total / count.clamp(min=1e-9) if whole is None else total / whole), metrics, by_row


@torch.no_grad()
def mean_nll(
    model: Any, rows: Sequence[TrainRow], *, pad_id: int, size: int = 128, pass_tokens: int = 0, autocast: bool = False
) -> float:
    """Mean NLL a token over rows by their weights, as in `mixed_nll`, in evaluation mode, `size` of them a pass or as
    many as `pass_tokens` allows.
    """
    was_training = model.training
    model.eval()
    total = count = 0.0
    groups = (
        by_length(rows, pass_tokens)
        if pass_tokens
        else [rows[start : start + size] for start in range(0, len(rows), size)]
    )
    for group in groups:
        part = make_part(group, pad_id, model.device)
        with half(model.device, autocast):
            nll_B, _ = completion_nll(model, part.batch)
        weight_B = part.weights_B * part.batch.n_completion
        total += float((weight_B * nll_B).sum())
        count += float(weight_B.sum())
    model.train(was_training)
    return total / max(count, 1e-9)


def pad_id(model: Any) -> int:
    """Any token serves: padding stands to the right, where no loss and no real token reads it."""
    found = model.config.pad_token_id
    return int(found if found is not None else 0)
