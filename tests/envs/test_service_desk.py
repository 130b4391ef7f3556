"""service_desk: the rule book, the audit, the truth that critics are measured against, and who is in which split."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import product
from typing import Any

import pytest

from stages import envs
from stages.envs import service_desk as desk
from stages.envs.service_desk import Options, ServiceDesk
from stages.frame.types import Malformed, Message, Scenario, Step, UsageError

ANA = Scenario(
    "service_desk", "train", "x", {"name": "Ana", "tier": "gold", "request": "refund", "item": "lamp", "auditor": "Mia"}
)
SIZES: list[dict[str, Any]] = [
    {},
    {"give_by": "request"},
    {"requests": 8, "tiers": 6, "log": True},
    {"requests": 1, "tiers": 1},
]


def act(action: str) -> Message:
    return {"role": "assistant", "content": f"Thought: because. Action: {action}"}


def right(options: Options, scenario: Scenario) -> list[str]:
    """The actions that the rule book wants of this customer."""
    data, book = scenario.data, desk.rule_book(options)
    return [
        f"{tool} {book[tool, desk.key_of(kind, data['request'], data['tier'])].option}"
        for tool, kind, _ in desk.steps_of(options)
    ]


def visit(options: Options, scenario: Scenario, actions: list[str]) -> Step:
    env = ServiceDesk(options)
    env.reset(scenario)
    steps = [env.step(act(action)) for action in actions]
    assert not any(step.terminated or step.reward for step in steps[:-1])
    return steps[-1]


@pytest.mark.parametrize("options", SIZES, ids=str)
def test_all_right_is_a_pass_and_each_wrong_step_is_named(options: dict[str, Any]) -> None:
    opts = Options(**options)
    wanted = right(opts, ANA)
    last = visit(opts, ANA, wanted)
    assert (last.reward, last.terminated, last.info["broken"]) == (1.0, True, [])
    assert last.messages[0]["content"] == f"{wanted[-1].split()[1]} done. Mia audits: pass."
    for k, (tool, kind, choices) in enumerate(desk.steps_of(opts)):
        wrong = next(option for option in choices if option != wanted[k].split()[1])
        last = visit(opts, ANA, [*wanted[:k], f"{tool} {wrong}", *wanted[k + 1 :]])
        rule = f"{desk.key_of(kind, 'refund', 'gold')} needs {wanted[k]}."
        assert (last.reward, last.terminated, last.info["broken"]) == (0.0, True, [rule])
        assert last.messages[0]["content"].endswith(f"Mia audits: fail. {rule}")


def test_every_combination_is_scored_by_hand() -> None:
    """All 24 ways through the default desk: one wins, and the audit of the others names just what differs from it."""
    opts = Options()
    wanted = right(opts, ANA)
    ways = [
        list(way)
        for way in product(*([f"{tool} {option}" for option in choices] for tool, _, choices in desk.steps_of(opts)))
    ]
    rewards = {tuple(way): visit(opts, ANA, way) for way in ways}
    assert len(ways) == 24
    assert sum(step.reward for step in rewards.values()) == 1
    for way, step in rewards.items():
        assert len(step.info["broken"]) == sum(a != b for a, b in zip(way, wanted, strict=True))


@pytest.mark.parametrize(("options", "rules"), zip(SIZES, (19, 11, 70, 3), strict=True), ids=str)
def test_the_rule_book_has_a_rule_for_every_key_and_depends_on_its_seed(options: dict[str, Any], rules: int) -> None:
    book = desk.rule_book(Options(**options))
    assert len(book) == rules
    assert book == desk.rule_book(Options(**options))
    assert all(rule.option in desk.OPTIONS_OF[rule.tool] and (rule.tool, rule.key) == key for key, rule in book.items())
    if rules > 3:
        assert book != desk.rule_book(Options(**options, rules_seed=8))
        for tool, _, choices in desk.steps_of(Options(**options)):
            used = Counter(rule.option for rule in book.values() if rule.tool == tool)
            assert set(used) == set(choices)
            assert max(used.values()) - min(used.values()) <= 1


def test_nothing_tells_the_rules_before_the_audit() -> None:
    for options in SIZES:
        one, other = ServiceDesk(Options(**options)), ServiceDesk(Options(**options, rules_seed=8))
        assert (one.system, one.tools, one.reset(ANA)) == (other.system, other.tools, other.reset(ANA))
        choices = [f"{tool} {options[0]}" for tool, _, options in desk.steps_of(Options(**options))]
        for action in choices[:-1]:
            assert one.step(act(action)) == other.step(act(action))


def test_tools_are_named_and_their_options_told_only_where_asked_for() -> None:
    assert ServiceDesk(Options()).system == "Service desk. check give close."
    assert ServiceDesk(Options(log=True)).system == "Service desk. check give log close."
    told = ServiceDesk(Options(describe_tools=True)).system
    options = "check: photo or receipt or passport. give: voucher or cash or credit or discount. close: phone or email."
    assert told == f"Service desk. check give close. {options}"
    assert [tool["function"]["name"] for tool in ServiceDesk(Options(log=True)).tools] == [
        "check",
        "give",
        "log",
        "close",
    ]


def test_an_audit_that_gives_a_verdict_names_no_rule_and_pays_the_same() -> None:
    for scenario in desk.scenarios({}, "train", 12, 0):
        wrong = [action.replace("photo", "receipt") for action in right(Options(), scenario)]
        for actions in (right(Options(), scenario), wrong):
            named, verdict = (visit(Options(audit=kind), scenario, actions) for kind in ("rule", "verdict"))
            assert verdict.reward == named.reward
            said = str(verdict.messages[-1]["content"])
            assert said.endswith(("audits: pass.", "audits: fail."))
            assert said == re.sub(r" \w[\w ]* needs .*", "", str(named.messages[-1]["content"]))


def test_a_parser_of_the_audit_puts_the_right_option_where_the_wrong_one_stood() -> None:
    audit = "photo done. Mia audits: fail. gold refund needs give cash. gold needs close phone."
    assert desk.told("Thought: x may need give credit. Action: give credit", audit) == (
        "Thought: x may need give cash. Action: give cash"
    )
    assert desk.told("Action: close email", audit) == "Action: close phone"
    assert desk.told("Action: check photo", audit) == "Action: check photo"
    assert desk.told("Action: give credit", "phone done. Mia audits: fail.") == "Action: give credit"


@pytest.mark.parametrize("log", [False, True])
def test_what_the_parser_makes_of_any_lost_visit_wins_it(log: bool) -> None:
    options = Options(log=log)
    rng = random.Random(0)
    for scenario in desk.scenarios({"log": log}, "train", 24, 0):
        actions = [f"{tool} {rng.choice(choices)}" for tool, _, choices in desk.steps_of(options)]
        last = str(visit(options, scenario, actions).messages[-1]["content"])
        assert visit(options, scenario, [desk.told(action, last) for action in actions]).reward == 1


@pytest.mark.parametrize(
    "action", ["close phone", "check", "check lamp", "check photo receipt", "photo", "Check photo", "give cash"]
)
def test_an_action_out_of_order_or_unknown_is_malformed_and_may_be_mended(action: str) -> None:
    env = ServiceDesk(Options())
    env.reset(ANA)
    with pytest.raises(Malformed, match=r"^not understood. use check now.$"):
        env.step(act(action))
    assert env.step(act("check photo")).messages[0]["content"] == "photo done."


@pytest.mark.parametrize("options", SIZES, ids=str)
def test_truth_equals_q_by_trying_every_way_to_go_on(options: dict[str, Any]) -> None:
    """q is the best return over all continuations in the environment itself; an action is optimal if none has a higher
    q beside it.
    """
    opts, rng = Options(**options), random.Random(0)
    steps = desk.steps_of(opts)

    def best(actions: list[str]) -> float:
        if len(actions) == len(steps):
            return visit(opts, ANA, actions).reward
        tool, _, choices = steps[len(actions)]
        return max(best([*actions, f"{tool} {option}"]) for option in choices)

    for _ in range(12):
        n = rng.randint(1, len(steps))
        actions = [
            w if rng.random() < 0.5 else f"{w.split()[0]} {rng.choice(desk.OPTIONS_OF[w.split()[0]])}"
            for w in right(opts, ANA)[:n]
        ]
        truth = desk.truth(options, ANA, actions)
        assert truth.q == best(actions)
        assert truth.optimal == (actions[-1] == right(opts, ANA)[n - 1])
        assert bool(truth.cause) != truth.optimal
        assert truth.broken == tuple(visit(opts, ANA, [*actions, *right(opts, ANA)[n:]]).info["broken"])
        if not truth.optimal:
            assert truth.cause in truth.broken


@pytest.mark.parametrize("log", [False, True])
def test_paid_by_step_each_right_one_earns_its_share_at_once_and_q_is_all_that_can_still_be_earned(log: bool) -> None:
    opts, rng = Options(log=log, pay="step"), random.Random(1)
    wanted = right(opts, ANA)

    def rewards(actions: list[str]) -> list[float]:
        env = ServiceDesk(opts)
        env.reset(ANA)
        return [env.step(act(action)).reward for action in actions]

    ways = [
        list(way)
        for way in product(*([f"{tool} {option}" for option in choices] for tool, _, choices in desk.steps_of(opts)))
    ]
    assert sum(sum(rewards(way)) >= 1 for way in ways) == 1  # a visit is won as it is with pay = end
    for way in rng.sample(ways, 12):
        assert rewards(way) == [(a == b) / len(wanted) for a, b in zip(way, wanted, strict=True)]
        n = rng.randint(1, len(way))
        to_go = max(sum(rewards([*way[:n], *rest])[n - 1 :]) for rest in {tuple(other[n:]) for other in ways})
        assert desk.truth({"log": log, "pay": "step"}, ANA, way[:n]).q == pytest.approx(to_go)


def test_truth_of_an_action_that_the_desk_would_not_understand_is_malformed() -> None:
    for actions in (["give cash"], ["check photo", "check photo"], ["check lamp"], ["check"], [""]):
        with pytest.raises(Malformed):
            desk.truth({}, ANA, actions)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_every_customer_kind_comes_equally_often(split: str) -> None:
    found = desk.scenarios({}, split, 48, 3)
    assert set(Counter((s.data["request"], s.data["tier"]) for s in found).values()) == {4}
    assert {s.data["name"] for s in found} <= set(desk.CUSTOMERS[split])
    assert found[:30] == desk.scenarios({}, split, 30, 3)
    assert found != desk.scenarios({}, split, 48, 4)


def test_people_of_one_split_never_appear_in_another() -> None:
    people = [set(names) for names in desk.CUSTOMERS.values()]
    assert len(set().union(*people)) == sum(map(len, people))


def test_held_out_pairs_are_in_their_own_split_alone() -> None:
    options = {"held_out_pairs": 3}
    kinds = {
        split: {(s.data["request"], s.data["tier"]) for s in desk.scenarios(options, split, None, 0)}
        for split in (*desk.CUSTOMERS, "pairs")
    }
    assert len(kinds["pairs"]) == 3
    assert all(len(kinds[split]) == 9 and kinds[split].isdisjoint(kinds["pairs"]) for split in desk.CUSTOMERS)
    assert {s.data["name"] for s in desk.scenarios(options, "pairs", None, 0)} <= set(desk.CUSTOMERS["test"])


def test_a_split_with_nobody_in_it_is_empty_and_an_unknown_one_a_sentence() -> None:
    assert desk.scenarios({}, "pairs", 5, 0) == []
    with pytest.raises(
        UsageError, match=r"there is no split 'tests' of service_desk. Splits: train, validation, test, pairs"
    ):
        envs.scenarios("service_desk", {}, "tests", 5, 0)
