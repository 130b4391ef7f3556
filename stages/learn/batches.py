"""Rows of token ids padded into tensors. Which tokens count for a loss is decided here, once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """B rows: prompt then completion, padded on the right.

    ids: (B, T). completion: (B, T) bool, True on the tokens that are trained on. n_completion: (B,).
    No attention mask is needed: padding stands to the right, where a causal model's real tokens cannot see it.
    """

    ids: Tensor
    completion: Tensor
    n_completion: Tensor


def pad_rows(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], *, pad_id: int) -> Batch:
    """Raises ValueError on an empty prompt or completion: a row that trains nothing is a bug upstream."""
    if not prompts or any(not p for p in prompts) or any(not c for c in completions):
        raise ValueError("every training row needs a prompt and a completion of at least one token")
    lengths = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    ids = torch.full((len(prompts), max(lengths)), pad_id)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids[i, : len(prompt)], ids[i, len(prompt) : lengths[i]] = as_tensor(prompt), as_tensor(completion)
        mask[i, len(prompt) : lengths[i]] = True
    return Batch(ids, mask, mask.sum(1))


def as_tensor(ids: Sequence[int]) -> Tensor:
    """Ids of an array without a look at each."""
    return torch.frombuffer(ids, dtype=torch.int32) if isinstance(ids, array) else torch.tensor(ids)
