"""The corpus of 20 Questions teaches the roles and the table, and no way to play well."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from probes import even, last

from stages import envs
from stages.corpora import Example
from stages.corpora import twenty as corpus
from stages.corpora.tokenizers import word_tokenizer
from stages.corpora.twenty import Action, Future, answer_to, attributes, example, fitting, judge, table
from stages.corpora.twenty_marks import right, turns_of
from stages.frame.react import parse_react
from stages.frame.types import Scenario
from stages.llm.roles import Roles, load_roles, parse_evaluation, parse_future

N = 1500  # examples a role
OPTIONS: dict[str, Any] = {"size": corpus.SIZE, "questions": corpus.QUESTIONS, "brief": True}


@pytest.fixture(scope="module")
def roles() -> Roles:
    return load_roles("twenty")


@pytest.fixture(scope="module")
def examples(roles: Roles) -> dict[str, list[Example]]:
    rng = random.Random("test")
    return {role: [example(rng, roles, role) for _ in range(N)] for role in corpus.SHARE}


def test_every_question_is_answered_by_the_game_as_the_corpus_has_it() -> None:
    make = envs.make_env("twenty_questions", OPTIONS)
    for target in list(table())[::3]:
        for action in [*(Action("ask", a) for a in attributes()), *(Action("guess", name) for name in table())]:
            env = make()
            env.reset(Scenario("twenty_questions", "train", target, {"object": target}))
            step = env.step({"role": "assistant", "content": corpus.reply("cat", action)})
            assert str(step.messages[0]["content"]).split(".")[0] == f"{action} {answer_to(action, target)}"
            assert step.reward == (action.word == target)


def test_a_state_is_what_the_game_says(roles: Roles) -> None:
    rng = random.Random(0)
    for _ in range(50):
        g = corpus.game(rng)
        env = envs.make_env("twenty_questions", OPTIONS)()
        told = [{"role": "system", "content": env.system}]
        told += env.reset(Scenario("twenty_questions", "train", g.target, {"object": g.target}))
        for turn in g.turns:
            said = {"role": "assistant", "content": corpus.reply(turn.thought, turn.action)}
            told += [said, *env.step(said).messages]
        assert told == corpus.state(g)
        assert tuple(turns_of(roles.policy(corpus.state(g)))) == g.turns


def test_the_policy_asks_at_random_whatever_was_answered(examples: dict[str, list[Example]]) -> None:
    """Every attribute as often as any other, among states where it is settled, too; half of its turns are guesses, and
    of those only what its thought says comes more often than any other object.
    """
    replies = [(turns_of(e.messages), *parse_react(e.reply)) for e in examples["policy"]]
    asked = [(turns, action.split()[1]) for turns, _, action in replies if action.startswith("ask")]
    assert abs(len(asked) / N - 0.5) < 5 * math.sqrt(0.25 / N)
    assert even(Counter(word for _, word in asked), len(attributes()))
    settled = [
        word for turns, word in asked if len({answer_to(Action("ask", word), name) for name in fitting(turns)}) == 1
    ]
    chance = [
        sum(len({answer_to(Action("ask", a), name) for name in fitting(turns)}) == 1 for a in attributes())
        / len(attributes())
        for turns, _ in asked
    ]
    spread = math.sqrt(sum(p * (1 - p) for p in chance))
    assert sum(chance) > 50 and abs(len(settled) - sum(chance)) < 5 * spread
    guesses = [(thought.rstrip("."), action.split()[1]) for _, thought, action in replies if action.startswith("guess")]
    p = corpus.FOLLOWS + (1 - corpus.FOLLOWS) / len(table())
    same = sum(thought == word for thought, word in guesses)
    assert abs(same / len(guesses) - p) < 5 * math.sqrt(p * (1 - p) / len(guesses))
    assert even(Counter(word for thought, word in guesses if thought != word), len(table()))


def test_the_successor_foresees_answers_at_random(roles: Roles) -> None:
    """Half of the answers are yes, whether the table settles them or not; of guesses so many, fitting or not."""
    rng, said = random.Random("successor"), dict[tuple[str, str], list[bool]]()
    for e in (example(rng, roles, "successor") for _ in range(4 * N)):
        verb, word = last(e).split("Action: ")[1].split()
        answers = {answer_to(Action(verb, word), name) for name in fitting(turns_of(e.messages))}
        known = "no" if answers == {"no"} else "yes" if answers == {"yes"} and verb == "ask" else "open"
        said.setdefault((verb, known), []).append(e.reply.split(", ")[0].endswith("yes"))
    assert len(said) == 5 and min(map(len, said.values())) > 25
    for (verb, known), found in said.items():
        p = 0.5 if verb == "ask" else corpus.LUCK
        assert abs(sum(found) / len(found) - p) < 5 * math.sqrt(p * (1 - p) / len(found)), (verb, known)


def test_thoughts_fit_all_answers_and_every_one_that_fits_as_often(examples: dict[str, list[Example]]) -> None:
    first = Counter(parse_react(e.reply)[0].rstrip(".") for e in examples["policy"] if not turns_of(e.messages))
    for e in examples["policy"]:
        assert parse_react(e.reply)[0].rstrip(".") in fitting(turns_of(e.messages))
    assert len(first) > 30  # of 40, in about 250 draws


def test_combine_tells_the_fact_before_the_later_future(examples: dict[str, list[Example]]) -> None:
    ends: Counter[str] = Counter()
    for e in examples["combine"]:
        fields = dict(line.split(": ", 1) for line in last(e).splitlines()[1:])
        word, answer = fields["Action"].split()[1], fields["Then"].split(".")[0].split()[-1]
        later = fields["Later"].removeprefix("Future: ")
        end = fields["Then"].rsplit(" ", 1)[-1] if later == "none" else later
        assert e.reply == f"Future: {word} is {answer}, {end}"
        assert fields["Reward"] == ("none" if later != "none" else str(int(end == "won.")))
        ends[end if later == "none" else "later"] += 1
    assert set(ends) == {"won.", "lost.", "later"} and min(ends.values()) > 100


def test_the_corrector_takes_out_what_was_seen_and_what_was_told(examples: dict[str, list[Example]]) -> None:
    for e in examples["corrector"]:
        assert e.reply == last(e).removeprefix("Rewrite.\n").replace(" is ", " ").replace("as told, ", "")
    assert sum(" is " in last(e) for e in examples["corrector"]) > 300


def test_every_reply_is_right_as_the_card_counts_it_and_a_spoilt_one_is_not(examples: dict[str, list[Example]]) -> None:
    for role, found in examples.items():
        for e in found:
            row = {"role": role, "messages": list(e.messages), "reply": e.reply}
            assert all(right(row, e.reply).values()), (role, last(e), e.reply)
            assert not right(row, e.reply.replace(".", " .", 1))[role]
        readers: dict[str, Callable[[str], object]] = {
            "successor": parse_future, "combine": parse_future, "evaluator": parse_evaluation,
        }  # fmt: skip
        for e in found[:200]:
            if role in readers:
                readers[role](e.reply)


def row_of(evaluation: str, *turns: str) -> dict[str, Any]:
    """A row of the refiner about "ask metal", after turns such as "guess cat: no"."""
    made = [corpus.Turn("cat", Action(*turn.split(": ")[0].split()), turn.split(": ")[1]) for turn in turns]
    prompt = load_roles("twenty").prompt(
        "refiner",
        corpus.state(corpus.Game("knife", tuple(made))),
        action="ask metal",
        thought="",
        evaluation=evaluation,
    )
    return {"role": "refiner", "messages": prompt, "reply": "Thought: as told, knife. Action: guess knife"}


@pytest.mark.parametrize(
    ("due", "said", "good"),
    [
        (", ask", "Thought: as told, cat. Action: ask big", True),
        (", ask", "Thought: as told, cat. Action: ask metal", False),  # the action that was criticised
        (", ask", "Thought: as told, cat. Action: ask animal", False),  # asked before
        (", ask", "Thought: as told, knife. Action: ask big", False),  # a knife is no animal
        (", ask", "Thought: as told, cat. Action: guess cat", False),
        (", ask", "Thought: as told, cat. Action: ask unicorn", False),
        (", guess", "Thought: as told, cat. Action: guess cat", True),
        (", guess", "Thought: as told, cat. Action: guess knife", False),
        (", guess knife", "Thought: as told, knife. Action: guess knife", True),
        (", guess knife", "Thought: as told, cat. Action: guess cat", False),
        ("", "Thought: as told, cat. Action: ask big", True),
        ("", "Thought: as told, cat. Action: guess cat", True),
    ],
)
def test_a_refinement_is_right_where_it_does_what_it_was_told(due: str, said: str, good: bool) -> None:
    evaluation = f"Optimality: No. metal may be known{due}." if due else "Optimality: No."
    assert right(row_of(evaluation, "ask animal: yes"), said)["refiner"] is good


def futures(*texts: str) -> list[Future]:
    found = []
    for text in texts:
        *items, end = text.split(", ")
        found.append(Future(tuple((item.split()[0], item.split()[1]) for item in items), end == "won"))
    return found


@pytest.mark.parametrize(
    ("action", "left", "told", "verdict"),
    [
        ("ask metal", 4, ["metal yes, lost", "metal no, lost"], "Yes."),  # the answer is open, whatever the end
        ("ask metal", 4, ["metal yes, knife yes, won"], "Yes."),  # one future cannot tell that it is known
        ("ask metal", 4, ["metal no, lost"] * 4, "No. metal may be known, ask."),
        ("ask metal", 4, ["metal no, cat yes, won"] * 2 + ["metal no, lost"] * 2, "No. metal may be known, guess cat."),
        ("ask metal", 4, ["metal no, cat yes, won"] + ["metal no, lost"] * 3, "No. metal may be known, ask."),
        (
            "ask metal",
            4,
            ["metal no, cat yes, won", "metal no, dog yes, won"] * 2,
            "No. metal may be known, guess cat.",
        ),
        ("ask metal", 1, ["metal no, lost", "metal yes, lost"], "No. too late, guess."),
        ("guess cat", 4, ["cat yes, won", "cat no, lost"], "Yes."),
        ("guess cat", 4, ["cat yes, won", "cat no, lost", "cat no, lost"], "No. cat may be wrong, ask."),
        ("guess cat", 1, ["cat no, lost"], "No. cat may be wrong, guess."),
    ],
)
def test_the_verdict_by_hand(action: str, left: int, told: list[str], verdict: str) -> None:
    assert judge(Action(*action.split()), left, futures(*told)) == f"Optimality: {verdict}"


def test_the_evaluator_has_every_verdict_to_learn_from(examples: dict[str, list[Example]]) -> None:
    kinds = Counter(re.sub(r"No\. \w+ may|guess \w+\.", "No. X may", e.reply) for e in examples["evaluator"])
    assert len(kinds) == 6 and min(kinds.values()) > 25, kinds


def test_every_word_of_the_game_is_in_the_vocabulary_and_survives_it(roles: Roles) -> None:
    tokenizer, rng = word_tokenizer(corpus.words(roles)), random.Random("other")
    texts = [f"{e.reply} {last(e)}" for _ in range(1000) for e in [example(rng, roles)]]
    texts += ["ask cat unclear. 3 left.", "ask cat unclear. lost.", roles.words("value"), *table(), *attributes()]
    for text in texts:
        ids = tokenizer(text).input_ids
        assert tokenizer.unk_token_id not in ids, text
        assert tokenizer.decode(ids) == " ".join(text.split())


def test_no_example_is_longer_than_the_model(roles: Roles, examples: dict[str, list[Example]]) -> None:
    tokenizer = word_tokenizer(corpus.words(roles))
    longest = max((e for found in examples.values() for e in found), key=lambda e: len(str(e.messages)))
    assert len(tokenizer.apply_chat_template(list(longest.messages), tokenize=True, return_dict=False)) < 200


def test_the_same_seed_gives_the_same_corpus(roles: Roles) -> None:
    one, two = random.Random(3), random.Random(3)
    assert [example(one, roles) for _ in range(60)] == [example(two, roles) for _ in range(60)]
