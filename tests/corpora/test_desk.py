"""The corpus teaches the language of the roles and none of any desk's rules; its vocabulary covers every desk.

Rules are counted as sentences "<key> needs|may need <tool> <option>.", each different one once an example, since an
example repeats its own. Under random rule books an option of a tool with n options is named in 1/n of the sentences
about any key.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chi2

from stages.corpora import Example, scene
from stages.corpora import desk as corpus
from stages.corpora.desk import Foreseen, example, judge, words
from stages.corpora.tokenizers import encode_reply, encode_turns, word_tokenizer
from stages.envs import service_desk as desk
from stages.envs.desk_words import LACKS
from stages.frame.react import parse_react
from stages.llm.roles import ROLES, Roles, load_roles, parse_evaluation, parse_future

BASE = Path(__file__).parent.parent.parent / "data" / "base"
SAID = r"(?:^|[.:\n] ?|as told, )([a-z]+(?: [a-z]+)?) (?:%s) (" + "|".join(desk.OPTIONS_OF) + r") ([a-z]+)\."
RULE, FAULT = re.compile(SAID % "may need|needs"), re.compile(SAID % "may bar|bars")
KEY = re.compile(r"\. ([a-z]+(?: [a-z]+)?) needs")
CUSTOMER = re.compile(r"\w+, (\w+), wants (\w+) for")
Z = 5.0  # standard errors: by chance beyond it once in 1.7 million looks; a few hundred are taken here

Mention = tuple[str, str, str]  # key, tool, option


@pytest.fixture(scope="module")
def roles() -> Roles:
    return load_roles("service_desk")


@pytest.fixture(scope="module")
def examples(roles: Roles) -> list[Example]:
    """The stream that the shipped base was trained on, 3200 steps of 96."""
    rng = random.Random("corpus 0")
    return [example(rng, roles) for _ in range(3200 * 96)]


def text(e: Example) -> str:
    return "\n".join([*(m["content"] for m in e.messages), e.reply])


@pytest.fixture(scope="module")
def mentions(examples: list[Example]) -> list[Mention]:
    return [mention for e in examples for mention in set(RULE.findall(text(e)))]


def z_of(found: list[Mention], options: desk.Options) -> float:
    """Standard errors by which the desk's true rules are named more often than chance has it."""
    book = desk.rule_book(options)
    hits = expected = variance = 0.0
    for key, tool, option in found:
        if (rule := book.get((tool, key))) is not None:
            p = 1 / len(desk.OPTIONS_OF[tool])
            hits, expected, variance = hits + (rule.option == option), expected + p, variance + p * (1 - p)
    assert expected > 300
    return (hits - expected) / math.sqrt(variance)


@pytest.fixture(scope="module")
def facts(examples: list[Example]) -> list[Mention]:
    """What the roles say that tell how a visit went; policy, evaluator, refiner and thoughts speak of guesses."""
    told = [e for e in examples if e.role in ("successor", "combine", "corrector")]
    return [mention for e in told for mention in set(RULE.findall(f"{e.messages[-1]['content']}\n{e.reply}"))]


DESKS: list[dict[str, Any]] = [{}, {"give_by": "request"}, {"requests": 8, "tiers": 6, "steps": 8}]


@pytest.mark.slow
@pytest.mark.parametrize("options", DESKS, ids=["default", "easy", "hard"])
def test_no_rule_book_is_more_frequent_in_the_corpus_than_chance(
    mentions: list[Mention], facts: list[Mention], options: dict[str, Any]
) -> None:
    """The default seed and 30 others: none beyond 5 standard errors, in all that is said and in what is told."""
    for seed in (7, *range(100, 130)):
        assert abs(z_of(mentions, desk.Options(rules_seed=seed, **options))) < Z
        assert abs(z_of(facts, desk.Options(rules_seed=seed, **options))) < Z


def test_no_rule_book_is_more_frequent_in_scenes_than_chance(roles: Roles) -> None:
    """What a real model is warmed with: 6,000 scenes of four roles, the default seed and 10 others."""
    rng = random.Random("corpus 0")
    scenes = [scene(corpus, rng, roles, 4) for _ in range(6000)]
    found = [mention for each in scenes for mention in {one for e in each for one in RULE.findall(text(e))}]
    for seed in (7, *range(100, 110)):
        assert abs(z_of(found, desk.Options(rules_seed=seed))) < Z


@pytest.mark.parametrize(("told_of", "share"), [("mentions", 0.03), ("facts", 0.05)])
def test_the_count_would_find_a_rule_book_behind_a_few_sentences_in_a_hundred(
    request: pytest.FixtureRequest, told_of: str, share: float
) -> None:
    """The power of the test above: so few sentences planted from the default rule book lie beyond the bound."""
    options, rng = desk.Options(), random.Random(0)
    book = desk.rule_book(options)
    found: list[Mention] = request.getfixturevalue(told_of)
    planted = [
        (k, tool, book[tool, k].option) if (tool, k) in book and rng.random() < share else (k, tool, option)
        for k, tool, option in found
    ]
    assert z_of(planted, options) > Z


@pytest.fixture(scope="module")
def faults(examples: list[Example]) -> list[Mention]:
    return [mention for e in examples for mention in set(FAULT.findall(text(e)))]


@pytest.mark.parametrize("said_of", ["mentions", "faults"])
def test_every_option_is_as_frequent_as_any_other_with_every_key(request: pytest.FixtureRequest, said_of: str) -> None:
    """Chi-square over the options of each (tool, key): below its 1 - 1e-6 quantile for each, and for all together."""
    counts = Counter(request.getfixturevalue(said_of))
    total, freedom = 0.0, 0
    for tool, key in sorted({(tool, key) for key, tool, _ in counts}):
        found = [counts[key, tool, option] for option in desk.OPTIONS_OF[tool]]
        expected = sum(found) / len(found)
        statistic = sum((n - expected) ** 2 / expected for n in found)
        assert statistic < chi2.ppf(1 - 1e-6, len(found) - 1), (tool, key, found)
        total, freedom = total + statistic, freedom + len(found) - 1
    assert freedom > 100
    assert total < chi2.ppf(1 - 1e-6, freedom)


def test_all_keys_of_all_desks_are_spoken_of(mentions: list[Mention]) -> None:
    known = {(tool, key) for key, tool, _ in mentions}
    for options in DESKS:
        assert set(desk.rule_book(desk.Options(**options))) <= known


@pytest.mark.parametrize("seed", [7, 100, 101, 102])
def test_right_actions_do_not_end_well_more_often_than_wrong_ones(examples: list[Example], seed: int) -> None:
    """The share of "pass" after a right and after a wrong action differs by less than 5 standard errors."""
    book = desk.rule_book(desk.Options(requests=8, tiers=6, rules_seed=seed))
    ends: dict[bool, list[bool]] = {True: [], False: []}
    for e in examples:
        if e.role == "successor":
            opening, asked = str(e.messages[1]["content"]), str(e.messages[-1]["content"])
            (tier, request), (tool, option) = CUSTOMER.findall(opening)[0], asked.rsplit("Action: ", 1)[1].split()
            kind: dict[str, desk.Kind] = {"check": "request", "give": "pair", "close": "tier"}
            if tool in kind:
                right = book[tool, desk.key_of(kind[tool], request, tier)].option == option
                ends[right].append("then pass" in e.reply)
    share = {right: sum(found) / len(found) for right, found in ends.items()}
    p = sum(map(sum, ends.values())) / sum(map(len, ends.values()))
    error = math.sqrt(p * (1 - p) * sum(1 / len(found) for found in ends.values()))
    assert min(map(len, ends.values())) > 1000
    assert abs(share[True] - share[False]) < Z * error


def test_every_word_of_every_desk_and_role_is_in_the_vocabulary(roles: Roles) -> None:
    """Other examples than those the vocabulary was read off, and all that the largest desk can say."""
    tokenizer = word_tokenizer(words(roles))
    rng = random.Random("other examples")
    texts = [text(example(rng, roles)) for _ in range(4000)]
    options = desk.Options(requests=8, tiers=6, steps=8)
    rules = [
        *desk.rule_book(options).values(),
        *desk.rule_book(desk.Options(requests=8, tiers=6, give_by="request")).values(),
    ]
    texts += [f"{rule} {corpus.may(rule)} {corpus.act(rule)}" for rule in rules]
    texts += [
        desk.audit(auditor, [(one, one.option) for one in rules[:2]]) + desk.audit(auditor, [])
        for auditor in desk.AUDITORS
    ]
    people = [name for names in desk.CUSTOMERS.values() for name in names]
    texts += [
        desk.opening(name, *rest) for name in people for rest in product(desk.TIERS, desk.REQUESTS, desk.ITEMS[:1])
    ]
    texts += [
        f"{desk.opening('Ana', 'gold', 'refund', item)} {desk.system_text(list(desk.OPTIONS_OF))}"
        for item in desk.ITEMS
    ]
    texts += [
        f"{desk.done(option)} not understood. use {tool} now."
        for tool, choices in desk.OPTIONS_OF.items()
        for option in choices
    ]
    unknown = tokenizer.unk_token_id
    for each in texts:
        assert unknown not in tokenizer(each).input_ids, each


def test_text_with_single_spaces_survives_the_tokenizer(roles: Roles) -> None:
    tokenizer = word_tokenizer(words(roles))
    rng = random.Random("round trip")
    for _ in range(2000):
        e = example(rng, roles)
        assert tokenizer.decode(tokenizer(e.reply).input_ids) == e.reply
        prompt = e.messages[-1]["content"]
        assert tokenizer.decode(tokenizer(prompt).input_ids) == " ".join(prompt.split())


def test_no_example_is_longer_than_the_model(roles: Roles, examples: list[Example]) -> None:
    tokenizer = word_tokenizer(words(roles))
    longest = max(examples, key=lambda e: len(text(e)))
    ids = tokenizer.apply_chat_template(
        [*longest.messages, {"role": "assistant", "content": longest.reply}], tokenize=True, return_dict=False
    )
    assert len(ids) < 512


def rule(tool: str, option: str) -> desk.Rule:
    return desk.Rule("gold refund" if tool == "give" else "refund", tool, option)


PASS, FAIL = Foreseen(True), Foreseen(False)


def blaming(*blames: str) -> Foreseen:
    """ "cash" blames this step, "close email" another one."""
    return Foreseen(False, tuple(rule(*(one.split() if " " in one else ("give", one))) for one in blames))


@pytest.mark.parametrize(
    ("futures", "verdict"),
    [
        ([PASS], "Optimality: Yes."),
        ([FAIL], "Optimality: No."),  # nothing tells why
        ([blaming("close email")], "Optimality: Yes."),  # another step is to blame
        ([blaming("cash")], "Optimality: No. gold refund may need give cash."),
        ([blaming("check photo", "cash")], "Optimality: No. gold refund may need give cash."),
        ([blaming("cash"), PASS], "Optimality: No. gold refund may need give cash."),  # half of them is enough
        ([blaming("cash"), PASS, PASS], "Optimality: Yes."),
        ([blaming("cash"), FAIL, FAIL, FAIL], "Optimality: No. gold refund may need give cash."),  # the others tell nothing
        ([PASS, FAIL, FAIL, FAIL], "Optimality: Yes."),  # it can be won from here
        ([blaming("close email"), FAIL], "Optimality: Yes."),
        ([blaming("cash"), blaming("credit"), blaming("credit")], "Optimality: No. gold refund may need give credit."),  # the most frequent
        ([blaming("cash"), blaming("credit"), PASS], "Optimality: No. gold refund may need give cash."),  # of equals the first
    ],
)  # fmt: skip
def test_the_verdict_by_hand(futures: list[Foreseen], verdict: str) -> None:
    assert judge("give", futures) == verdict


def test_a_failure_that_the_conversation_explains_is_not_laid_on_this_step() -> None:
    assert judge("give", [FAIL, FAIL], explained=True) == "Optimality: Yes."
    assert judge("give", [blaming("cash")], explained=True).startswith("Optimality: No.")


def test_every_reply_is_one_that_its_reader_can_read(examples: list[Example]) -> None:
    for e in examples[:3000]:
        if e.role in ("policy", "refiner"):
            thought, action = parse_react(e.reply)
            assert thought
            tool, option = action.split()
            assert option in desk.OPTIONS_OF[tool]
        elif e.role in ("successor", "combine"):
            parse_future(e.reply)
        elif e.role == "evaluator":
            parse_evaluation(e.reply)
    # no reply to the one, and the desk's model does not think
    assert {e.role for e in examples[:3000]} == set(ROLES) - {"value", "thinker"} == set(corpus.SHARE)
    assert sum(corpus.SHARE.values()) == pytest.approx(1)


def of_role(examples: list[Example], role: str) -> list[tuple[str, str]]:
    return [(e.messages[-1]["content"], e.reply) for e in examples[:20_000] if e.role == role]


def test_combine_puts_the_action_before_the_later_future_and_what_was_seen_behind_it(examples: list[Example]) -> None:
    ends: Counter[str] = Counter()
    for prompt, reply in of_role(examples, "combine"):
        lines = dict(line.split(": ", 1) for line in prompt.splitlines()[1:])
        tool, option = lines["Action"].split()
        needed = [one for one in desk.OPTIONS_OF[tool] if f"lacks {LACKS[one]}." in lines["Then"]]
        if lines["Later"] != "none":
            assert lines["Reward"] == "none"
            merged = lines["Later"].replace("Future: ", f"Future: {option}, ")
            if needed:
                merged = re.sub(r"then \w+\.", "then fail.", merged)
                reply = re.sub(rf" [\w ]+ needs {tool} {needed[0]}\.", "", reply)
            assert reply == merged
            ends["seen" if needed else "bootstrapped"] += 1
        elif "not understood" in lines["Then"]:
            assert (reply, lines["Reward"]) == ("Future: not understood, then fail.", "0")
            ends["failed"] += 1
        else:
            assert lines["Then"].startswith(f"{option} done. ")
            verdict = "pass" if lines["Reward"] == "1" else "fail"
            if "audits" in lines["Then"]:
                done, audit = lines["Then"].split(" audits: ")
                seen = f" {KEY.search(reply)[1]} needs {tool} {needed[0]}." if needed else ""  # type: ignore[index]
                assert (
                    reply
                    == f"Future: {option}, then {done.split()[-1]} says {verdict}.{seen}{audit.removeprefix(f'{verdict}.')}"
                )
                ends["audited"] += 1
            else:
                assert lines["Then"].endswith(" bye.") and reply.startswith(f"Future: {option}, then {verdict}.")
                assert bool(needed) == (" needs " in reply)
                ends["silent"] += 1
    assert min(ends.values()) > 30 and len(ends) == 5


def test_the_corrector_turns_facts_into_possibilities_and_takes_out_what_nobody_could_know(
    examples: list[Example],
) -> None:
    for prompt, reply in of_role(examples, "corrector"):
        given = prompt.removeprefix("Rewrite.\n")
        plain = re.sub(r"then \w+ says", "then", given).replace("as told, ", "")
        plain = plain.replace(" needs ", " may need ").replace(" bars ", " may bar ")
        plain = re.sub(r"(\d) wrong", r"\1 may be wrong", plain)
        assert reply == plain
        assert not any(word in reply.split() for word in (*desk.AUDITORS, "needs", "bars", "told", "says"))


def test_the_refiner_does_what_the_critique_says_and_never_the_same_again(examples: list[Example]) -> None:
    told = Counter[str]()
    for prompt, reply in of_role(examples, "refiner"):
        before = re.findall(r"Action: (\w+ \w+)", prompt)[-1]
        critique = prompt.rsplit("Optimality: No.", 1)[1].strip()
        _, action = parse_react(reply)
        assert action != before
        assert action.split()[0] == before.split()[0]
        if wanted := RULE.findall(critique):
            assert action == f"{wanted[0][1]} {wanted[0][2]}"
        told["bars" if " bar " in critique else "needs" if critique else "nothing"] += 1
        assert " bar " not in critique or before in critique
    assert min(told[kind] for kind in ("bars", "needs", "nothing")) > 200


def test_a_role_s_prompt_is_the_policy_s_conversation_thoughts_and_all_and_one_message_more(
    roles: Roles, examples: list[Example]
) -> None:
    said = 0
    for e in examples[:3000]:
        system, opening, *turns = e.messages if e.role == "policy" else e.messages[:-1]
        assert [m["role"] for m in (system, opening)] == ["system", "user"]
        for reply, seen in zip(turns[::2], turns[1::2], strict=True):
            thought, action = parse_react(str(reply["content"]))
            assert RULE.findall(f"{thought}") and str(seen["content"]).startswith(desk.done(action.split()[1]))
            said += 1
        heads = {
            "successor": "Predict.",
            "combine": "Merge.",
            "evaluator": "Judge.",
            "refiner": "Improve.",
            "corrector": "Rewrite.",
        }
        assert e.role == "policy" or str(e.messages[-1]["content"]).startswith(heads[e.role])
    assert said > 3000


def test_what_is_learned_of_an_example_is_its_turns_and_its_reply_and_no_word_drawn_at_random(roles: Roles) -> None:
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


@pytest.mark.skipif(
    not (BASE / "tokenizer.json").is_file(), reason="the base model has not been made: turnwise pretrain"
)
def test_the_shipped_base_speaks_this_corpus(roles: Roles, mentions: list[Mention]) -> None:
    """Its vocabulary is this one, and its general rows know no more of the default desk than chance."""
    vocabulary = json.loads((BASE / "tokenizer.json").read_text())["model"]["vocab"]
    assert set(words(roles)) <= set(vocabulary)
    rows = [
        json.loads(line) for name in ("general", "probe") for line in (BASE / f"{name}.jsonl").read_text().splitlines()
    ]
    found = [
        m
        for row in rows
        for m in set(RULE.findall("\n".join([*(m["content"] for m in row["messages"]), row["reply"]])))
    ]
    assert abs(z_of(found, desk.Options())) < Z
