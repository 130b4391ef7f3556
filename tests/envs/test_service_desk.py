"""service_desk: the rule book, the audit, the truth that critics are measured against, and who is in which split."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from stages import envs
from stages.envs import service_desk as desk
from stages.envs.desk_rules import key_of
from stages.envs.desk_words import LACKS
from stages.envs.service_desk import Options, ServiceDesk
from stages.frame.types import Malformed, Message, Scenario, Step, UsageError

ANA = Scenario(
    "service_desk", "train", "x", {"name": "Ana", "tier": "gold", "request": "refund", "item": "lamp", "auditor": "Mia"}
)
SIZES: list[dict[str, Any]] = [
    {},
    {"give_by": "request"},
    {"requests": 8, "tiers": 6, "steps": 4},
    {"requests": 1, "tiers": 1},
]


def act(action: str) -> Message:
    return {"role": "assistant", "content": f"Thought: because. Action: {action}"}


def right(options: Options, scenario: Scenario) -> list[str]:
    """The actions that the rule book wants of this customer."""
    data, book = scenario.data, desk.rule_book(options)
    return [
        f"{tool} {book[tool, key_of(kind, data['request'], data['tier'])].option}"
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
        rule = f"{key_of(kind, 'refund', 'gold')} needs {wanted[k]}."
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
    assert ServiceDesk(Options(steps=4)).system == "Service desk. check give log close."
    told = ServiceDesk(Options(describe_tools=True)).system
    options = "check: photo or receipt or passport. give: voucher or cash or credit or discount. close: phone or email."
    assert told == f"Service desk. check give close. {options}"
    assert [tool["function"]["name"] for tool in ServiceDesk(Options(steps=4)).tools] == [
        "check",
        "give",
        "log",
        "close",
    ]


def test_each_rung_of_the_ladder_says_less_of_the_same_visit_and_pays_the_same() -> None:
    wanted = right(Options(), ANA)
    wrong = [
        f"{tool} {next(o for o in desk.OPTIONS_OF[tool] if o != option)}" for tool, option in map(str.split, wanted)
    ]
    needs = [f"{key} needs {action}." for key, action in zip(("refund", "gold refund", "gold"), wanted, strict=True)]
    bars = [f"{key} bars {action}." for key, action in zip(("refund", "gold refund", "gold"), wrong, strict=True)]
    fails = {
        "rule": f"{needs[0]} {needs[2]}",
        "fault": f"{bars[0]} {bars[2]}",
        "count": "2 wrong.",
        "verdict": "",
        "consequence": "",
    }
    for rung, said in fails.items():
        last = visit(Options(audit=rung), ANA, [wrong[0], wanted[1], wrong[2]])
        text, reward = str(last.messages[0]["content"]), last.reward
        lacks = f"Ana lacks {LACKS[wanted[2].split()[1]]}. " if rung == "consequence" else ""
        assert (text, reward) == (f"{wrong[2].split()[1]} done. {lacks}Mia audits: fail. {said}".strip(), 0)
        assert last.info["broken"] == [needs[0], needs[2]]
        passed = visit(Options(audit=rung), ANA, wanted)
        assert str(passed.messages[0]["content"]).endswith("done. Mia audits: pass.") and passed.reward == 1


def test_a_consequence_is_told_at_once_and_of_wrong_steps_alone() -> None:
    env = ServiceDesk(Options(audit="consequence"))
    env.reset(ANA)
    wanted = right(Options(), ANA)
    for k, action in enumerate([wanted[0], next(f"give {o}" for o in desk.OPTIONS_OF["give"] if o not in wanted[1])]):
        said = str(env.step(act(action)).messages[0]["content"])
        assert said == f"{action.split()[1]} done." + (f" Ana lacks {LACKS[wanted[1].split()[1]]}." if k else "")
    assert len(set(LACKS.values())) == len(LACKS) == sum(map(len, desk.OPTIONS_OF.values()))
    assert set(LACKS) == {option for options in desk.OPTIONS_OF.values() for option in options}


def endings(options: Options, n: int = 400) -> list[Step]:
    """How visits end whose first step is wrong, each a new episode."""
    wanted = right(options, ANA)
    wrong = next(f"check {o}" for o in desk.OPTIONS_OF["check"] if o not in wanted[0])
    return [visit(options, replace(ANA, seed=i), [wrong, *wanted[1:]]) for i in range(n)]


def test_noise_and_silence_come_as_often_as_they_say_hang_on_the_episode_and_leave_the_truth_alone() -> None:
    """Of 400 lost visits 5 standard errors around the share that is asked for."""

    def share(options: Options, told: Callable[[Step], bool]) -> float:
        found = endings(options)
        assert found == endings(options)
        assert all(len(step.info["broken"]) == 1 for step in found)
        return sum(map(told, found)) / len(found)

    def text(step: Step) -> str:
        return str(step.messages[0]["content"])

    assert share(Options(accept_noise=0.1), lambda s: s.reward == 1) == pytest.approx(0.1, abs=0.075)
    assert share(Options(accept_noise=0.1), lambda s: "pass" in text(s)) == pytest.approx(0.1, abs=0.075)
    assert share(Options(audited=0.25), lambda s: "audits" in text(s)) == pytest.approx(0.25, abs=0.11)
    for rung, verb in (("rule", "needs"), ("fault", "bars")):
        options = Options(audit=rung, audit_noise=0.2)
        true = f"refund {verb} check"
        assert share(options, lambda s, true=true: true not in text(s)) == pytest.approx(0.2, abs=0.1)  # type: ignore[misc]
        assert share(options, lambda s, verb=verb: f"{verb} " in text(s)) == 1  # type: ignore[misc]
    silent = visit(Options(audited=0), ANA, right(Options(), ANA))
    assert silent.reward == 1 and str(silent.messages[0]["content"]).endswith(" done. bye.")


def test_a_factored_desk_can_be_told_from_other_pairs_and_a_free_one_cannot() -> None:
    """On a factored desk two tiers differ by the same number of options for every request."""

    def steps_apart(options: Options) -> set[int]:
        book, choices = desk.rule_book(options), desk.OPTIONS_OF["give"]
        number = {key: choices.index(rule.option) for (tool, key), rule in book.items() if tool == "give"}
        requests = {key.split()[1] for key in number}
        return {(number[f"gold {one}"] - number[f"silver {one}"]) % len(choices) for one in requests}

    for seed in range(5):
        assert len(steps_apart(Options(factored=True, rules_seed=seed))) == 1
    assert any(len(steps_apart(Options(rules_seed=seed))) > 1 for seed in range(5))


def test_what_a_parser_makes_of_the_words_of_a_visit() -> None:
    audit = "photo done. Mia audits: fail. gold refund needs give cash. gold needs close phone."
    way = [
        ("Action: check photo", "photo done."),
        ("Thought: x may need give credit. Action: give credit", "credit done."),
        ("Action: close email", audit),
    ]
    assert desk.lessons(way, won=False) == [
        "Action: check photo", "Thought: x may need give cash. Action: give cash", "Action: close phone",
    ]  # fmt: skip
    faults = [*way[:2], (way[2][0], "email done. Mia audits: fail. gold refund bars give credit.")]
    assert desk.lessons(faults, won=False) == [way[0][0], None, way[2][0]]
    lacking = [way[0], (way[1][0], "credit done. Ana lacks money."), (way[2][0], "email done. Mia audits: fail.")]
    assert desk.lessons(lacking, won=False) == [
        way[0][0],
        "Thought: x may need give cash. Action: give cash",
        way[2][0],
    ]
    silent = [*way[:2], (way[2][0], "email done. bye.")]
    assert desk.lessons(silent, won=False) == [None] * 3
    assert desk.lessons(silent, won=True) == [action for action, _ in way]
    counted = [*way[:2], (way[2][0], "email done. Mia audits: fail. 2 wrong.")]
    assert desk.lessons(counted, won=False) == [action for action, _ in way]
    assert [desk.n_wrong(said) for said in (counted[2][1], audit, "email done. bye.")] == [2, 0, 0]


@pytest.mark.parametrize("rung", ["rule", "consequence"])
@pytest.mark.parametrize("n_steps", [3, 8])
def test_what_the_parser_makes_of_any_lost_visit_wins_it(n_steps: int, rung: Any) -> None:
    options = Options(steps=n_steps, audit=rung)
    rng = random.Random(0)
    for scenario in desk.scenarios({"steps": n_steps}, "train", 24, 0):
        actions = [f"{tool} {rng.choice(choices)}" for tool, _, choices in desk.steps_of(options)]
        env = ServiceDesk(options)
        env.reset(scenario)
        seen = [str(env.step(act(action)).messages[0]["content"]) for action in actions]
        mended = desk.lessons(list(zip(actions, seen, strict=True)), won=False)
        assert visit(options, scenario, [str(action) for action in mended]).reward == 1


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
    """q is the best return over all continuations; an action is optimal if none has a higher q beside it."""
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


@pytest.mark.parametrize("n_steps", [3, 4])
def test_paid_by_step_each_right_one_earns_its_share_at_once_and_q_is_all_that_can_still_be_earned(
    n_steps: int,
) -> None:
    opts, rng = Options(steps=n_steps, pay="step"), random.Random(1)
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
        assert desk.truth({"steps": n_steps, "pay": "step"}, ANA, way[:n]).q == pytest.approx(to_go)


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


def test_held_out_pairs_are_those_that_no_other_customer_has() -> None:
    def pairs(split: str, **options: Any) -> set[tuple[str, str]]:
        found = desk.scenarios({"held_out_pairs": 3, **options}, split, None, 0)
        return {(s.data["request"], s.data["tier"]) for s in found}

    for split in desk.CUSTOMERS:
        held_out = pairs(split, only_held_out=True)
        assert len(held_out) == 3
        assert len(pairs(split)) == 9
        assert pairs(split).isdisjoint(held_out)
    assert pairs("train", only_held_out=True) == pairs("test", only_held_out=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"held_out_pairs": 12}, "held_out_pairs: wanted at most 11, so that a customer is left, found 12"),
        ({"only_held_out": True}, "only_held_out needs held_out_pairs above 0"),
    ],
)
def test_a_desk_without_a_customer_is_one_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Options(**options)


def test_an_unknown_split_is_a_sentence() -> None:
    with pytest.raises(
        UsageError, match=r"there is no split 'tests' of service_desk. Splits: train, validation, test\."
    ):
        envs.scenarios("service_desk", {}, "tests", 5, 0)
