"""The agents' corpus: only training scenarios, right form, wrong sums and wins as often as told; its tokenizer loses
nothing.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages import envs, pretrain
from stages.corpora import Example, agents, desk, game24_trees, math_chains, wiki_walks
from stages.corpora.tokenizers import SPECIAL, byte_tokenizer, encode_episode
from stages.envs import arithmetic
from stages.envs.math_answers import whole_answer
from stages.llm.roles import load_roles
from stages.pretrain import PretrainConfig
from stages.train import scratch
from stages.train.scratch import Material, backward, in_parts

N = 400  # episodes a task
STEP = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")


@pytest.fixture(scope="module")
def examples() -> dict[str, list[Example]]:
    rng, prompts = random.Random("test"), agents.prompts()
    return {task: [agents.example(rng, prompts, task) for _ in range(N)] for task in agents.SHARE}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(agents.texts(agents.prompts(), 300), 1000)


def first_user(e: Example) -> str:
    return str(next(m["content"] for m in e.messages if m["role"] == "user"))


def replies(e: Example) -> list[str]:
    return [str(m["content"]) for m in agents.transcript(e) if m["role"] == "assistant"]


def held_out(task: str, options: dict[str, Any]) -> list[Any]:
    return [s.data for split in ("validation", "test") for s in envs.scenarios(task, options, split, None, 0)]


def test_no_held_out_problem_is_in_the_corpus_by_its_expression(examples: dict[str, list[Example]]) -> None:
    shipped = [p for level in arithmetic.STEPS for p in arithmetic.problems(level, 600, 0)]
    made = [p for level in arithmetic.STEPS for p in arithmetic.problems(level, math_chains.PROBLEMS, math_chains.SEED)]
    expression = {p.text(form): p.expression for p in (*shipped, *made) for form in ("digits", "words")}
    held = {expression[data["problem"]] for data in held_out("math", {})}
    assert len(held) > 300
    assert len(held & {p.expression for p in made}) > 20  # without the split they would be met
    assert not held & {expression[first_user(e)] for e in examples["math"]}
    assert not held & {expression[s.data["problem"]] for of_level in math_chains._train().values() for s, _ in of_level}


def test_no_held_out_puzzle_or_question_is_in_the_corpus(examples: dict[str, list[Example]]) -> None:
    puzzles = {" ".join(map(str, data["numbers"])) for data in held_out("game24", game24_trees.OPTIONS)}
    assert not puzzles & {first_user(e).split(" is ")[1].split(".")[0] for e in examples["game24"]}
    questions = {data["question"] for data in held_out("wiki_search", wiki_walks.OPTIONS)}
    assert len(questions) > 30
    assert not questions & {first_user(e) for e in examples["wiki_search"]}


def test_the_shipped_wiki_is_none_of_the_worlds(examples: dict[str, list[Example]]) -> None:
    """Of the answers to its questions none is told in an episode about the same question."""
    answers = {
        s.data["question"]: s.data["answer"]
        for s in envs.scenarios("wiki_search", wiki_walks.OPTIONS, "train", None, 0)
    }
    met = [(answers[first_user(e)], e.reply) for e in examples["wiki_search"] if first_user(e) in answers]
    assert len(met) > 20
    # towns and rivers are few, so those meet by chance
    dated = [(answer, reply) for answer, reply in met if re.search(r"[0-9]", answer)]
    assert sum(f"( {answer})" in reply for answer, reply in dated) <= 1


def slips(e: Example) -> int:
    """Wrong steps of a chain; asserts that it is one, told in order, and ends with its last number in a box."""
    *steps, box = e.reply.split("\n\n")
    found = [STEP.fullmatch(step) for step in steps]
    parts = [(int(m[1]), m[2], int(m[3]), int(m[4])) for m in found if m]
    assert len(parts) == len(steps) and box == rf"\boxed{{{parts[-1][3]}}}"
    assert all(after[0] == before[3] for before, after in pairwise(parts))
    return sum(c != {"+": a + b, "-": a - b, "*": a * b}[op] for a, op, b, c in parts)


def test_a_third_of_the_chains_have_one_wrong_step_and_the_others_none(examples: dict[str, list[Example]]) -> None:
    wrong = [slips(e) for e in examples["math"]]
    assert set(wrong) == {0, 1}
    error = math.sqrt(math_chains.WRONG * (1 - math_chains.WRONG) / N)
    assert abs(sum(wrong) / N - math_chains.WRONG) < 5 * error


def test_a_chain_without_a_slip_is_the_answer() -> None:
    rng = random.Random(0)
    for level in arithmetic.STEPS:
        for problem in arithmetic.problems(level, 100, 5):
            assert whole_answer(math_chains.chain(problem, rng, wrong=False), boxed_only=True) == problem.answer


def test_every_game_is_legal_but_for_a_few_wrong_results_and_a_24_is_submitted(
    examples: dict[str, list[Example]],
) -> None:
    won, wrong, right = 0, 0, 0
    for e in examples["game24"]:
        answers = [m["content"] for m in e.messages if m["role"] == "user"]
        for text, answer in zip(replies(e)[:-1], answers[1:], strict=True):
            a, op, b, c = re.findall(r"expand \d+: (\S+) (.) (\S+) = (\S+)", text)[0]
            x, y, z = Fraction(a), Fraction(b), Fraction(c)
            fits = (x + y, x - y, x * y, x / y if y else None)["+-*/".index(op)] == z
            assert fits == ("Not possible" not in answer)
            right, wrong = right + fits, wrong + (not fits)
        has = any(re.search(r"^Node \d+ is 24\.", text) for text in answers[1:])
        assert (" is 24." in e.reply) == has
        won += has
    n = right + wrong
    assert abs(wrong / n - game24_trees.SLIPS) < 5 * math.sqrt(game24_trees.SLIPS * (1 - game24_trees.SLIPS) / n)
    assert 0.01 < won / N < 0.2  # a random player's luck, not a solver's


def test_every_tool_is_used_and_does_what_it_is_for(examples: dict[str, list[Example]]) -> None:
    used = [re.findall(r"Action: ([A-Z_]+)\(", text)[0] for e in examples["wiki_search"] for text in replies(e)]
    assert set(used) == {"NAVIGATE", "FIND", "SAVE_LINE_IDS", "BACK", "SUBMIT"}
    told = [m["content"] for e in examples["wiki_search"] for m in e.messages if m["role"] == "user"]
    assert not [text for text in told if re.match(r"There is no page before|Nothing is saved|No page|No line", text)]
    lost = sum(text.startswith("There is no page") for text in told)
    assert 0 < lost < 5 * wiki_walks.SLIPS * N  # at most one a walk
    assert all(replies(e)[-1].split("Action: ")[1].startswith("SUBMIT( ") for e in examples["wiki_search"])


def test_an_episode_is_short_enough_to_train_on_a_laptop(examples: dict[str, list[Example]], tokenizer: Any) -> None:
    longest = max(len(encode_episode(tokenizer, e)[0]) for found in examples.values() for e in found)
    assert longest < 700


def test_the_same_seed_gives_the_same_corpus() -> None:
    prompts = agents.prompts()
    one, two = random.Random(3), random.Random(3)
    assert [agents.example(one, prompts) for _ in range(40)] == [agents.example(two, prompts) for _ in range(40)]


@settings(deadline=None)
@given(text=st.text(max_size=80))
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    if not any(token in text for token in SPECIAL):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_operators_and_blank_lines_are_tokens_of_their_own(tokenizer: Any) -> None:
    pieces = [tokenizer.decode([i]) for i in tokenizer("12 * 345 = 4140\n\n\\boxed{4140}").input_ids]
    assert pieces[:10] == ["1", "2", " * ", "3", "4", "5", " = ", "4", "1", "4"]
    assert pieces.count("\n\n") == 1
    tokens = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    assert not [token for token in tokens if re.search(r"\d", token) and len(token) > 1]
    assert not [token for token in tokens if "\n" in token and token not in ("\n", "\n\n")]


def test_the_tokenizer_is_the_same_every_time(tokenizer: Any) -> None:
    again = byte_tokenizer(agents.texts(agents.prompts(), 300), 1000)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


@settings(deadline=None)
@given(reply=st.text(max_size=40), observation=st.text(max_size=40))
def test_a_chat_that_goes_on_begins_with_the_same_ids(tokenizer: Any, reply: str, observation: str) -> None:
    if any(token in reply + observation for token in SPECIAL):
        return
    messages = [{"role": "system", "content": "Solve.\n\nStep by step."}, {"role": "user", "content": "What is 7 + 5?"}]

    def ids(chat: list[dict[str, str]]) -> list[int]:
        return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False))

    produced = [*ids(messages), *tokenizer(reply).input_ids, tokenizer.eos_token_id]
    assert (
        ids([*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": observation}])[
            : len(produced)
        ]
        == produced
    )


def test_all_but_the_system_message_is_learned(examples: dict[str, list[Example]], tokenizer: Any) -> None:
    for found in examples.values():
        for e in found[:50]:
            ids, learned = encode_episode(tokenizer, e)
            text = tokenizer.apply_chat_template(agents.transcript(e), tokenize=False)
            assert text == tokenizer.decode(ids)
            assert (
                tokenizer.decode([token for token, one in zip(ids, learned, strict=True) if one])
                == text.split("<|user|>", 1)[1]
            )


def test_a_step_in_parts_has_the_gradient_of_one_pass(examples: dict[str, list[Example]], tokenizer: Any) -> None:
    rows = [encode_episode(tokenizer, found[i]) for found in examples.values() for i in range(2)]
    assert sorted(map(len, in_parts(rows, 4))) == [1, 1, 2, 2]
    gradients = []
    for parts in (1, 4):
        model = models.tiny_llama(len(tokenizer))
        loss = backward(model, rows, parts, tokenizer.pad_token_id)
        gradients.append([torch.tensor(loss), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(gradients[0]) > 5
    for one, many in zip(*gradients, strict=True):
        assert torch.allclose(one, many, atol=1e-5, rtol=1e-4)


def test_agents_have_defaults_of_their_own_and_what_is_set_wins() -> None:
    assert PretrainConfig() == PretrainConfig(corpus="desk")
    assert (
        PretrainConfig().model_dump() | {"corpus": "agents", **pretrain.OF_AGENTS}
        == PretrainConfig(corpus="agents").model_dump()
    )
    assert PretrainConfig(corpus="agents", steps=7).steps == 7


def test_the_desk_s_stream_is_that_of_the_shipped_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples that train() draws are the stream that the shipped base model was made of: its first 192, by their hash."""
    roles = load_roles("service_desk")
    drawn: list[Example] = []

    def draw(rng: random.Random) -> Example:
        drawn.append(desk.example(rng, roles))
        return drawn[-1]

    monkeypatch.setattr(scratch, "encode_reply", lambda tokenizer, e: ([0], [True]))
    monkeypatch.setattr(scratch, "backward", lambda model, rows, parts, pad_id: 0.0)
    config = PretrainConfig(steps=2)
    scratch.train(
        models.tiny_llama(8),
        Material(SimpleNamespace(pad_token_id=0), draw, lambda tokenizer, e: ([0], [True])),
        config,
        0,
        lambda n: None,
    )
    assert (
        hashlib.sha256(repr([(e.role, e.messages, e.reply) for e in drawn]).encode()).hexdigest()
        == "24e1267d73ca6300070d9c3bdd968a73ff7ee3657ef92df3aec132942e11b46f"
    )
