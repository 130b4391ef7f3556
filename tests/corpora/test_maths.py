"""The corpus of arithmetic teaches the roles and the size of a result, and neither which result is right nor what is judged right."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from probes import even, last

from stages import envs
from stages.corpora import Example
from stages.corpora import maths as corpus
from stages.corpora.maths import REPLY, SLIPS, End, Work, example, judge, right
from stages.corpora.tokenizers import encode_reply, encode_turns, word_tokenizer
from stages.envs import sums
from stages.envs.arithmetic import Problem, apply
from stages.frame.react import parse_react
from stages.frame.types import Malformed, Scenario
from stages.llm.roles import Roles, load_roles, parse_evaluation, parse_future

N = 1500  # examples a role
Z = 5.0  # standard errors: by chance beyond it once in 1.7 million looks
PROBLEM = Problem(0, 8, (("+", 5), ("*", 2)))


@pytest.fixture(scope="module")
def roles() -> Roles:
    return load_roles("maths")


@pytest.fixture(scope="module")
def examples(roles: Roles) -> dict[str, list[Example]]:
    rng = random.Random("test")
    return {role: [example(rng, roles, role) for _ in range(N)] for role in corpus.SHARE}


def slips(texts: Iterable[str]) -> list[tuple[str, int]]:
    """(op, result less the right one) of every step that is stated."""
    stated = [one for text in texts for one in sums.equations(text)]
    return [(op, result - apply(before, op, number)) for before, op, number, result in stated]


@pytest.mark.parametrize("role", ["policy", "successor", "combine", "evaluator", "corrector"])
def test_the_right_result_is_as_frequent_as_each_of_its_neighbours(
    examples: dict[str, list[Example]], role: str
) -> None:
    """In all that stands in its prompts, and in what the policy replies; the corrector's replies repeat its prompts."""
    found = slips(str(m["content"]) for e in examples[role] for m in e.messages)
    found += slips(e.reply for e in examples[role] if role == "policy")
    assert {slip for _, slip in found} == set(SLIPS)
    for op in "+-*":
        assert even(Counter(slip for of, slip in found if of == op), len(SLIPS)), op


def test_the_count_would_find_one_right_result_in_ten_too_many(examples: dict[str, list[Example]]) -> None:
    rng = random.Random(0)
    found = slips(e.reply for e in examples["policy"])
    planted = Counter(0 if rng.random() < 0.1 else slip for _, slip in found)
    assert not even(planted, len(SLIPS))


def test_a_rewrite_is_right_no_more_often_than_chance(examples: dict[str, list[Example]]) -> None:
    """Told nothing of the answer, the result of a step is one of the two others: right in a third of the cases."""
    found = []
    for e in examples["refiner"]:
        if "it may be" not in last(e) and "step by step" in str(e.messages[0]["content"]):
            found += [slip == 0 for _, slip in slips([e.reply])]
    assert len(found) > 300 and abs(sum(found) / len(found) - 1 / 3) < Z * math.sqrt(2 / 9 / len(found))


def ending(e: Example) -> tuple[Problem, int]:
    """The problem of an example, and the result that its action states last."""
    problem = sums.problem_told(str(e.messages[1]["content"]))
    return problem, sums.equations(last(e))[-1][3]


@pytest.mark.parametrize("role", ["successor", "combine"])
def test_what_is_worked_out_rightly_is_not_judged_right_more_often(roles: Roles, role: str) -> None:
    """By a solution's last number and by a step's result: good ends differ by less than 5 standard errors."""
    rng, ends = random.Random(role), {(kind, good): [0, 0] for kind in ("reply", "step") for good in (True, False)}
    for e in (example(rng, roles, role) for _ in range(4 * N)):
        problem, result = ending(e)
        whole = str(e.messages[0]["content"]) == sums.BRIEF["reply"]
        good = result == problem.answer if whole else slips([last(e)])[-1][1] == 0
        count = ends["reply" if whole else "step", good]
        count[0], count[1] = count[0] + 1, count[1] + bool(re.search(r"(is|be) right\.", e.reply))
    for kind in ("reply", "step"):
        (n, a), (m, b) = ends[kind, True], ends[kind, False]
        assert min(n, m) > 500
        assert abs(a / n - b / m) < Z * math.sqrt(0.25 / n + 0.25 / m), kind


def test_what_is_told_is_the_answer_no_more_often_than_its_neighbours(roles: Roles) -> None:
    rng, off = random.Random("told"), Counter[int]()
    for e in (example(rng, roles, "successor") for _ in range(6 * N)):
        problem, _ = ending(e)
        if found := re.search(r"it may be (\d+)", e.reply):
            off[int(found[1]) - problem.answer] += 1
    around = (off[-2] + off[-1] + off[1] + off[2]) / 4
    assert around > 100 and off[0] < around + Z * math.sqrt(around)


def test_a_state_is_what_sums_says_and_its_actions_are_read(roles: Roles) -> None:
    rng = random.Random(0)
    for _ in range(100):
        w, results = corpus.drawn(rng)
        problem = w.problem
        env = envs.make_env("sums", {"by": w.by})()
        data = {"start": problem.start, "steps": [list(step) for step in problem.steps]}
        told = [{"role": "system", "content": env.system}, *env.reset(Scenario("sums", "train", "x", data))]
        for k, result in enumerate(w.done):
            said = {
                "role": "assistant",
                "content": corpus.reply(corpus.action(Work(problem, w.by, w.done[:k]), [result])),
            }
            told += [said, *env.step(said).messages]
        assert told == corpus.state(w)
        step = env.step({"role": "assistant", "content": corpus.reply(corpus.action(w, results))})
        assert step.terminated == w.ends


def test_combine_tells_the_fact_before_the_later_future(examples: dict[str, list[Example]]) -> None:
    ends: Counter[str] = Counter()
    for e in examples["combine"]:
        fields = dict(line.split(": ", 1) for line in last(e).splitlines()[1:])
        if fields["Later"] == "none":
            assert e.reply == f"Future: {fields['Then']}"
            assert fields["Reward"] == str(int(fields["Then"].endswith("is right.")))
        else:
            result, rest = fields["Then"].split(",")[0], fields["Later"].removeprefix("Future: ")
            assert (e.reply, fields["Reward"]) == (f"Future: {result}, then {rest}", "none")
        ends["later" if fields["Later"] != "none" else "told" if "it is" in fields["Then"] else fields["Reward"]] += 1
    assert set(ends) == {"later", "told", "0", "1"} and min(ends.values()) > 100


def test_the_corrector_takes_out_what_was_seen_and_what_was_told(examples: dict[str, list[Example]]) -> None:
    for e in examples["corrector"]:
        assert e.reply == last(e).removeprefix("Rewrite.\n").replace(" is ", " may be ").replace("as told", "work")
    assert sum(" is " in last(e) for e in examples["corrector"]) > 300


RIGHT, WRONG, TOLD = End(right=True), End(right=False), End(right=False, told=26)


@pytest.mark.parametrize(
    ("w", "ends", "verdict"),
    [
        (Work(PROBLEM, "reply"), [RIGHT], "Yes."),
        (Work(PROBLEM, "reply"), [RIGHT, WRONG], "Yes."),
        (Work(PROBLEM, "reply"), [RIGHT, WRONG, WRONG], "No. 25 may be wrong."),
        (Work(PROBLEM, "reply"), [WRONG, TOLD, RIGHT], "No. 25 may be wrong, it may be 26."),
        (Work(PROBLEM, "step", (12,)), [TOLD], "No. 25 may be wrong, it may be 26."),
        (Work(PROBLEM, "step"), [TOLD], "No. 25 may be wrong."),  # what is told is of the last step
    ],
)
def test_the_verdict_by_hand(w: Work, ends: list[End], verdict: str) -> None:
    assert judge(w, 25, ends) == f"Optimality: {verdict}"


def test_every_reply_is_right_as_the_card_counts_it_and_a_spoilt_one_is_not(examples: dict[str, list[Example]]) -> None:
    for role, found in examples.items():
        for e in found:
            row = {"role": role, "messages": list(e.messages), "reply": e.reply}
            assert right(row, e.reply)[role], (role, last(e), e.reply)
            assert not right(row, e.reply + ".")[role]
            if role in ("successor", "combine"):
                parse_future(e.reply)
            if role == "evaluator":
                parse_evaluation(e.reply)


def row_of(evaluation: str) -> dict[str, Any]:
    """A row of the refiner about a solution that ends with 25, of which the model reply ends with 26."""
    w = Work(PROBLEM, "reply")
    prompt = load_roles("maths").prompt(
        "refiner",
        corpus.state(w),
        action="8 + 5 = 13, 13 * 2 = 25",
        thought="",
        evaluation=f"Optimality: No.{evaluation}",
    )
    return {"role": "refiner", "messages": prompt, "reply": "Thought: as told. Action: 8 + 5 = 13, 13 * 2 = 26"}


@pytest.mark.parametrize(
    ("evaluation", "said", "good"),
    [
        (" 25 may be wrong.", "as told. Action: 8 + 5 = 12, 12 * 2 = 24", True),
        ("", "as told. Action: 8 + 5 = 12, 12 * 2 = 24", True),
        (" 25 may be wrong.", "as told. Action: 8 + 5 = 12, 12 * 2 = 25", False),  # the result that was criticised
        (" 25 may be wrong.", "as told. Action: 8 + 5 = 12, 12 * 2 = 20", False),  # far off
        (" 25 may be wrong.", "as told. Action: 8 + 5 = 12, 13 * 2 = 26", False),  # does not go on
        (" 25 may be wrong.", "as told. Action: 7 + 5 = 12, 12 * 2 = 24", False),  # another problem
        (" 25 may be wrong.", "as told. Action: 8 + 6 = 14, 14 * 2 = 28", False),
        (" 25 may be wrong.", "as told. Action: 8 + 5 = 13", False),
        (" 25 may be wrong.", "as told. Action: 26", False),
        (" 25 may be wrong.", "work. Action: 8 + 5 = 12, 12 * 2 = 24", False),
        (" 25 may be wrong, it may be 29.", "as told. Action: 8 + 5 = 13, 13 * 2 = 29", True),
        (" 25 may be wrong, it may be 29.", "as told. Action: 8 + 5 = 13, 13 * 2 = 26", False),
    ],
)
def test_a_rewrite_is_right_where_it_does_what_it_was_told(evaluation: str, said: str, good: bool) -> None:
    assert right(row_of(evaluation), f"Thought: {said}")["refiner"] is good


def test_every_word_is_in_the_vocabulary_and_survives_it(roles: Roles) -> None:
    tokenizer, rng = word_tokenizer(corpus.words(roles)), random.Random("other")
    texts = [f"{e.reply} {last(e)}" for _ in range(1000) for e in [example(rng, roles)]]
    with pytest.raises(Malformed) as caught:
        sums.read("?", "step", PROBLEM, ())
    for text in [*texts, str(caught.value), roles.words("value")]:
        ids = tokenizer(text).input_ids
        assert tokenizer.unk_token_id not in ids, text
        assert tokenizer.decode(ids) == " ".join(text.split())


def test_earlier_steps_are_learned_too_and_the_problem_is_not(roles: Roles) -> None:
    tokenizer = word_tokenizer(corpus.words(roles))
    w = Work(PROBLEM, "step", (12,))
    e = Example("policy", tuple(corpus.state(w)), "Thought: work. Action: 12 * 2 = 24")
    said = [
        tokenizer.decode([i for i, on in zip(*encode(tokenizer, e), strict=True) if on])
        for encode in (encode_turns, encode_reply)
    ]
    assert [text.count("=") for text in said] == [2, 1] and "step by step" not in said[0]
    assert all(REPLY.search(text) and parse_react(text) for text in said)


def test_the_same_seed_gives_the_same_corpus(roles: Roles) -> None:
    one, two = random.Random(3), random.Random(3)
    assert [example(one, roles) for _ in range(60)] == [example(two, roles) for _ in range(60)]
