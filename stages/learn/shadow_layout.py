"""Where the tokens of a packed row go for attention, and the copies that this takes, with backward passes that copy as
little.

Indices and masks are made once for a row, not once a layer. All of it is [ours]; what may attend to what is the slides'
(stages.learn.shadow_attention).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stages.learn.shadow import PackedRow

# Cost alone, on a CPU: fewer rows a call than this, or more calls, cost more than the keys they spare.
LEAST_ROWS, MOST_GROUPS = 48, 4


@dataclass(frozen=True)
class Group:
    """Shadow slots start .. end of every episode, whose queries run in one call over the first `keys` visible slots and
    shadow slots own .. end.

    mask: (E, 1, end - start, keys + end - own) bool, True = may attend.
    """

    start: int
    end: int
    keys: int
    own: int
    mask: Tensor


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a row go for attention: E episodes side by side, each in L visible slots and then S shadow
    slots.

    slots: (E, L + S) position in the row, 0 in padding. back: (T,) slot of each token, counted over E x (L + S).
    Both None for a single episode, whose row has that order already. longest: positions of the longest episode, critic
    prompt included.
    """

    slots: Tensor | None
    back: Tensor | None
    n_visible: int
    groups: tuple[Group, ...]
    longest: int


def layout_of(packed: PackedRow) -> Layout:
    """Indices and masks of a row, made once for all layers."""
    n_episodes, is_shadow = len(packed.n_turns), packed.shadow > 0
    n_visible_E = torch.bincount(packed.episode[~is_shadow], minlength=n_episodes)
    n_shadow_E = torch.bincount(packed.episode[is_shadow], minlength=n_episodes)
    L, S = int(n_visible_E.max()), int(n_shadow_E.max())
    order_T = torch.arange(len(packed.ids), device=packed.ids.device)
    first_shadow_E = n_visible_E.sum() + n_shadow_E.cumsum(0) - n_shadow_E
    within_T = torch.where(is_shadow, L + order_T - first_shadow_E[packed.episode], packed.position_ids)
    back_T = packed.episode * (L + S) + within_T

    def by_slot(values_T: Tensor, padding: int) -> Tensor:
        """(E, L + S): a number of each slot."""
        filled = values_T.new_full((n_episodes * (L + S),), padding)
        filled[back_T] = values_T
        return filled.view(n_episodes, L + S)

    # A padding slot sees one token: what a softmax over nothing gives is the kernel's choice. Nobody sees the padding
    # slot.
    prefix_ES, segment_ES = by_slot(packed.prefix, 1)[:, L:], by_slot(packed.shadow, 0)[:, L:]
    groups = groups_of(prefix_ES, segment_ES, L, packed.value_positions.shape[1])
    longest = int(packed.position_ids.max()) + 1
    if n_episodes == 1:
        return Layout(None, None, L, groups, longest)
    return Layout(by_slot(order_T, 0), back_T, L, groups, longest)


def groups_of(prefix_ES: Tensor, segment_ES: Tensor, n_visible: int, n_states: int) -> tuple[Group, ...]:
    """Early states need few of the keys: in groups, shadows do about 2/3 of the work that one call for all would take.
    Results are the same.

    The last group is handed all slots, for then its keys need no copy. No group without a shadow.
    """
    n_shadow = segment_ES.shape[1]
    if not n_shadow:
        return ()
    critic_len = n_shadow // n_states
    n_groups = max(1, min(MOST_GROUPS, n_shadow // LEAST_ROWS, n_states))
    edges = [round(g * n_states / n_groups) * critic_len for g in range(n_groups + 1)]
    slots, found = torch.arange(n_shadow, device=prefix_ES.device), []
    for start, end in pairwise(edges):
        prefix = prefix_ES[:, start:end, None]
        own, keys = (start, int(prefix.max())) if end < n_shadow else (0, n_visible)
        sees_visible = torch.arange(keys, device=prefix.device) < prefix
        segment, own_segment = segment_ES[:, start:end, None], segment_ES[:, None, own:]
        sees_own = (segment == own_segment) & (segment > 0) & (slots[own:] <= slots[start:end, None])
        mask = torch.cat([sees_visible, sees_own[..., : end - own]], 2)[:, None]
        found.append(Group(start, end, keys, own, mask))
    return tuple(found)


class SideBySide(torch.autograd.Function):
    """(1, H, T, d) -> (E, H, L + S, d), by slots and back of a Layout. Padding repeats token 0 and takes no gradient
    there: nobody sees it.

    Its backward is a gather too, as is that of `Row`; those of plain indexing would add token by token.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        # Rows of (H, d) are what lies together in memory, so the tokens are picked before the heads come first.
        tokens = x[0].transpose(0, 1).index_select(0, slots.flatten())
        return tokens.view(*slots.shape, *tokens.shape[1:]).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.transpose(1, 2).flatten(0, 1).index_select(0, ctx.back).transpose(0, 1)[None], None, None


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
    """Keys, or values, of each call out of (E, H', L + S, d): the visible ones, and for every group its visible and its
    own.

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
