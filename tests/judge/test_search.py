"""Tree search on game24: against a slow twin, with a perfect score and with none, and what policy and critic are shown
of a node.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import models
import pytest

from benchmarks.evidence.search import (
    Found,
    Place,
    Score,
    at_random,
    breadth_first,
    by_truth,
    by_value,
    conversation,
    depth_first,
    grow,
    policy_proposals,
    root_of,
    search,
)
from stages import envs
from stages.envs import exact24, game24
from stages.envs.game24_tree import Node, Tree, spaced
from stages.frame.types import Request, Scenario
from stages.judge.values import Critic, values_of
from stages.learn.value_head import new_head
from stages.llm.roles import load_roles
from stages.llm.scripted import ScriptedEngine
from stages.play.rollout import RolloutSettings, rollout

ROLES = load_roles("service_desk")
PUZZLES = envs.scenarios("game24", {}, "test", 40, 0)


def legal(place: Place) -> list[str]:
    """Every possible expansion of the place, in the order of `choices`."""
    return [
        f"Action: expand {len(place.replies)}: {move}" for move in dict.fromkeys(exact24.choices(place.node.numbers))
    ]


def some(width: int, seed: int, *, broken: float = 0.0) -> Callable[[Place], list[str]]:
    """`width` of them at random, a share of which are spoilt; the same at the same place."""

    def propose(place: Place) -> list[str]:
        rng = random.Random(f"{seed} {place}")
        chosen = [rng.choice(legal(place)) for _ in range(width)]
        spoilt = ("no idea", "Action: submit 0", "Action: expand 9: 1 + 1 = 2", "Action: expand 0: 1 + 1 = 3")
        return [rng.choice(spoilt) if rng.random() < broken else one for one in chosen]

    return propose


def chance(seed: int) -> Score:
    """Few levels, so that there are ties."""
    return lambda places: [random.Random(f"{seed} {place}").randrange(3) / 2 for place in places]


def slow_search(root: Tree, propose: Any, score: Score) -> tuple[list[Node], bool, list[int], int]:
    """The same by lists alone: the whole frontier is scored and gone through at every step."""
    replies: list[tuple[str, ...]] = [()]
    nodes, waiting, chosen, proposals = [root.nodes[0]], [0], [], 0
    while waiting and len(nodes) - 1 < root.left:
        best = waiting[0]
        for one in waiting:
            if score([Place(nodes[one], replies[one])])[0] > score([Place(nodes[best], replies[best])])[0]:
                best = one
        waiting.remove(best)
        chosen.append(best)
        for text in propose(Place(nodes[best], replies[best])):
            proposals += 1
            known = legal(Place(nodes[best], replies[best]))
            if text not in known:
                continue
            made = list(dict.fromkeys(exact24.choices(nodes[best].numbers)))[known.index(text)]
            rest = exact24.without(nodes[best].numbers, made)
            assert rest is not None
            new = Node(rest, (*nodes[best].moves, made))
            if new in nodes:
                continue
            nodes.append(new)
            replies.append((*replies[best], text))
            if nodes[-1].wins:
                return nodes, True, chosen, proposals
            if len(nodes) - 1 == root.left:
                return nodes, False, chosen, proposals
            if not nodes[-1].dead:
                waiting.append(len(nodes) - 1)
    return nodes, False, chosen, proposals


@pytest.mark.parametrize("order", ["chance", "breadth", "truth"])
def test_search_equals_a_search_by_lists(order: str) -> None:
    for seed, scenario in enumerate(PUZZLES[:12]):
        score = {"chance": chance(seed), "breadth": breadth_first, "truth": by_truth}[order]
        propose, root = some(4, seed, broken=0.3), root_of(scenario, 5 + seed)
        found = search(root, propose, score)
        nodes, won, chosen, proposals = slow_search(root, propose, score)
        assert (list(found.tree.nodes), found.won, list(found.chosen), found.proposals) == (
            nodes,
            won,
            chosen,
            proposals,
        )
        assert found.n_nodes == len(nodes) - 1 == found.proposals - found.refused <= 5 + seed


def test_with_a_perfect_score_every_puzzle_is_won_in_three_expansions_and_level_by_level_none_is() -> None:
    """All expansions are proposed, so the budget decides: three nodes' children are at most 36 + 18 + 6, and a search
    by levels spends 60 on the first and the second, while a win stands on the third.
    """
    by_score = {
        name: [search(root_of(s, 60), legal, score) for s in PUZZLES]
        for name, score in (("truth", by_truth), ("none", breadth_first))
    }
    assert all(found.won and len(found.chosen) <= 3 for found in by_score["truth"])
    assert not any(found.won for found in by_score["none"])
    assert all(found.n_nodes == 60 for found in by_score["none"])


def test_at_the_same_budget_and_the_same_proposals_a_perfect_score_wins_more_than_none_or_chance() -> None:
    """Six proposals a place, 24 nodes, 200 searches: the truth wins 68, level by level 0, depth first and chance 10
    each.

    On equal terms: a place is told the same whoever asks."""

    def wins(score_of: Callable[[Scenario], Score]) -> int:
        return sum(search(root_of(s, 24), some(6, i), score_of(s)).won for i, s in enumerate(PUZZLES * 5))

    truth = wins(lambda s: by_truth)
    others = [wins(lambda s: breadth_first), wins(lambda s: depth_first), wins(lambda s: at_random(s, 0))]
    assert truth > 3 * max(others)


def test_a_constant_score_goes_level_by_level_and_depth_first_does_not() -> None:
    def levels(found: Found) -> list[int]:
        return [len(found.tree.nodes[i].moves) for i in found.chosen]

    flat, deep = (levels(search(root_of(PUZZLES[3], 40), some(3, 1), score)) for score in (breadth_first, depth_first))
    assert flat == sorted(flat) and flat[:4] == [0, 1, 1, 1]
    assert deep[:3] == [0, 1, 2] and deep != sorted(deep)


def test_what_adds_no_node_is_counted_and_costs_none_of_the_budget() -> None:
    scenario = Scenario("game24", "test", "x", {"numbers": [1, 2, 3, 4]})
    good, other = "Thought: so\nAction: expand 0: 2 * 3 = 6", "<think>so</think><action>expand 0: 3 + 4 = 7</action>"
    bad = (
        "mumble",
        "Action: submit 0",
        "Action: expand 1: 2 * 3 = 6",
        "Action: expand 0: 2 * 3 = 7",
        "Action: expand 0: 9 + 9 = 18",
        good,
    )
    replies = {0: (good, *bad, other), 1: ()}
    found = search(root_of(scenario, 5), lambda place: replies[len(place.replies)], breadth_first)
    assert [spaced(node.numbers) for node in found.tree.nodes] == ["1 2 3 4", "1 4 6", "1 2 7"]
    assert (found.won, found.proposals, found.refused, found.tree.left, found.chosen) == (False, 8, 6, 3, (0, 1, 2))


def test_a_place_s_node_has_the_number_of_an_episode_that_walked_straight_to_it() -> None:
    """Node 2 of the search is node 1 of that episode, and its reply says so."""
    scenario = Scenario("game24", "test", "x", {"numbers": [1, 2, 3, 4]})
    first, second, last = "Action: expand 0: 3 + 4 = 7", "Action: expand 0: 2 * 3 = 6", "Action: expand 1: 4 * 6 = 24"
    tree = root_of(scenario, 5)
    for reply in (first, second):
        grown = grow(tree, 0, Place(tree.nodes[0]), reply)
        assert grown is not None
        tree = grown
    place = Place(tree.nodes[2], (second,))
    grown = grow(tree, 2, place, last)
    assert grown is not None and spaced(grown.nodes[-1].numbers) == "1 24"
    assert grow(tree, 2, place, "Action: expand 2: 4 * 6 = 24") is None
    texts = [str(m["content"]) for m in conversation({}, scenario, Place(grown.nodes[-1], (second, last)))]
    assert "Node 2 is 1 24" in texts[-1] and not any("7" in text.split("expansions")[0] for text in texts[1:])


@pytest.mark.parametrize("show", ["tree", "new"])
def test_a_place_is_shown_as_the_state_of_a_real_episode(show: str) -> None:
    """The prompts of a rollout whose policy walks straight are, id by id, those of the places on its way."""
    scenario, options = PUZZLES[0], {"show": show}
    walk: list[str] = []
    node = Node(exact24.numbers_of(tuple(scenario.data["numbers"])))
    while len(node.numbers) > 1:
        walk.append(legal(Place(node, tuple(walk)))[1])
        move = list(dict.fromkeys(exact24.choices(node.numbers)))[1]
        rest = exact24.without(node.numbers, move)
        assert rest is not None
        node = Node(rest, (*node.moves, move))
    engine = ScriptedEngine(lambda prompt, request: [*walk, "Action: submit 0"][prompt.count("<assistant>\n") - 1])
    settings = RolloutSettings(None, 1.0, 100, 8, 0, 1, 1, 0)
    (episode,) = rollout(engine, game24.make(options), [scenario], ROLES, settings)
    assert len(episode.turns) == 4
    for k, turn in enumerate(episode.turns):
        messages = conversation(options, scenario, Place(node, tuple(walk[:k])))
        assert engine.encode(ROLES.policy(messages)) == turn.prompt_ids


def test_the_policy_is_asked_the_same_at_a_place_whoever_searches() -> None:
    def reply(prompt: str, request: Request) -> str:
        numbers = exact24.numbers_of((1, 2, 3, 4))
        return f"Action: expand 0: {random.Random(request.seed).choice(list(exact24.choices(numbers)))}"

    scenario, engine = Scenario("game24", "test", "x", {"numbers": [1, 2, 3, 4]}), ScriptedEngine(reply)
    engine.load_adapter("a", Path("a"))
    settings: dict[str, Any] = {"adapter": "a", "width": 3, "temperature": 0.7, "max_tokens": 50}
    propose = policy_proposals(engine, ROLES, {}, scenario, seed=1, **settings)
    place = Place(root_of(scenario, 3).nodes[0])
    first = list(propose(place))
    assert len(set(first)) > 1 and propose(place) == first
    assert policy_proposals(engine, ROLES, {}, scenario, seed=2, **settings)(place) != first
    assert {(r.adapter, r.max_tokens, r.temperature) for r in engine.requests} == {("a", 50, 0.7)}
    assert "Node 0 is 1 2 3 4." in engine.prompts[0]


def test_the_critic_orders_by_v_of_the_state_after_the_expansion() -> None:
    model = models.tiny_llama(vocabulary=300)
    engine = ScriptedEngine()
    critic = Critic(model, new_head(model, spread=1.0, seed=0), (7, 8), 1.0)
    score = by_value(critic, engine, ROLES, {}, PUZZLES[0])
    shown: dict[tuple[str, ...], float] = {}

    def noted(places: Sequence[Place]) -> Sequence[float]:
        values = score(places)
        shown.update({place.replies: value for place, value in zip(places, values, strict=True)})
        return values

    found = search(root_of(PUZZLES[0], 9), some(3, 0), noted)
    for replies, value in shown.items():
        state = engine.encode(conversation({}, PUZZLES[0], Place(found.tree.nodes[0], replies)))
        assert values_of(critic, [state]) == pytest.approx([value], abs=1e-5)
    replies_of = [
        tuple(f"Action: expand {depth}: {move}" for depth, move in enumerate(node.moves)) for node in found.tree.nodes
    ]
    assert len(found.chosen) >= 3
    children = [replies for replies in replies_of if len(replies) == 1 and replies in shown]
    assert len(children) > 1 and shown[replies_of[found.chosen[1]]] == max(shown[replies] for replies in children)
