"""Best-first search over the tree of game24, for `tree_search.py`: the policy proposes expansions of a node, V orders the frontier.

    frontier = {root};  until 24 is found, the nodes are used up, or nothing is left:
        take the node of the highest score, ask for expansions of it, add those that are possible, score them

Policy and critic see a node as the state of an episode that walked straight to it [ours]. It holds only the replies
that led there. So their answers do not depend on the order of the search, and the state looks like training data.
Without a critic the score is a constant (breadth-first), the depth, or chance; all have the same node budget.
Source: Self-AC slides, ToT agent ("the critic's V of a node orders the search"); Tree of Thoughts, arXiv 2305.10601.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stages.envs import exact24, game24
from stages.envs.game24_tree import Expand, Node, Tree, expanded, read_action
from stages.frame.react import parse_react
from stages.frame.types import Engine, Malformed, Message, Request, Scenario
from stages.judge.values import Critic, values_of
from stages.llm.roles import Roles, mix


@dataclass(frozen=True)
class Place:
    """A node, and the replies that walk straight to it; in their episode it is the node of number len(replies)."""

    node: Node
    replies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """What a search came to. chosen: the nodes that were expanded, in order. refused: proposals that added no node."""

    tree: Tree
    won: bool
    chosen: tuple[int, ...]
    proposals: int
    refused: int

    @property
    def n_nodes(self) -> int:
        """Nodes added, the root left out."""
        return len(self.tree.nodes) - 1


Propose = Callable[[Place], Sequence[str]]
"""Replies of a policy that was shown this place."""

Score = Callable[[Sequence[Place]], Sequence[float]]
"""How promising places are; the highest one is expanded first, the oldest of equals."""


def search(root: Tree, propose: Propose, score: Score) -> Found:
    """Best-first search; `root.left` is the budget of nodes. Each node is asked for proposals once.

    A proposal that is unreadable, impossible, of another node, or there already, adds no node and is counted.
    """
    tree, places, proposals = root, [Place(root.nodes[0])], 0
    chosen: list[int] = []
    frontier = [(0.0, 0)]  # (-score, node): the oldest of equals comes first

    def found(won: bool) -> Found:
        return Found(tree, won, tuple(chosen), proposals, proposals - (len(tree.nodes) - len(root.nodes)))

    while frontier and tree.left:
        _, at = heapq.heappop(frontier)
        chosen.append(at)
        fresh = []
        for reply in propose(places[at]):
            proposals += 1
            if (grown := grow(tree, at, places[at], reply)) is None:
                continue
            tree = grown
            places.append(Place(tree.nodes[-1], (*places[at].replies, reply)))
            if tree.nodes[-1].wins:
                return found(True)
            if not tree.left:
                return found(False)
            if not tree.nodes[-1].dead:
                fresh.append(len(places) - 1)
        for number, one in zip(fresh, score([places[number] for number in fresh]) if fresh else (), strict=True):
            heapq.heappush(frontier, (-one, number))
    return found(False)


def grow(tree: Tree, at: int, place: Place, reply: str) -> Tree | None:
    """The tree with what the reply makes of node `at`; None where it makes nothing of it."""
    try:
        action = read_action(parse_react(reply)[1], expressions=False)
    except Malformed:
        return None
    if not isinstance(action, Expand) or action.node != len(place.replies):
        return None
    done = expanded(tree, replace(action, node=at))
    return done if isinstance(done, Tree) else None


def root_of(scenario: Scenario, budget: int) -> Tree:
    """The tree of a puzzle before the first step, with `budget` nodes to be added."""
    return Tree((Node(exact24.numbers_of(tuple(scenario.data["numbers"]))),), budget)


def conversation(options: Mapping[str, Any], scenario: Scenario, place: Place) -> tuple[Message, ...]:
    """The messages of an episode that walked straight to the place: what the environment itself says to its replies."""
    env = game24.make(options)()
    messages: list[Message] = [*env.reset(scenario)]
    for reply in place.replies:
        said: Message = {"role": "assistant", "content": reply}
        messages += [said, *env.step(said).messages]
    return ({"role": "system", "content": env.system}, *messages)


def policy_proposals(
    engine: Engine, roles: Roles, options: Mapping[str, Any], scenario: Scenario,
    *, adapter: str | None, width: int, temperature: float, max_tokens: int, seed: int,
) -> Propose:  # fmt: skip
    """`width` replies of the policy at a place. They depend on the place alone, whatever the search's order."""

    def propose(place: Place) -> list[str]:
        ids = engine.encode(roles.policy(conversation(options, scenario, place)))
        seeds = [mix(seed, scenario.id, place.replies, i) for i in range(width)]
        return [
            reply.text
            for reply in engine.generate([Request(ids, max_tokens, temperature, one, adapter) for one in seeds])
        ]

    return propose


def by_value(critic: Critic, engine: Engine, roles: Roles, options: Mapping[str, Any], scenario: Scenario) -> Score:
    """V of the state that each place is."""
    return lambda places: values_of(
        critic, engine.encode_all([roles.policy(conversation(options, scenario, place)) for place in places])
    )


def breadth_first(places: Sequence[Place]) -> list[float]:
    return [0.0] * len(places)


def depth_first(places: Sequence[Place]) -> list[float]:
    return [float(len(place.replies)) for place in places]


def at_random(scenario: Scenario, seed: int) -> Score:
    return lambda places: [mix(seed, "order", scenario.id, place.replies) / 2**63 for place in places]


def by_truth(places: Sequence[Place]) -> list[float]:
    """A perfect critic: 0 where 24 can no longer be made of the node, else the more the fewer numbers are left."""
    return [exact24.solvable(place.node.numbers) / len(place.node.numbers) for place in places]
