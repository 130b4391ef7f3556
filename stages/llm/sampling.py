"""The next token of each row, from its logits and its own uniform number. Ours."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024
"""Tokens whose probabilities are worked out in fp64: a small vocabulary whole, of a large one a block."""


def sample(logits_BV: Tensor, temperature_B1: Tensor, uniform_B: Tensor) -> Tensor:
    """Next token of each row by the inverse distribution function of softmax(logits / temperature); 0 = greedy.

    The draw depends on the row's own number alone, never on its neighbours. A vocabulary up to `BLOCK` is worked out in
    fp64. A larger one is cut into blocks. fp32 weights choose the block, fp64 the token in it. So there a draw is off
    by the rounding of fp32, about 1e-8 of the whole.
    logits: (B, V), -inf for a token that is never drawn; uniform: (B,), fp64 in [0, 1). Returns (B,).
    """
    (top_B, greedy_B), last = logits_BV.max(1), logits_BV.shape[1] - 1
    heat_B1, place_B1 = temperature_B1.clamp(min=1e-6), uniform_B[:, None]
    first_B1 = torch.zeros_like(greedy_B[:, None])
    if logits_BV.shape[1] > BLOCK:
        block_B1, place_B1 = _block(logits_BV, top_B[:, None], heat_B1, place_B1)
        first_B1 = BLOCK * block_B1
        within = first_B1 + torch.arange(BLOCK, device=logits_BV.device)
        logits_BV = logits_BV.gather(1, within.clamp(max=last)).masked_fill(within > last, -torch.inf)
    cumulative = (logits_BV.double() / heat_B1).softmax(1).cumsum(1)
    # Of numbers that are not finite the draw may lie past the end of the last block: the caller must still read a token.
    drawn_B1 = (first_B1 + _find(cumulative, place_B1)).clamp(max=last)
    return torch.where(temperature_B1 > 0, drawn_B1, greedy_B[:, None])[:, 0]


def _block(logits_BV: Tensor, top_B1: Tensor, heat_B1: Tensor, place_B1: Tensor) -> tuple[Tensor, Tensor]:
    """The block in which each row's place lies, and the place within the block, in [0, 1). Both (B, 1)."""
    n_rows, n_tokens = logits_BV.shape
    weights = logits_BV.new_zeros(n_rows, -(-n_tokens // BLOCK), BLOCK)
    # The largest logit first: divided by a small temperature, two of them would lose their difference.
    torch.sub(logits_BV, top_B1, out=weights.view(n_rows, -1)[:, :n_tokens]).div_(heat_B1).exp_()
    cumulative = weights.sum(2).double().cumsum(1)
    block_B1 = _find(cumulative, place_B1)
    before_B1 = torch.where(block_B1 > 0, cumulative.gather(1, (block_B1 - 1).clamp(min=0)), 0.0)
    place_B1 = (place_B1 * cumulative[:, -1:] - before_B1) / (cumulative.gather(1, block_B1) - before_B1)
    return block_B1, place_B1.clamp(0, 1 - 2**-53)  # 1 would be the block's last token, though it had no weight


def _find(cumulative: Tensor, place_B1: Tensor) -> Tensor:
    """The first index whose cumulative weight is above that share of the whole: never one without weight. (B, 1)."""
    found = torch.searchsorted(cumulative, place_B1 * cumulative[:, -1:], right=True)
    return found.clamp(max=cumulative.shape[1] - 1)  # which only numbers that are not finite are beyond
