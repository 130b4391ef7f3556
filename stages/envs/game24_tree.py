"""The search tree of game24, its two actions, and how far it is from a win. Pure functions over frozen values. Ours."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from stages.envs import exact24
from stages.envs.exact24 import TARGET, Move, Numbers
from stages.frame.types import Malformed

_NUMBER = r"(-?[0-9]{1,6}(?:/0*[1-9][0-9]{0,5})?)"
_EXPAND = re.compile(rf"expand\s+([0-9]{{1,4}})\s*:\s*{_NUMBER}\s*([-+*/])\s*{_NUMBER}\s*=\s*{_NUMBER}", re.IGNORECASE)
_SUBMIT = re.compile(r"submit\s+([0-9]{1,4})", re.IGNORECASE)
# "(1 + 2) * 8 * 1 = 24", too, as Tree of Thoughts has its answers: what counts is the left side.
_EXPRESSION = re.compile(r"submit\s+([-0-9(].*?)(?:\s*=\s*24)?", re.IGNORECASE)


def spaced(numbers: Numbers) -> str:
    return " ".join(map(str, numbers))


@dataclass(frozen=True)
class Node:
    """Numbers left, and the moves that led there from the root."""

    numbers: Numbers
    moves: tuple[Move, ...] = ()

    @property
    def wins(self) -> bool:
        return self.numbers == (TARGET,)

    @property
    def dead(self) -> bool:
        """Nothing can be done with it: one number, and not 24."""
        return len(self.numbers) == 1 and not self.wins

    def __str__(self) -> str:
        return f"{spaced(self.numbers)} ({'; '.join(map(str, self.moves))})" if self.moves else spaced(self.numbers)


@dataclass(frozen=True)
class Tree:
    """The state of the game. A node's place is its id; `left` more may be added."""

    nodes: tuple[Node, ...]
    left: int

    @property
    def open_nodes(self) -> list[str]:
        return [f"node {i}: {node}" for i, node in enumerate(self.nodes) if not node.dead]

    @property
    def to_win(self) -> float:
        """Expansions to the nearest 24; inf where none can be reached with those that are left."""
        needed = min((len(node.numbers) - 1 for node in self.nodes if exact24.solvable(node.numbers)), default=math.inf)
        return needed if needed <= self.left else math.inf


@dataclass(frozen=True)
class Expand:
    """What the agent wrote: a op b = c on a node, not checked."""

    node: int
    a: Fraction
    op: str
    b: Fraction
    c: Fraction


@dataclass(frozen=True)
class Submit:
    """A node's id, or an expression."""

    what: int | str


def read_action(action: str, *, expressions: bool) -> Expand | Submit:
    """Raises Malformed. expressions: whether one may be submitted."""
    if found := _EXPAND.fullmatch(action.strip()):
        node, a, op, b, c = found.groups()
        return Expand(int(node), Fraction(a), op, Fraction(b), Fraction(c))
    if found := _SUBMIT.fullmatch(action.strip()):
        return Submit(int(found[1]))
    if expressions and (found := _EXPRESSION.fullmatch(action.strip())):
        return Submit(found[1])
    raise Malformed("not understood. use expand NODE: a op b = c, or submit NODE")


def expanded(tree: Tree, action: Expand) -> Tree | str:
    """The tree with the new node last, or what makes the action impossible."""
    if not tree.left:
        return "no expansions are left, only a submission"
    if action.node >= len(tree.nodes):
        return f"there is no node {action.node}"
    if action.op == "/" and not action.b:
        return "nothing can be divided by 0"
    node, made = tree.nodes[action.node], exact24.move(action.a, action.op, action.b)
    rest = exact24.without(node.numbers, made)
    if rest is None:
        return f"node {action.node} does not hold {action.a} and {action.b}"
    if made.c != action.c:
        return f"{action.a} {action.op} {action.b} is {made.c}, not {action.c}"
    new = Node(rest, (*node.moves, made))
    if new in tree.nodes:
        return f"that is node {tree.nodes.index(new)} already"
    return Tree((*tree.nodes, new), tree.left - 1)


def submitted(tree: Tree, action: Submit) -> tuple[bool, str] | str:
    """(whether it wins, what it is), or what makes the action impossible."""
    if isinstance(action.what, str):
        try:
            value = exact24.evaluate_expression(action.what, tree.nodes[0].numbers)
        except ValueError as error:
            return False, f"{action.what} does not count: {error}"
        return value == TARGET, f"{action.what} is {value}"
    if action.what >= len(tree.nodes):
        return f"there is no node {action.what}"
    node = tree.nodes[action.what]
    return node.wins, f"node {action.what} is {spaced(node.numbers)}"
