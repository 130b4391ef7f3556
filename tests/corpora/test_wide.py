"""The corpus of the wide desk teaches its language at every size, and no rule book's values."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from itertools import product
from typing import Any

import pytest
from probes import even, last

from stages.corpora import Example, scene
from stages.corpora import wide as corpus
from stages.corpora.tokenizers import encode_reply, encode_turns, word_tokenizer
from stages.corpora.wide import Foreseen, example, judge, right, words
from stages.envs import wide_desk as desk
from stages.envs.desk_rules import REQUESTS, TIERS
from stages.envs.wide_rules import Options, rule_book
from stages.envs.wide_words import (
    SLOTS,
    STEPS,
    VALUES_OF,
    blame,
    may,
    opening,
    phrase_of,
    spoken,
    system_text,
    values_in,
)
from stages.frame.react import parse_react
from stages.frame.types import Malformed
from stages.llm.roles import ROLES, Roles, load_roles, parse_evaluation, parse_future

N = 60_000
"""Of the shipped model's stream the first examples; tests/corpora/test_desk.py counts them all."""
Z = 5.0  # standard errors: by chance beyond it once in 1.7 million looks
STEP, SLOT = "|".join(STEPS), "|".join(SLOTS)
TOLD = re.compile(rf"\b({STEP}) ({SLOT}) (?:may need|needs) ([a-z]+)\.")
ANSWER = re.compile(rf"\b({STEP}) (?:may need|needs) ([a-z ]+)\.")
CUSTOMER = re.compile(r"\w+, (\w+), wants (\w+) for")
SYSTEM = re.compile(r"Wide desk\. ([a-z ]+)\. ([a-z ]+)\. (\d) values\.")

Mention = tuple[str, str, str, str, str, int]  # step, slot, value, request, tier, values of a slot


@pytest.fixture(scope="module")
def roles() -> Roles:
    return load_roles("wide_desk")


@pytest.fixture(scope="module")
def examples(roles: Roles) -> list[Example]:
    rng = random.Random("corpus 0")
    return [example(rng, roles) for _ in range(N)]


def text(e: Example) -> str:
    return "\n".join([*(str(m["content"]) for m in e.messages), e.reply])


def size(e: Example) -> tuple[list[str], int, int]:
    """Steps, slots and values of the desk that an example is of."""
    found = SYSTEM.match(str(e.messages[0]["content"]))
    assert found
    return found[1].split(), len(found[2].split()), int(found[3])


def said_of(e: Example) -> set[tuple[str, str, str]]:
    """(step, slot, value) of everything that an example says to be needed, by an answer or by a slot."""
    found = set(TOLD.findall(text(e)))
    for tool, phrase in ANSWER.findall(text(e)):
        found |= {(tool, slot, value) for slot, value in zip(SLOTS, values_in(phrase), strict=False)}
    return found


def mentions_of(examples: list[Example]) -> list[Mention]:
    found = []
    for e in examples:
        tier, request = CUSTOMER.findall(str(e.messages[1]["content"]))[0]
        found += [(*one, request, tier, size(e)[2]) for one in said_of(e)]
    return found


@pytest.fixture(scope="module")
def mentions(examples: list[Example]) -> list[Mention]:
    return mentions_of(examples)


def z_of(found: list[Mention], options: Options) -> float:
    """Standard errors by which the desk's right values are named more often than chance has it."""
    book = rule_book(options)
    hits = expected = variance = 0.0
    for tool, slot, value, request, tier, values in found:
        if values == options.values and (needed := book.get((tool, slot, request, tier))) is not None:
            hits, expected = hits + (needed == value), expected + 1 / values
            variance += (1 - 1 / values) / values
    assert expected > 300
    return (hits - expected) / math.sqrt(variance)


DESKS = [{"values": 3}, {"values": 5}, {"values": 3, "keyed": "pair"}]


@pytest.mark.parametrize("options", DESKS, ids=str)
def test_no_rule_book_is_more_frequent_in_the_corpus_than_chance(
    mentions: list[Mention], options: dict[str, Any]
) -> None:
    for seed in (7, *range(100, 120)):
        one = Options(rules_seed=seed, slots=5, steps=3, requests=8, tiers=6, **options)
        assert abs(z_of(mentions, one)) < Z


def test_no_rule_book_is_more_frequent_in_scenes_than_chance(roles: Roles) -> None:
    """What a real model is warmed with: 4,000 scenes of four roles."""
    rng = random.Random("corpus 0")
    scenes = [scene(corpus, rng, roles, 4) for _ in range(4000)]
    found = [mention for each in scenes for mention in set(mentions_of(each))]
    for seed in (7, *range(100, 110)):
        assert abs(z_of(found, Options(rules_seed=seed, slots=5, steps=3, requests=8, tiers=6))) < Z


def test_the_count_would_find_a_rule_book_behind_a_few_sentences_in_a_hundred(mentions: list[Mention]) -> None:
    options, rng = Options(slots=5, steps=3, requests=8, tiers=6), random.Random(0)
    book = rule_book(options)
    planted = [
        (tool, slot, book[tool, slot, r, t] if values == 3 and rng.random() < 0.04 else value, r, t, values)
        for tool, slot, value, r, t, values in mentions
    ]
    assert z_of(planted, options) > Z


def test_every_value_is_as_frequent_as_any_other_with_every_word_of_a_customer(mentions: list[Mention]) -> None:
    counts: dict[tuple[str, str, str, int], Counter[str]] = {}
    for tool, slot, value, request, tier, values in mentions:
        for word in (request, tier) if values != 2 else ():
            counts.setdefault((tool, slot, word, values), Counter())[value] += 1
    assert {key[:3] for key in counts} == set(product(STEPS, SLOTS, (*REQUESTS, *TIERS)))
    for key, found in counts.items():
        if found.total() > 50:
            assert even(found, key[3]), (key, found)


def test_what_a_policy_or_a_rewrite_does_is_as_often_any_phrase_of_the_desk(examples: list[Example]) -> None:
    """Of the policy each value as often; of the refiner, told nothing, too, but for the phrase that was tried."""
    for values in (3, 5):
        found: dict[str, Counter[str]] = {}
        for e in examples:
            if e.role == "policy" and size(e)[2] == values:
                phrase = values_in(parse_react(e.reply)[1].partition(" ")[2])
                for slot, value in zip(SLOTS, phrase, strict=False):
                    found.setdefault(slot, Counter())[value] += 1
        assert set(found) == set(SLOTS)
        for counted in found.values():
            assert even(counted, values)


@pytest.mark.parametrize("seed", [7, 100, 101])
def test_right_actions_do_not_end_well_more_often_than_wrong_ones(examples: list[Example], seed: int) -> None:
    """The share of "pass" after an action whose first slot is right, and after one where it is wrong."""
    book = rule_book(Options(requests=8, tiers=6, rules_seed=seed, slots=5, steps=3))
    ends: dict[bool, list[bool]] = {True: [], False: []}
    for e in examples:
        if e.role == "successor" and size(e)[2] == 3:
            tier, request = CUSTOMER.findall(str(e.messages[1]["content"]))[0]
            tool, _, value = last(e).rsplit("Action: ", 1)[1].split()[:3]
            ends[book[tool, "thing", request, tier] == value].append("then pass" in e.reply)
    share = {is_right: sum(found) / len(found) for is_right, found in ends.items()}
    p = sum(map(sum, ends.values())) / sum(map(len, ends.values()))
    error = math.sqrt(p * (1 - p) * sum(1 / len(found) for found in ends.values()))
    assert min(map(len, ends.values())) > 300 and abs(share[True] - share[False]) < Z * error


def test_every_size_of_the_desk_is_spoken_of_and_no_word_is_out_of_its_size(examples: list[Example]) -> None:
    seen = Counter(size(e)[1:] for e in examples)
    assert set(seen) == set(product(range(1, 6), range(2, 6)))
    assert all(seen[of] > 1500 for of in ((1, 3), (2, 3), (3, 3), (4, 3), (5, 3), (4, 5)))
    for e in examples[:5000]:
        tools, slots, values = size(e)
        behind = [*SLOTS[slots:], *(v for slot in SLOTS[slots:] for v in VALUES_OF[slot]), *STEPS[len(tools) :]]
        behind += [v for slot in SLOTS[:slots] for v in VALUES_OF[slot][values:]]
        assert not set(behind) & set(text(e).replace(".", " ").replace(",", " ").split()), text(e)


def test_every_word_of_every_desk_and_role_is_in_the_vocabulary_and_survives_it(roles: Roles) -> None:
    tokenizer, rng = word_tokenizer(words(roles)), random.Random("other examples")
    drawn = [example(rng, roles) for _ in range(3000)]
    texts = [text(e) for e in drawn]
    texts += [opening(name, tier, request, item) for people in desk.CUSTOMERS.values() for name in people
              for tier, request, item in zip(TIERS * 2, REQUESTS, desk.ITEMS[:8], strict=False)]  # fmt: skip
    texts += [" ".join(desk.ITEMS), roles.templates["value"], "not understood. use bill now.", "none unreadable"]
    texts += [
        system_text(STEPS[:n], slots, values) for n, slots, values in product((1, 2, 3), range(1, 6), range(2, 6))
    ]
    for one in texts:
        assert tokenizer.unk_token_id not in tokenizer(one).input_ids, one
    for e in drawn:
        assert tokenizer.decode(tokenizer(e.reply).input_ids) == e.reply
        assert tokenizer.decode(tokenizer(last(e)).input_ids) == " ".join(last(e).split())
        assert len(tokenizer(text(e)).input_ids) < 400


def test_every_reply_is_one_that_its_reader_can_read_and_is_marked_right(examples: list[Example]) -> None:
    for e in examples[:5000]:
        _, slots, values = size(e)
        if e.role in ("policy", "refiner"):
            thought, action = parse_react(e.reply)
            assert thought
            phrase_of(action, action.split()[0], slots, values)
        elif e.role in ("successor", "combine"):
            parse_future(e.reply)
        elif e.role == "evaluator":
            parse_evaluation(e.reply)
        row = {"role": e.role, "messages": list(e.messages), "reply": e.reply}
        assert right(row, e.reply) == {e.role: True, f"slots_{slots}": True, f"values_{values}": True}
        assert not right(row, e.reply + " cash")[e.role] and not right(row, "hello")[e.role]
    assert {e.role for e in examples[:5000]} == set(ROLES) - {"value", "thinker"} | {"told"} == set(corpus.SHARE)
    assert sum(corpus.SHARE.values()) == pytest.approx(1)


CHOSEN, NEEDED = ("cash", "phone", "june"), ("cash", "mail", "march")


def test_the_refiner_does_what_it_is_told_and_nothing_else(examples: list[Example]) -> None:
    told: Counter[str] = Counter()
    for e in examples:
        if e.role != "refiner":
            continue
        _, slots, values = size(e)
        before = re.findall(r"Action: (.+)", last(e))[0]
        tool, critique = before.split()[0], last(e).rsplit("Optimality: No.", 1)[1].strip()
        old, new = (phrase_of(act, tool, slots, values) for act in (before, parse_react(e.reply)[1]))
        changed = [SLOTS[j] for j in range(slots) if old[j] != new[j]]
        assert changed
        if answer := ANSWER.findall(critique):
            assert (tool, spoken(new)) == answer[0]
            told["answer"] += 1
        elif value := TOLD.findall(critique):
            assert (tool, changed, new[SLOTS.index(changed[0])]) == (value[0][0], [value[0][1]], value[0][2])
            told["value"] += 1
        elif slot := re.findall(rf"{tool} ({SLOT}) may be wrong", critique):
            assert changed == slot
            told["slot"] += 1
        else:
            assert critique in ("", f"{tool} may be wrong.")
            told["nothing"] += 1
    assert min(told.values()) > 1000 and len(told) == 4


def test_a_rewrite_is_marked_by_what_it_was_told(roles: Roles) -> None:
    v = corpus.Visit(("Ana", "gold", "refund", "lamp"), STEPS[:1], 3, 3, (CHOSEN,), (NEEDED,), "value")

    def marked(rung: Any, new: tuple[str, ...]) -> bool:
        reason = may(blame("give", CHOSEN, NEEDED, rung))
        prompt = roles.prompt(
            "refiner",
            corpus.state(v, 0),
            action=v.action(0),
            thought="",
            evaluation=f"Optimality: No. {reason}".strip(),
        )
        model = {"answer": NEEDED, "value": ("cash", "mail", "june")}.get(rung, ("credit", "mail", "june"))
        row = {"role": "refiner", "messages": prompt, "reply": corpus.act(v, 0, model, corpus.TOLD)}
        return right(row, corpus.act(v, 0, new, corpus.TOLD))["refiner"]

    one_slot, another, all_new = ("cash", "mail", "june"), ("cash", "courier", "june"), ("credit", "courier", "april")
    found = {rung: [marked(rung, new) for new in (CHOSEN, one_slot, another, all_new, NEEDED)] for rung in corpus.RUNGS}
    assert found == {
        "answer": [False, False, False, False, True],
        "value": [False, True, False, False, False],
        "slot": [False, True, True, False, False],
        "step": [False, True, True, True, True],
        "verdict": [False, True, True, True, True],
    }


def test_combine_puts_the_step_before_the_later_future_and_the_audit_behind_it(examples: list[Example]) -> None:
    kinds: Counter[str] = Counter()
    for e in examples[:20_000]:
        if e.role != "combine":
            continue
        lines = dict(line.split(": ", 1) for line in last(e).splitlines()[1:])
        tool = lines["Action"].split()[0]
        if lines["Later"] != "none":
            assert (lines["Then"], lines["Reward"]) == ("done.", "none")
            assert e.reply == lines["Later"].replace("Future: ", f"Future: {tool}, ")
            kinds["later"] += 1
        elif "not understood" in lines["Then"]:
            assert (e.reply, lines["Reward"]) == ("Future: not understood, then fail.", "0")
            kinds["unreadable"] += 1
        else:
            said = lines["Then"].removeprefix("done. Audit: ")
            assert e.reply == f"Future: {tool}, then {said}" and lines["Reward"] == str(int(said == "pass."))
            kinds["end"] += 1
    assert min(kinds.values()) > 50 and len(kinds) == 3


def test_the_corrector_turns_facts_into_possibilities(examples: list[Example]) -> None:
    for e in examples[:20_000]:
        if e.role == "corrector":
            assert e.reply == may(last(e).removeprefix("Rewrite.\n")).replace("as told, ", "")
            assert not {"needs", "is", "told"} & set(e.reply.split())


PASS, FAIL = Foreseen(True), Foreseen(False)


def blaming(*said: str) -> Foreseen:
    return Foreseen(False, tuple(f"{one}." for one in said))


@pytest.mark.parametrize(
    ("futures", "verdict"),
    [
        ([PASS], "Optimality: Yes."),
        ([FAIL], "Optimality: No."),  # nothing tells why
        ([blaming("lend is")], "Optimality: Yes."),  # another step is to blame
        ([blaming("give may be wrong")], "Optimality: No. give may be wrong."),
        ([blaming("lend may be wrong", "give month may be wrong")], "Optimality: No. give month may be wrong."),
        ([PASS, blaming("give may be wrong")], "Optimality: No. give may be wrong."),  # half of them is enough
        ([blaming("give may be wrong"), PASS, PASS], "Optimality: Yes."),
        ([FAIL, blaming("give may be wrong"), FAIL], "Optimality: No. give may be wrong."),  # the others tell nothing
        ([PASS, FAIL, FAIL], "Optimality: Yes."),  # it can be won from here
        (
            [blaming("give month may need june"), blaming("give may be wrong")],
            "Optimality: No. give month may need june.",
        ),
    ],
)
def test_the_verdict_by_hand(futures: list[Foreseen], verdict: str) -> None:
    assert judge("give", futures) == verdict


def test_what_is_learned_of_an_example_is_its_turns_and_its_reply(roles: Roles) -> None:
    tokenizer, rng = word_tokenizer(words(roles)), random.Random("learned")
    for _ in range(200):
        e = example(rng, roles)
        for encode, turns in ((encode_turns, e.messages[2:-1]), (encode_reply, ())):
            ids, learned = encode(tokenizer, e)
            found = tokenizer.decode([t for t, one in zip(ids, learned, strict=True) if one], skip_special_tokens=True)
            assert found == " ".join([*(str(m["content"]) for m in turns), e.reply])


def test_the_same_seed_gives_the_same_corpus(roles: Roles, examples: list[Example]) -> None:
    rng = random.Random("corpus 0")
    assert [example(rng, roles) for _ in range(100)] == examples[:100]


def test_a_phrase_of_another_size_is_refused() -> None:
    with pytest.raises(Malformed):
        phrase_of(f"give {spoken(CHOSEN)}", "give", 2, 3)
