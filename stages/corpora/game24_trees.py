"""Games of 24 played by an agent that knows the rules and little more. Ours.

Each expansion takes a random node, more often the newest. It makes a random legal move with the right result, mostly
one that leaves small whole numbers. It takes every second chance to make 24 from the last two numbers, and submits a 24
that it has. Else it submits something when no expansion is left, or at random late. Sometimes a result is wrong, and
the game goes on from its answer. Otherwise a model would be lost after its first slip. Only puzzles of the training
split.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace

from stages import envs
from stages.corpora import Example
from stages.envs.exact24 import TARGET, Move, choices, numbers_of
from stages.envs.game24_tree import Expand, Node, Submit, Tree, expanded, spaced
from stages.frame.types import Message, Scenario
from stages.llm.roles import Roles

EXPANSIONS = 6
# the list of all open nodes after every action would be most of the episode's tokens
OPTIONS = {"expansions": EXPANSIONS, "show": "new"}
NEWEST = 0.7
SMALL = 0.95  # share of the moves that make one of 0 to 99
SLIPS = 0.04
FINISHES = 0.5
GIVES_UP = 0.05


def example(rng: random.Random, roles: Roles) -> Example:
    """One game until its submission."""
    scenario = rng.choice(_train())
    env = envs.make_env("game24", OPTIONS)()
    messages: list[Message] = [{"role": "system", "content": env.system}, *env.reset(scenario)]
    tree = Tree((Node(numbers_of(tuple(scenario.data["numbers"]))),), EXPANSIONS)
    while True:
        action = choose(tree, rng)
        if isinstance(action, Expand) and rng.random() < SLIPS:
            action = replace(action, c=action.c + rng.choice((-2, -1, 1, 2)))
        reply: Message = {"role": "assistant", "content": told(tree, action)}
        step = env.step(reply)
        if step.terminated:
            return Example("game24", tuple(roles.policy(messages)), reply["content"])
        messages += [reply, *step.messages]
        if isinstance(action, Expand) and isinstance(done := expanded(tree, action), Tree):
            tree = done


def choose(tree: Tree, rng: random.Random) -> Expand | Submit:
    """A legal action."""
    wins = [i for i, node in enumerate(tree.nodes) if node.wins]
    moves = {i: found for i, node in enumerate(tree.nodes) if (found := _new_moves(tree, i, node))}
    if wins or not tree.left or not moves or (len(tree.nodes) > 4 and rng.random() < GIVES_UP):
        return Submit(wins[0] if wins else len(tree.nodes) - 1)
    i = max(moves) if rng.random() < NEWEST else rng.choice(list(moves))
    return Expand(i, *_choose_move(tree.nodes[i], moves[i], rng))


def told(tree: Tree, action: Expand | Submit) -> str:
    """The reply: what the agent looks at, then what it does."""
    if isinstance(action, Submit):
        return f"Thought: node {action.what} is {spaced(tree.nodes[int(action.what)].numbers)}.\nAction: submit {action.what}"
    move = Move(action.a, action.op, action.b, action.c)
    return f"Thought: node {action.node} has {spaced(tree.nodes[action.node].numbers)}.\nAction: expand {action.node}: {move}"


def _choose_move(node: Node, moves: Sequence[Move], rng: random.Random) -> Move:
    last = [move for move in moves if len(node.numbers) == 2 and move.c == TARGET]
    if last and rng.random() < FINISHES:
        return last[0]
    small = [move for move in moves if 0 <= move.c < 100 and move.c.denominator == 1]
    return rng.choice(small if small and rng.random() < SMALL else moves)


def _new_moves(tree: Tree, i: int, node: Node) -> list[Move]:
    """Moves of a node that lead to a node that is not there yet."""
    return [move for move in choices(node.numbers) if isinstance(expanded(tree, Expand(i, *move)), Tree)]


@functools.lru_cache(maxsize=1)
def _train() -> list[Scenario]:
    return envs.scenarios("game24", OPTIONS, "train", None, 0)
