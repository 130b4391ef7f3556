"""Which attention kernel a tree's row takes: a few calls of sdpa (`tree_layout`), or FlexAttention (`tree_flex`)."""

from __future__ import annotations

from math import log
from typing import NamedTuple

from stages.frame.sections import Attention
from stages.learn.tree import Tree
from stages.learn.tree_flex import FlexLayout, flex_layout_of
from stages.learn.tree_layout import Layout, layout_of


class Measured(NamedTuple):
    """A row, and the milliseconds of a training step by each kernel."""

    tokens: int
    branches: int  # for each line
    sdpa: float
    flex: float


MEASURED = (
    Measured(7_088, 9, 677, 852),  # Self-AC: 2 episodes of 8 turns, a critic's prompt after each state
    Measured(14_176, 9, 1_275, 1_523),  # the same, 4 episodes
    Measured(14_952, 25, 2_250, 1_998),  # NLAC: an episode of 13 turns, two rows a turn (benchmarks/speed/tree_rows.py)
)
"""A 7B shape on one H200, torch 2.11, autocast, layers worked out again, LoRA fused, the first two with Liger:
docs/explanation/measurements.md, "A step by kernel". `make gpu-check` measures such rows on your device.
"""


def layout_for(tree: Tree, attention: Attention) -> Layout | FlexLayout:
    """What `body_pass` needs of the tree, made once for all layers, by the kernel of `model.attention`."""
    kernel = faster(tree) if attention == "auto" else attention
    return flex_layout_of(tree) if kernel == "flex" else layout_of(tree)


def faster(tree: Tree) -> Attention:
    """The kernel that was faster for the nearest measured row, by the logarithms of its tokens and branches a line.

    sdpa on a CPU, where FlexAttention has no backward pass, and for what is smaller than all that was measured.
    """
    tokens, branches = len(tree.ids), len(tree.branch_line) / len(tree.paths)
    if tree.ids.device.type == "cpu" or tokens < min(m.tokens for m in MEASURED) or branches < 1:
        return "sdpa"
    near = min(MEASURED, key=lambda m: abs(log(m.tokens / tokens)) + abs(log(m.branches / branches)))
    return "flex" if near.flex < near.sdpa else "sdpa"
