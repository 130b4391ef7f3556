"""Where the tokens of a tree go for attention, and the copies for it, with backward passes that copy as little.

Indices and masks are made once for a tree, not once a layer. [ours]; what may attend to what is in stages.learn.tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stages.learn.moving import moved
from stages.learn.tree import Tree

# Cost alone, on a CPU: fewer rows a call than this, or more calls for as many rows, cost more than the keys they spare.
LEAST_ROWS, MOST_GROUPS, MANY_ROWS = 48, 4, 256
# Cost alone, elsewhere: a call is some 17 kernels a layer more, there and back, so each has at least so many scores.
# By count, not measured on a GPU.
LEAST_SCORES = 2**19


@dataclass(frozen=True)
class Group:
    """Branch slots start .. end of every line: their queries run in one call over `keys` visible slots and own .. end.

    mask: (E, 1, end - start, keys + end - own) bool, True = may attend. biases: it as numbers, by type.
    """

    start: int
    end: int
    keys: int
    own: int
    mask: Tensor
    biases: dict[torch.dtype, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def bias(self, dtype: torch.dtype) -> Tensor:
        """0 where the mask is True, else -inf: what the kernels would make of the mask anew in every layer, and keep."""
        if dtype not in self.biases:
            zero = torch.zeros((), dtype=dtype, device=self.mask.device)
            self.biases[dtype] = torch.where(self.mask, zero, -torch.inf)
        return self.biases[dtype]


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a tree go for attention. E lines stand side by side, each with its path in L visible slots,
    then its branches in S slots. Only this layout repeats what lines share.

    slots: (E, L + S) position in the row, 0 in padding. back: (T,) slot of each token, counted over E x (L + S).
    Both None for a single line, whose row has that order already. again, repeated: slots that repeat a token which has
    its own slot elsewhere, and the tokens. longest: positions of the longest path, its branch included.
    """

    slots: Tensor | None
    back: Tensor | None
    again: Tensor
    repeated: Tensor
    n_visible: int
    groups: tuple[Group, ...]
    longest: int


def layout_of(tree: Tree) -> Layout:
    """Indices and masks of a tree, made once for all layers. The host works the indices out, and moves them together."""
    device, tree = tree.ids.device, tree.on_host
    n_lines, L = tree.paths.shape
    branch_E = torch.zeros(n_lines, dtype=torch.long).index_add(0, tree.branch_line, tree.branch_length)
    S, longest = int(branch_E.max()), int(tree.position_ids.max()) + 1
    # The branches stand line by line in the row, by prefix within each.
    order_B = torch.arange(tree.n_visible, len(tree.ids))
    line_B = torch.repeat_interleave(torch.arange(n_lines), branch_E)
    slot_B = order_B - (tree.n_visible + branch_E.cumsum(0) - branch_E)[line_B]
    slots = torch.cat([tree.paths, torch.full((n_lines, S), -1)], 1)
    slots[line_B, L + slot_B] = order_B

    of_B = tree.node[order_B] - n_lines
    prefix_ES = torch.ones((n_lines, S), dtype=torch.long)
    first_ES = torch.arange(S).repeat(n_lines, 1)
    # A padding slot sees the first token and itself: what a softmax over nothing gives is the kernel's choice.
    prefix_ES[line_B, slot_B] = tree.branch_prefix[of_B]
    first_ES[line_B, slot_B] = slot_B - (order_B - tree.branch_start[of_B])
    none = torch.zeros(0, dtype=torch.long)
    if n_lines == 1:
        return _on(device, Layout(None, None, none, none, L, (), longest), prefix_ES, first_ES)
    flat = slots.flatten()
    places = (flat >= 0).nonzero()[:, 0]
    # Of a token's slots the one of its own line: what is worked out in the others is thrown away.
    node = torch.arange(n_lines)[:, None].expand_as(slots).flatten()[places]
    visible = places % (L + S) < L
    mine = ~visible | (tree.node[flat[places]] == node)
    back = torch.empty_like(tree.ids)
    back[flat[places[mine]]] = places[mine]
    again = places[~mine]
    found = Layout(slots.clamp(min=0), back, again, flat[again], L, (), longest)
    return _on(device, found, prefix_ES, first_ES)


def _on(device: Any, layout: Layout, prefix_ES: Tensor, first_ES: Tensor) -> Layout:
    """The layout on the device, with its groups."""
    columns = [prefix_ES, first_ES, torch.arange(prefix_ES.shape[1])]
    there, on_device = moved((layout, columns), device)
    return replace(there, groups=groups_of(prefix_ES, first_ES, layout.n_visible, *on_device))


def groups_of(
    prefix_ES: Tensor, first_ES: Tensor, n_visible: int, prefix_there: Tensor, first_there: Tensor, slots: Tensor
) -> tuple[Group, ...]:
    """Branches of early states need few of the keys: in groups, all take about 2/3 of the work of one call.

    prefix, first: (E, S), of each branch slot how many visible tokens it sees, and the slot of its branch's first token;
    on the CPU, and there, on the device of the masks, as are the numbers of the S slots.
    The last group is handed all slots, for then its keys need no copy. No group without a branch.
    """
    n_branch = prefix_ES.shape[1]
    if not n_branch:
        return ()
    n_groups = max(1, min(max(MOST_GROUPS, n_branch // MANY_ROWS), n_branch // LEAST_ROWS))
    if slots.device.type != "cpu":
        n_groups = max(1, min(n_groups, prefix_ES.numel() * (n_visible + n_branch) // LEAST_SCORES))
    edges = [round(g * n_branch / n_groups) for g in range(n_groups + 1)]
    found = []
    for start, end in pairwise(edges):
        cut = slice(start, end)
        own, keys = (int(first_ES[:, cut].min()), int(prefix_ES[:, cut].max())) if end < n_branch else (0, n_visible)
        prefix, first = prefix_there[:, cut, None], first_there[:, cut, None]
        sees_visible = torch.arange(keys, device=prefix.device) < prefix
        sees_own = (slots[own:end] >= first) & (slots[own:end] <= slots[start:end, None])
        mask = torch.cat([sees_visible, sees_own], 2)[:, None]
        found.append(Group(start, end, keys, own, mask))
    return tuple(found)


class SideBySide(torch.autograd.Function):
    """(1, H, T, d) -> (E, H, L + S, d), by slots and back of a Layout. Padding repeats token 0, without a gradient.

    Its backward is a gather, like that of `Row`, plus an addition for slots that repeat a token. Plain indexing would
    add token by token.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        assert layout.slots is not None
        # Rows of (H, d) are what lies together in memory, so the tokens are picked before the heads come first.
        tokens = x[0].transpose(0, 1).index_select(0, layout.slots.flatten())
        return tokens.view(*layout.slots.shape, *tokens.shape[1:]).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        flat = grad.transpose(1, 2).flatten(0, 1)
        found = flat.index_select(0, ctx.layout.back)
        if len(ctx.layout.again):
            found.index_add_(0, ctx.layout.repeated, flat.index_select(0, ctx.layout.again))
        return found.transpose(0, 1)[None], None


class Row(torch.autograd.Function):
    """(E, L + S, H, d) -> (1, T, H, d): out of the slots, back into the row's order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, back: Tensor) -> Tensor:
        ctx.back, ctx.shape = back, x.shape
        return x.flatten(0, 1).index_select(0, back)[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.shape).flatten(0, 1).index_copy_(0, ctx.back, grad[0]).view(ctx.shape), None


class Keys(torch.autograd.Function):
    """Keys, or values, of each call out of (E, H', L + S, d): the visible ones, and each group's visible and own.

    Its backward fills one buffer; that of slices would fill one of the full size for each.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, n_visible: int, groups: tuple[Group, ...]) -> tuple[Tensor, ...]:
        ctx.n_visible, ctx.groups = n_visible, groups
        rows = x.transpose(1, 2)
        copied = [
            torch.cat([rows[:, : g.keys], rows[:, n_visible + g.own : n_visible + g.end]], 1).transpose(1, 2)
            for g in groups[:-1]
        ]
        return x[:, :, :n_visible], *copied, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, visible: Tensor, *others: Tensor) -> tuple[Tensor, None, None]:
        L, grad = ctx.n_visible, others[-1].transpose(1, 2)
        rows = torch.empty_like(grad)
        torch.add(visible.transpose(1, 2), grad[:, :L], out=rows[:, :L])
        rows[:, L:] = grad[:, L:]
        for group, copied in zip(ctx.groups, others[:-1], strict=False):
            rows[:, : group.keys] += copied[:, :, : group.keys].transpose(1, 2)
            rows[:, L + group.own : L + group.end] += copied[:, :, group.keys :].transpose(1, 2)
        return rows.transpose(1, 2), None, None
