"""The mask of a tree for FlexAttention: one kernel over the whole row, which skips fully masked blocks.

Same function as the groups of `tree_attention`, for GPUs: published figures have it ahead of masked SDPA above about
1,000 tokens. On a CPU it is the slow, uncompiled form, has no backward pass, and serves the tests. Ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from stages.learn.tree import Tree

LONG = 16_384
"""Tokens of a row above which a GPU makes its block mask by a compiled function. One that is not compiled makes a (T, T)
tensor first, of 256 MiB here.
"""


@dataclass(frozen=True)
class FlexLayout:
    """block_mask: torch's, of (1, 1, T, T). longest: positions of the longest path, its branch included."""

    block_mask: Any
    longest: int


def flex_layout_of(tree: Tree) -> FlexLayout:
    """The block mask of a tree, made once for all layers."""
    node, limit, position = tree.node, tree.limit, tree.position_ids

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (position[j] <= position[i]) & (position[j] < limit[node[i], node[j]])  # stages.learn.tree.allowed

    n, device = len(tree.ids), tree.ids.device
    make = _block_masks(compiled=device.type != "cpu" and n > LONG)
    return FlexLayout(make(allowed, None, None, n, n, device=device), int(position.max()) + 1)


def flex_forward(query: Tensor, key: Tensor, value: Tensor, layout: FlexLayout, scaling: float | None) -> Tensor:
    """query (1, H, T, d), key and value (1, H', T, d), H' dividing H. Returns (1, T, H, d)."""
    grouped = query.shape[1] != key.shape[1]
    out: Tensor = _kernel(query.device.type)(
        query, key, value, block_mask=layout.block_mask, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2)


@cache
def _block_masks(*, compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=True) if compiled else create_block_mask


@cache
def _kernel(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # Rows differ in length from step to step: without `dynamic` each length would be compiled anew.
    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=True)
