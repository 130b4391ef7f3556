"""wide_desk: v^s actions a step, the rungs of the audit, the parser of each, the truth, and who is in which split."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from typing import Any

import pytest

from stages import envs
from stages.envs import wide_desk as desk
from stages.envs.desk_rules import REQUESTS, TIERS
from stages.envs.wide_desk import WideDesk, truth
from stages.envs.wide_rules import Options, needed, rule_book, tools_of
from stages.envs.wide_words import (
    SLOTS,
    STEPS,
    VALUES_OF,
    Phrase,
    audit,
    blame,
    lessons,
    may,
    n_wrong,
    phrase_of,
    spoken,
    values_in,
)
from stages.frame.types import Completion, Episode, Malformed, Message, Outcome, Scenario, Step, Turn, UsageError

ANA = Scenario("wide_desk", "train", "x", {"name": "Ana", "tier": "gold", "request": "refund", "item": "lamp"})
SIZES = {3: (1, 3), 9: (2, 3), 27: (3, 3), 81: (4, 3), 243: (5, 3), 625: (4, 5)}
"""Actions a step -> (slots, values)."""
RUNGS = ("answer", "value", "slot", "step", "verdict")
RIGHT, WRONG = ("cash", "mail", "march"), ("cash", "phone", "june")
"""The second differs in its second and in its third slot."""


def act(action: str) -> Message:
    return {"role": "assistant", "content": f"Thought: gold refund. Action: {action}"}


def phrases(slots: int, values: int) -> list[Phrase]:
    return list(product(*(VALUES_OF[slot][:values] for slot in SLOTS[:slots])))


def other(phrase: Phrase, *slots: int) -> Phrase:
    """The same with another value in each of these slots."""
    return tuple(
        next(one for one in VALUES_OF[SLOTS[j]] if one != value) if j in slots else value
        for j, value in enumerate(phrase)
    )


def visit(options: dict[str, Any], chosen: list[Phrase]) -> Step:
    env = WideDesk(Options(**options))
    env.reset(ANA)
    steps = [env.step(act(f"{tool} {spoken(phrase)}")) for tool, phrase in zip(STEPS, chosen, strict=False)]
    assert not any(step.terminated or step.reward for step in steps[:-1])
    assert all(step.messages[0]["content"] == "done." for step in steps[:-1])
    return steps[-1]


def words(step: Step) -> str:
    return str(step.messages[0]["content"])


def reads(env: WideDesk, action: str) -> bool:
    env.reset(ANA)
    try:
        env.step(act(action))
    except Malformed:
        return False
    return True


@pytest.mark.parametrize(("actions", "size"), SIZES.items())
def test_a_step_has_v_to_the_s_actions_and_one_of_them_wins(actions: int, size: tuple[int, int]) -> None:
    slots, values = size
    options = {"slots": slots, "values": values, "steps": 1}
    env = WideDesk(Options(**options))
    every = [f"give {spoken(phrase)}" for phrase in phrases(5, 5)] if actions < 100 else []
    every += [f"give {spoken(phrase)}" for phrase in phrases(slots, 5)]
    assert sum(reads(env, action) for action in set(every)) == actions
    assert sum(visit(options, [phrase]).reward for phrase in phrases(slots, values)) == 1


@pytest.mark.parametrize("text", [
    "give", "give cash", "give the cash by mail", "give the mail by cash in march", "lend the cash by mail in march", "the cash by mail in march",
    "give cash mail march", "give cash by mail in march", "give the cash by mail in march at shop", "give the voucher by mail in march", "give the cash by mail in march.", "give by cash in mail march",
])  # fmt: skip
def test_what_is_no_phrase_of_the_step_and_the_size_is_malformed(text: str) -> None:
    assert not reads(WideDesk(Options()), text)
    assert reads(WideDesk(Options()), "give the cash by mail in march")


def test_values_and_phrases_are_the_same_in_words_and_back() -> None:
    rng = random.Random(0)
    every = [value for values in VALUES_OF.values() for value in values]
    assert len(set(every)) == len(every) == 25
    for phrase in rng.sample(phrases(5, 5), 200):
        assert values_in(spoken(phrase)) == phrase == phrase_of(f"give {spoken(phrase)}", "give", 5, 5)
    assert spoken(phrases(5, 1)[0]) == "the cash by mail in march at shop with receipt"


def test_the_prompt_tells_the_size_and_no_rule() -> None:
    one, two = WideDesk(Options()), WideDesk(Options(rules_seed=8))
    assert (one.system, one.reset(ANA)) == (two.system, two.reset(ANA))
    assert one.system == "Wide desk. give lend. thing channel month. 3 values."
    told = WideDesk(Options(slots=2, values=2, steps=1, describe=True)).system
    assert told == (
        "Wide desk. give. thing channel. 2 values. thing: cash or credit. channel: mail or phone. "
        "An action names a value of each, in this order: give the cash by mail"
    )


@pytest.mark.parametrize("keyed", ["word", "pair"])
@pytest.mark.parametrize(("slots", "values"), SIZES.values())
def test_the_rule_book_has_a_value_for_every_slot_and_depends_on_its_seed(keyed: Any, slots: int, values: int) -> None:
    options = Options(slots=slots, values=values, keyed=keyed, requests=8, tiers=6)
    book = rule_book(options)
    assert len(book) == 2 * slots * 8 * 6
    assert book != rule_book(options.model_copy(update={"rules_seed": 8}))
    for tool, (j, slot) in product(tools_of(options), enumerate(SLOTS[:slots])):
        right = {(r, t): book[tool, slot, r, t] for r, t in product(REQUESTS, TIERS)}
        assert set(right.values()) == set(VALUES_OF[slot][:values])
        by = (j + STEPS.index(tool)) % 2
        alike = all(len({right[key] for key in right if key[by] == word}) == 1 for word in (REQUESTS, TIERS)[by])
        assert alike == (keyed == "word")
        if keyed == "pair":
            assert max(Counter(right.values()).values()) - min(Counter(right.values()).values()) <= 1


def test_each_rung_says_less_of_the_same_step() -> None:
    said = [blame("give", WRONG, RIGHT, rung) for rung in RUNGS]  # type: ignore[arg-type]
    assert said == [
        "give needs the cash by mail in march.",
        "give channel needs mail.",
        "give channel is wrong.",
        "give is wrong.",
        "",
    ]
    assert [blame("give", RIGHT, RIGHT, rung) for rung in RUNGS] == [""] * 5  # type: ignore[arg-type]
    assert may(" ".join(said[1:3])) == "give channel may need mail. give channel may be wrong."


@pytest.mark.parametrize("rung", RUNGS)
def test_an_audit_names_each_wrong_step_once_and_pays_for_the_whole_visit_alone(rung: Any) -> None:
    options = {"audit": rung, "steps": 3}
    one, two, three = needed(Options(**options), "refund", "gold")
    last = visit(options, [other(one, 1, 2), two, other(three, 0)])
    named = [blame("give", other(one, 1, 2), one, rung), blame("bill", other(three, 0), three, rung)]
    assert words(last) == f"done. {audit(named, passed=False)}".strip()
    assert words(last).startswith("done. Audit: fail.") and (last.reward, last.terminated) == (0.0, True)
    assert last.info["broken"] == [
        f"give channel needs {one[1]}.", f"give month needs {one[2]}.", f"bill thing needs {three[0]}.",
    ]  # fmt: skip
    won = visit(options, [one, two, three])
    assert (words(won), won.reward, won.info["broken"]) == ("done. Audit: pass.", 1.0, [])


def left(rung: Any, chosen: Phrase, said: str, values: int) -> int:
    """Right phrases that are possible after the audit has said this of the step."""
    return sum(
        blame("give", chosen, phrase, rung) == said for phrase in phrases(len(chosen), values) if phrase != chosen
    )


@pytest.mark.parametrize(("slots", "values"), SIZES.values())
def test_a_reason_narrows_what_can_be_right_and_a_verdict_takes_away_one_action(slots: int, values: int) -> None:
    """The claim that the world is made for, counted: of v^s phrases `verdict` leaves v^s - 1. A slot leaves v - 1 values
    for it; with its value 1. Slots behind it stay open, so a reason says as much of one slot at every size.
    """
    chosen, right = phrases(slots, values)[0], phrases(slots, values)[-1]
    found = [left(rung, chosen, blame("give", chosen, right, rung), values) for rung in RUNGS]  # type: ignore[arg-type]
    behind = values ** (slots - 1)
    assert found == [1, behind, (values - 1) * behind, values**slots - 1, values**slots - 1]
    last = (*chosen[:-1], right[-1])
    found = [left(rung, chosen, blame("give", chosen, last, rung), values) for rung in RUNGS]  # type: ignore[arg-type]
    assert found == [1, 1, values - 1, values**slots - 1, values**slots - 1]


TURNS = [f"Thought: gold refund. Action: {tool} the cash by phone in june" for tool in ("give", "lend")]
MENDED = {
    "give needs the credit by mail in march.": "give the credit by mail in march",
    "give channel needs mail.": "give the cash by mail in june",
    "give channel is wrong.": None,
    "give is wrong.": None,
}


@pytest.mark.parametrize(("said", "lesson"), MENDED.items())
def test_the_parser_mends_what_the_audit_tells_and_leaves_out_what_it_only_blames(
    said: str, lesson: str | None
) -> None:
    found = lessons([(TURNS[0], "done."), (TURNS[1], f"done. Audit: fail. {said}")], won=False)
    assert found == [lesson and f"Thought: gold refund. Action: {lesson}", TURNS[1]]
    assert n_wrong(said) == 0


def test_the_parser_learns_a_won_visit_whole_and_nothing_of_a_bare_verdict() -> None:
    assert lessons([(one, "done. Audit: pass.") for one in TURNS], won=True) == TURNS
    assert lessons([(one, "done. Audit: fail.") for one in TURNS], won=False) == [None, None]
    both = "done. Audit: fail. give paper needs photo. lend needs the repair by truck in march."
    assert lessons([("unreadable", "not understood."), ("unreadable", both)], won=False) == ["unreadable"] * 2


@pytest.mark.parametrize("rung", ["answer", "value"])
def test_a_parser_that_is_told_values_wins_within_as_many_visits_as_slots(rung: Any) -> None:
    """Each visit tells the first wrong slot of each step; without the audit a win takes 3^10 tries."""
    options = {"audit": rung, "slots": 5}
    chosen: list[Phrase] = [("cash", "mail", "march", "shop", "receipt")] * 2
    visits = 0
    while not (last := visit(options, chosen)).reward:
        visits += 1
        assert visits < 10
        said = [(f"Action: {tool} {spoken(phrase)}", words(last)) for tool, phrase in zip(STEPS, chosen, strict=False)]
        told = lessons(said, won=False)
        chosen = [values_in(str(one).removeprefix(f"Action: {tool} ")) for one, tool in zip(told, STEPS, strict=False)]
    assert visits <= (1 if rung == "answer" else 5)


@pytest.mark.parametrize("rung", RUNGS)
def test_the_truth_is_that_of_a_search_over_all_that_can_still_be_done(rung: Any) -> None:
    """Q* by trying every way on, in the desk itself."""
    options = {"audit": rung, "slots": 2, "values": 2, "steps": 2}
    every = phrases(2, 2)
    one, two = needed(Options(**options), "refund", "gold")
    for first in every:
        best = max(visit(options, [first, second]).reward for second in every)
        found = truth(options, ANA, [f"give {spoken(first)}"])
        assert (found.q, found.optimal, found.cause) == (best, first == one, blame("give", first, one, rung))
        for second in every:
            found = truth(options, ANA, [f"give {spoken(first)}", f"lend {spoken(second)}"])
            assert (found.q, found.optimal) == (visit(options, [first, second]).reward, second == two)
            assert found.cause == blame("lend", second, two, rung)
            assert bool(found.broken) == (found.q == 0)
    with pytest.raises(Malformed):
        truth(options, ANA, ["give cash"])


def test_a_cause_is_named_as_a_fact_or_as_a_possibility() -> None:
    options = {"audit": "value"}
    one, _ = needed(Options(), "refund", "gold")
    found = truth(options, ANA, [f"give {spoken(other(one, 1))}"])
    assert found.named_in(f"Future: give, then fail. give channel needs {one[1]}.")
    assert found.named_in(f"Future: give, then fail. give channel may need {one[1]}.")
    assert not found.named_in("Future: give, then fail. give channel may be wrong.")
    assert not truth(options, ANA, [f"give {spoken(one)}"]).named_in("Future: give, then pass.")
    assert not truth({"audit": "verdict"}, ANA, [f"give {spoken(other(one, 1))}"]).named_in("Future: give, then fail.")


def test_describe_tells_the_share_of_right_slots_and_steps() -> None:
    one, two = needed(Options(), "refund", "gold")
    acts = [f"give {spoken(other(one, 2))}", f"lend {spoken(two)}"]
    none = Completion("", (), (), "stop")
    turns = tuple(Turn(i, 2, (), none, "", a, "done.", 0.0, False, False, False, 0.0) for i, a in enumerate(acts))
    episode = Episode("e", ANA, None, Outcome.SCORED, (), turns, 0.0)
    assert envs.describe("wide_desk", {}, [episode]) == {"slots_right": 5 / 6, "steps_right": 1 / 2}
    assert envs.describe("wide_desk", {}, []) == {}


def test_people_of_one_split_are_in_no_other_and_every_kind_of_customer_comes_as_often() -> None:
    names = {s: {one.data["name"] for one in envs.scenarios("wide_desk", {}, s, None, 0)} for s in desk.CUSTOMERS}
    assert sum(map(len, names.values())) == len(set().union(*names.values())) == 30
    kinds = Counter((one.data["request"], one.data["tier"]) for one in envs.scenarios("wide_desk", {}, "train", 120, 0))
    assert set(kinds.values()) == {10} and len(kinds) == 12
    with pytest.raises(UsageError, match=r"there is no split 'tests' of wide_desk. Splits: train, validation, test\."):
        envs.scenarios("wide_desk", {}, "tests", 5, 0)


@pytest.mark.parametrize("keyed", ["word", "pair"])
@pytest.mark.parametrize("seed", range(8))
def test_held_out_pairs_of_values_are_needed_by_no_training_customer_and_by_every_one_that_is_held_out(
    seed: int, keyed: str
) -> None:
    options = {"rules_seed": seed, "keyed": keyed, "held_out_pairs": 2}
    opts = Options(**options)

    def pairs(split: str, **more: Any) -> set[Phrase]:
        found = envs.scenarios("wide_desk", options | more, split, None, 0)
        return {needed(opts, one.data["request"], one.data["tier"])[0][:2] for one in found}

    seen, apart = pairs("train"), pairs("test", only_held_out=True)
    assert len(apart) == 2 and not seen & apart
    assert pairs("validation") == seen
    if keyed == "word":  # each value of such a pair is needed with others, and each word of a customer is met
        assert {pair[0] for pair in apart} <= {pair[0] for pair in seen}
        assert {pair[1] for pair in apart} <= {pair[1] for pair in seen}
        met = envs.scenarios("wide_desk", options, "train", None, 0)
        assert {one.data["request"] for one in met} == set(REQUESTS[:4])
        assert {one.data["tier"] for one in met} == set(TIERS[:3])


def test_a_parser_of_single_slots_wins_with_pairs_that_it_never_saw_only_where_a_slot_hangs_on_one_word() -> None:
    """What composes carries over: a table of (step, slot, word) filled from training customers."""
    for keyed, share in (("word", 1.0), ("pair", 0.0)):
        options = {"keyed": keyed, "held_out_pairs": 2}
        opts = Options(**options)
        table: dict[tuple[Any, ...], str] = {}

        def keys(scenario: Scenario, options: Options = opts) -> list[list[tuple[Any, ...]]]:
            words = (scenario.data["request"], scenario.data["tier"])
            by = [[(j + k) % 2 for j in range(options.slots)] for k in range(options.steps)]
            return [
                [(k, j, words[w] if options.keyed == "word" else words) for j, w in enumerate(row)]
                for k, row in enumerate(by)
            ]

        for one in envs.scenarios("wide_desk", options, "train", 60, 0):
            right = needed(opts, one.data["request"], one.data["tier"])
            table |= {
                key: v for row, phrase in zip(keys(one), right, strict=True) for key, v in zip(row, phrase, strict=True)
            }
        test = envs.scenarios("wide_desk", options | {"only_held_out": True}, "test", 24, 0)
        won = [
            [tuple(table.get(key, "?") for key in row) for row in keys(one)]
            == needed(opts, one.data["request"], one.data["tier"])
            for one in test
        ]
        assert sum(won) / len(won) == share


def test_a_small_desk_whose_pairs_leave_nobody_is_refused_and_never_looked_through_for_ever() -> None:
    told: Counter[str] = Counter()
    for seed in range(60):
        options = {"rules_seed": seed, "keyed": "pair", "requests": 2, "tiers": 2, "values": 2, "held_out_pairs": 2}
        try:
            assert len(envs.scenarios("wide_desk", options, "train", 3, 0)) == 3
            told["played"] += 1
        except UsageError as error:
            told[str(error)] += 1
    assert len(told) == 2 and told["played"] > 0
    assert "pairs that leave a customer for training" in max(told)


@pytest.mark.parametrize("options", [
    {"only_held_out": True}, {"held_out_pairs": 4}, {"held_out_pairs": 1, "slots": 1}, {"held_out_pairs": 1, "tiers": 1},
])  # fmt: skip
def test_pairs_that_cannot_be_held_out_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="held_out"):
        envs.scenarios("wide_desk", options, "train", 1, 0)
