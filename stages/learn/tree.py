"""Rows with a common beginning, as one row of tokens that holds the shared part once.

    line    ----------------------------------------      an episode as the engine produced it, from its first token on
               |              |             +-----------   another line, from where it differs
               +--- branch    +--- branch                  a role's words and reply, or the critic's prompt, after a state

A token sees only what stands before it on its own path. So every row has the values and gradients that it would have
alone, up to rounding. Such rows are Self-AC's critic prompts (slides, episode layout), NLAC's role prompts, the turns
of an episode, and the episodes of a group. Token ids are those that the engine produced. [ours]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.learn.moving import moved

Ids = Sequence[int] | NDArray[np.int64]

WHOLE = torch.iinfo(torch.int32).max  # of a node's own tokens, as many as there are
LONG_REST = 4
"""A row is a line where what it does not share is longer than 1 / LONG_REST of what it shares; else a branch. Cost alone."""


@dataclass(frozen=True)
class Branch:
    """Tokens that follow the first `prefix` tokens of a line; nobody else sees them."""

    line: int
    prefix: int
    ids: Ids


@dataclass(frozen=True)
class Tree:
    """E lines and Z branches in one row of T tokens: each line's own tokens, then the branches, by line and prefix.

    Nodes are the E lines, each with the tokens that no line before it has, then the Z branches.
    """

    ids: Tensor  # (T,)
    position_ids: Tensor  # (T,): on the token's path
    node: Tensor  # (T,) in [0, E + Z)
    limit: Tensor  # (E + Z, E + Z): node i sees the tokens of node j whose position is below limit[i, j], and its own up to itself
    paths: Tensor  # (E, L): where the tokens of each line stand in the row, -1 past its end
    branch_line: Tensor  # (Z,)
    branch_prefix: Tensor  # (Z,)
    branch_start: Tensor  # (Z,): where its first token stands in the row
    branch_length: Tensor  # (Z,)
    host: Tree | None = None  # the same on the CPU, of a tree that was moved

    @property
    def on_host(self) -> Tree:
        """The tree where its numbers can be looked at without waiting for a device."""
        return self.host or self

    @property
    def n_visible(self) -> int:
        """How many tokens of the row are those of lines; they stand first."""
        starts = self.on_host.branch_start
        return int(starts.min()) if len(starts) else len(self.ids)

    def to(self, device: Any) -> Tree:
        return moved(self, device)


def allowed(tree: Tree) -> Tensor:
    """(T, T) bool, whether token i may attend to token j: the definition, which the kernels are tested against.

    allowed(i, j) = position(j) <= position(i) and position(j) < limit(node(i), node(j))
    """
    limit = tree.limit[tree.node][:, tree.node]
    return (tree.position_ids <= tree.position_ids[:, None]) & (tree.position_ids < limit)


def grow(lines: Sequence[Ids], branches: Sequence[Branch] = (), *, shareable: int | None = None) -> Tree:
    """The tree of these lines and branches, whose order stays theirs.

    shareable: how many tokens of a line may stand for those of another one, None = all that are alike. Raises
    ValueError for an empty line or branch, and for a branch that leaves no line.
    """
    if not lines or not all(map(len, lines)) or not all(len(b.ids) for b in branches):
        raise ValueError("a tree needs a line, and a token in every line and branch")
    if any(not 0 <= b.line < len(lines) or not 0 < b.prefix <= len(lines[b.line]) for b in branches):
        raise ValueError("wanted branches that follow at least one token of a line of the tree, found another one")
    own = [np.asarray(line, dtype=np.int64) for line in lines]
    longest, n = max(map(len, own)), len(own) + len(branches)
    paths, limit = np.full((len(own), longest), -1), np.zeros((n, n), dtype=np.int64)
    ids: list[NDArray[np.int64]] = []
    positions, nodes, at = [], [], 0
    for e, line in enumerate(own):
        f, shared = max(((f, common(own[f], line, shareable)) for f in range(e)), key=lambda x: x[1], default=(0, 0))
        paths[e, :shared] = paths[f, :shared]
        paths[e, shared : len(line)] = np.arange(at, at + len(line) - shared)
        limit[e] = np.minimum(limit[f], shared)
        limit[e, e] = WHOLE
        ids.append(line[shared:])
        positions.append(np.arange(shared, len(line)))
        nodes.append(np.full(len(line) - shared, e))
        at += len(line) - shared
    starts = np.zeros(len(branches), dtype=np.int64)
    for z in sorted(range(len(branches)), key=lambda z: (branches[z].line, branches[z].prefix)):
        branch, i = branches[z], len(own) + z
        limit[i] = np.minimum(limit[branch.line], branch.prefix)
        limit[i, i] = WHOLE
        ids.append(np.asarray(branch.ids, dtype=np.int64))
        positions.append(np.arange(branch.prefix, branch.prefix + len(branch.ids)))
        nodes.append(np.full(len(branch.ids), i))
        starts[z] = at
        at += len(branch.ids)
    return Tree(
        torch.from_numpy(np.concatenate(ids)),
        torch.from_numpy(np.concatenate(positions)),
        torch.from_numpy(np.concatenate(nodes)),
        torch.from_numpy(limit),
        torch.from_numpy(paths),
        torch.tensor([b.line for b in branches], dtype=torch.long),
        torch.tensor([b.prefix for b in branches], dtype=torch.long),
        torch.from_numpy(starts),
        torch.tensor([len(b.ids) for b in branches], dtype=torch.long),
    )


def common(a: NDArray[np.int64], b: NDArray[np.int64], most: int | None = None) -> int:
    """How many tokens both begin with, at most `most`."""
    n = min(len(a), len(b), len(a) if most is None else most)
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def trunk(tree: Tree) -> Tree:
    """The tree's lines alone, for a pass that reads nothing off the branches."""
    n, e = tree.n_visible, len(tree.paths)
    none = tree.branch_line[:0]
    cut = {name: getattr(tree, name)[:n] for name in ("ids", "position_ids", "node")}
    cut |= dict.fromkeys(("branch_line", "branch_prefix", "branch_start", "branch_length"), none)
    return replace(tree, **cut, limit=tree.limit[:e, :e], host=tree.host and trunk(tree.host))


def tree_of(rows: Sequence[Ids]) -> tuple[Tree, list[Tensor]]:
    """A tree that holds all of these rows, and for each the places of its tokens in the tree's row, in order.

    The longest rows are lines. A row that leaves a line late is its branch; a row that lies wholly in a line adds
    nothing. Raises ValueError for no row or an empty one.
    """
    arrays = [np.asarray(row, dtype=np.int64) for row in rows]
    lines: list[NDArray[np.int64]] = []
    branches: list[Branch] = []
    found: list[tuple[int, int, int]] = [(0, 0, -1)] * len(rows)  # line, how much of it, branch or -1
    for i in sorted(range(len(rows)), key=lambda i: -len(arrays[i])):
        row = arrays[i]
        line, shared = max(((e, common(lines[e], row)) for e in range(len(lines))), key=lambda x: x[1], default=(0, 0))
        rest = len(row) - shared
        if rest * LONG_REST > shared:
            found[i] = len(lines), len(row), -1
            lines.append(row)
        elif rest:
            found[i] = line, shared, len(branches)
            branches.append(Branch(line, shared, row[shared:]))
        else:
            found[i] = line, shared, -1
    tree = grow(lines, branches)
    places = []
    for line, shared, z in found:
        own = torch.arange(int(tree.branch_length[z])) + tree.branch_start[z] if z >= 0 else tree.ids[:0]
        places.append(torch.cat([tree.paths[line, :shared], own]))
    return tree, places


def n_new(before: Ids, row: Ids) -> int:
    """How many tokens a row adds to a tree in which `before` stands already."""
    return len(row) - common(np.asarray(before), np.asarray(row))


def n_unique(rows: Sequence[Ids]) -> int:
    """Tokens of these rows, what any two begin with counted once: no tree of them has fewer."""
    ordered = sorted(map(tuple, rows))
    return len(ordered[0]) + sum(n_new(a, b) for a, b in pairwise(ordered)) if ordered else 0
