"""wiki_search: the five tools, the reward, and that every question can be answered by them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_data import DATA, needs

from stages import envs
from stages.envs.wiki_corpus import load_corpus
from stages.envs.wiki_sample import sample
from stages.envs.wiki_search import Options, WikiSearch, read_action
from stages.frame.types import Malformed, Message, Scenario, Step, UsageError

WIKI = DATA / "wiki"
CORPUS, QUESTIONS = sample(0)
BOOK = next(page for title, page in CORPUS.pages.items() if title.startswith("The "))
AUTHOR = CORPUS.pages[BOOK.links[0]]
Q = next(q for q in QUESTIONS if q.question == f"When was the author of {BOOK.title} born?")
SCENARIO = Scenario(
    "wiki_search",
    "train",
    "x",
    {"question": Q.question, "answer": Q.answer, "evidence": [list(item) for item in Q.evidence]},
)


def start(scenario: Scenario = SCENARIO, **options: Any) -> WikiSearch:
    env = WikiSearch(Options(**options), CORPUS)
    env.reset(scenario)
    return env


def act(action: str) -> Message:
    return {"role": "assistant", "content": f"Thought: because.\nAction: {action}"}


def said(env: Any, action: str) -> str:
    return str(env.step(act(action)).messages[0]["content"])


def test_two_hops_and_their_evidence_give_the_whole_reward() -> None:
    env = start(evidence_weight=0.3)
    shown = said(env, f"NAVIGATE({BOOK.title})")
    assert (
        shown
        == f"{BOOK.title}\n1 {BOOK.lines[0]}\n2 {BOOK.lines[1]}\n3 {BOOK.lines[2]}\nLinks: {'; '.join(BOOK.links)}"
    )
    (_, one), (_, two) = Q.evidence
    assert said(env, f"SAVE_LINE_IDS({one})") == "Saved lines in all: 1."
    assert said(env, f"NAVIGATE {AUTHOR.title}").startswith(f"{AUTHOR.title}\n1 ")
    assert said(env, "FIND(WAS BORN)") == f"{two} {AUTHOR.lines[(two or 0) - 1]}"
    assert said(env, f"SAVE_LINE_IDS {two}, {two}") == "Saved lines in all: 2."
    step = env.step(act(f"SUBMIT({Q.answer})"))
    assert (step.reward, step.terminated, step.truncated) == (1.0, True, False)
    assert step.info == {"exact": True, "f1": 1.0, "evidence": 1.0}
    assert step.messages[0]["content"] == "Right. Evidence: 1.00 of 1."


@pytest.mark.parametrize(
    ("weight", "saved", "answer", "reward"),
    [
        (0.0, 0, Q.answer, 1.0),
        (0.0, 2, "no", 0.0),
        (0.3, 0, Q.answer, 0.7),
        (0.3, 2, "no", 0.3),
        (0.3, 1, Q.answer, 0.7 + 0.3 * 2 / 3),
        (1.0, 2, "no", 1.0),
    ],
)
def test_the_reward_is_the_weighted_mean_of_answer_and_evidence(
    weight: float, saved: int, answer: str, reward: float
) -> None:
    env = start(evidence_weight=weight)
    for title, line in Q.evidence[:saved]:
        said(env, f"NAVIGATE {title}")
        said(env, f"SAVE_LINE_IDS {line}")
    step = env.step(act(f"SUBMIT {answer}"))
    assert step.reward == pytest.approx(reward, abs=1e-12)
    assert step.terminated


def test_the_last_reply_loses_the_question_and_is_an_end() -> None:
    env = start(replies=3, evidence_weight=0.5)
    assert not env.step(act("BACK")).terminated  # nothing to go back to: a reply all the same
    with pytest.raises(Malformed):
        env.step(act("JUMP"))  # not understood: none
    said(env, f"NAVIGATE {BOOK.title}")
    last = env.step(act(f"SAVE_LINE_IDS {Q.evidence[0][1]}"))
    assert (last.reward, last.terminated, last.truncated) == (0.0, True, False)
    assert last.messages[0]["content"] == "That was the last reply, and nothing is submitted."
    with pytest.raises(RuntimeError, match="reset"):
        env.step(act("BACK"))


def test_the_last_reply_may_submit_and_without_a_limit_nothing_else_ends_it() -> None:
    env = start(replies=2)
    said(env, f"NAVIGATE {AUTHOR.title}")
    assert env.step(act(f"SUBMIT {Q.answer}")).reward == 1.0
    env = start()
    assert not any(env.step(act(f"NAVIGATE {BOOK.title}")).terminated for _ in range(40))


def test_saving_every_line_is_no_way_to_the_whole_reward() -> None:
    env = start(evidence_weight=1.0)
    for page in CORPUS.pages.values():
        said(env, f"NAVIGATE {page.title}")
        said(env, f"SAVE_LINE_IDS {' '.join(str(n) for n in range(1, len(page.lines) + 1))}")
    assert env.step(act("SUBMIT x")).reward < 0.05


def test_an_unknown_title_is_answered_with_the_nearest_ones() -> None:
    env = start(suggestions=3)
    last = AUTHOR.title.split()[1]
    answer = said(env, f"NAVIGATE {last}")
    assert answer.startswith(f"There is no page '{last}'. Nearest: ") and AUTHOR.title in answer
    assert answer.count(";") <= 2
    assert said(env, "NAVIGATE ???") == "There is no page '???'."
    assert said(start(suggestions=0), f"NAVIGATE {last}") == f"There is no page '{last}'."
    assert said(env, "FIND x") == "No page is open. Use NAVIGATE."  # nothing was opened by all that


def test_back_goes_through_the_pages_in_turn() -> None:
    env = start()
    for action in ("BACK", "FIND x", "SAVE_LINE_IDS 1"):
        assert said(env, action) == "No page is open. Use NAVIGATE."
    first, second = said(env, f"NAVIGATE {BOOK.title}"), said(env, f"NAVIGATE {AUTHOR.title}")
    assert said(env, f"NAVIGATE {AUTHOR.title.upper()}") == second  # the open page again is no step to come back over
    assert said(env, "BACK()") == first
    assert said(env, "BACK") == "There is no page before this one."


def test_what_a_tool_cannot_do_changes_nothing() -> None:
    env = start()
    said(env, f"NAVIGATE {BOOK.title}")
    assert said(env, "SAVE_LINE_IDS 1, 4") == f"Nothing is saved: {BOOK.title} has lines 1 to 3."
    assert said(env, "SAVE_LINE_IDS 0").startswith("Nothing is saved")
    assert said(env, "FIND zebra") == f"No line of {BOOK.title} holds 'zebra'."
    assert env.step(act("SUBMIT x")).info["evidence"] == 0


def test_a_long_page_is_shown_in_part_and_found_in_whole() -> None:
    env = start(page_lines=1)
    assert (
        said(env, f"NAVIGATE {BOOK.title}")
        == f"{BOOK.title}\n1 {BOOK.lines[0]}\n2 more lines: use FIND\nLinks: {BOOK.links[0]}; 1 more"
    )
    assert said(env, f"FIND {BOOK.lines[2]}") == f"3 {BOOK.lines[2]}"
    assert said(env, "SAVE_LINE_IDS 3") == "Saved lines in all: 1."


@pytest.mark.parametrize(
    ("action", "read"),
    [
        ("NAVIGATE Theodred II (Bishop of Elmham)", ("NAVIGATE", "Theodred II (Bishop of Elmham)")),
        ("NAVIGATE(Theodred II (Bishop of Elmham))", ("NAVIGATE", "Theodred II (Bishop of Elmham)")),
        ("navigate ( Free Guy )", ("NAVIGATE", "Free Guy")),
        ('NAVIGATE("Free Guy")', ("NAVIGATE", "Free Guy")),
        (
            "NAVIGATE (What's the Story) Morning Glory? (album)",
            ("NAVIGATE", "(What's the Story) Morning Glory? (album)"),
        ),
        ("NAVIGATE((film))", ("NAVIGATE", "(film)")),
        ("FIND 'born in'", ("FIND", "born in")),
        ("FIND(:)", ("FIND", ":")),
        ("SAVE_LINE_IDS([1, 2 ,3])", ("SAVE_LINE_IDS", "[1, 2 ,3]")),
        ("save_line_ids 1 2", ("SAVE_LINE_IDS", "1 2")),
        ("BACK ( )", ("BACK", "")),
        ("SUBMIT March 17, 1962", ("SUBMIT", "March 17, 1962")),
    ],
)
def test_both_forms_of_an_action_are_read(action: str, read: tuple[str, str]) -> None:
    assert read_action(action) == read


MALFORMED = [
    "LOOK x", "NAVIGATE", "NAVIGATE()", 'NAVIGATE("")', "FIND", "SUBMIT", "SUBMIT( )", "BACK 2", "SAVE_LINE_IDS",
    "SAVE_LINE_IDS one", "NAVIGATEx",
]  # fmt: skip
MALFORMED += [
    "SAVE_LINE_IDS 1-3",
    "SAVE_LINE_IDS -1",
    "SAVE_LINE_IDS 1,,2",
    "SAVE_LINE_IDS 1234567",
    "SAVE_LINE_IDS ١",
    f"SAVE_LINE_IDS {'1 ' * 51}",
]
MALFORMED += [f"NAVIGATE {'x' * 301}", f"FIND {'x' * 301}", f"SUBMIT {'x' * 301}", "SUBMIT x\nBACK", "x NAVIGATE y"]


@pytest.mark.parametrize("action", MALFORMED)
def test_an_action_in_another_form_is_malformed(action: str) -> None:
    with pytest.raises(Malformed):
        start().step(act(action))


@given(st.text(alphabet="()\"' a", max_size=30))
def test_an_argument_in_brackets_is_read_as_it_stands(text: str) -> None:
    """Where its brackets pair up, TOOL(text) is TOOL text, unless brackets stand around all of the text."""
    depth = 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if depth < 0:
            return
    if depth == 0 and text.strip() and text.strip()[0] not in "(\"'":
        assert read_action(f"FIND({text})") == read_action(f"FIND {text}") == ("FIND", text.strip())


@pytest.mark.parametrize("weight", [0.0, 0.4])
def test_every_question_of_the_sample_can_be_answered(weight: float) -> None:
    found = {split: envs.scenarios("wiki_search", {}, split, None, 0) for split in ("train", "validation", "test")}
    assert {split: len(some) for split, some in found.items()} == {"train": 51, "validation": 7, "test": 22}
    for scenario in (s for some in found.values() for s in some):
        env = start(scenario, evidence_weight=weight)
        for title, line in scenario.data["evidence"]:
            shown = said(env, f"NAVIGATE({title})")
            said(env, f"SAVE_LINE_IDS({line})")
        assert scenario.data["answer"] in shown
        assert env.step(act(f"SUBMIT({scenario.data['answer']})")).reward == 1.0


def test_evidence_is_needed_where_it_is_rewarded(tmp_path: Any) -> None:
    (tmp_path / "pages.jsonl").write_text('{"title": "A", "text": "B."}')
    (tmp_path / "questions.jsonl").write_text('{"question": "q", "answer": "b", "id": "one"}')
    assert len(envs.scenarios("wiki_search", {"path": str(tmp_path)}, "train", None, 0)) <= 1
    with pytest.raises(UsageError, match="'one' has none"):
        envs.make_env("wiki_search", {"path": str(tmp_path), "evidence_weight": 0.1})
    with pytest.raises(UsageError, match=r"task\.options\.path"):
        envs.make_env("wiki_search", {"questions": "x.jsonl"})


def test_the_right_answer_is_told_only_where_that_is_asked_for() -> None:
    assert said(start(), "SUBMIT x") == "Wrong."
    assert said(start(reveal=True), "SUBMIT x") == f"Wrong. It is {Q.answer}."


def other_date(date: str) -> str:
    """March 17, 1962 <-> 17 March 1962."""
    if found := re.fullmatch(r"(\w+) (\d+), (\d+)", date):
        return f"{found[2]} {found[1]} {found[3]}"
    return re.sub(r"(\d+) (\w+) (\d+)", r"\2 \1, \3", date)


@needs(WIKI)
def test_every_question_about_wikipedia_can_be_answered_by_its_links() -> None:
    options = {"path": str(WIKI)}
    env = envs.make_env("wiki_search", options)()
    assert len(load_corpus(WIKI).pages) == 6119
    found = {split: envs.scenarios("wiki_search", options, split, None, 0) for split in ("train", "validation", "test")}
    assert (
        len(found["test"]) == 100
        and len(found["train"]) + len(found["validation"]) == 338
        and len(found["validation"]) > 20
    )

    def submit(answer: str) -> Step:
        return env.step(act(f"SUBMIT {answer}"))

    for scenario in (s for some in found.values() for s in some):
        env.reset(scenario)
        (first, _), (second, _) = scenario.data["evidence"]
        answer = scenario.data["answer"]
        assert second in said(env, f"NAVIGATE {first}").split("\nLinks: ")[1].split("; ")
        assert said(env, f"NAVIGATE {second}").startswith(f"{second}\n1 ")
        assert answer in said(env, f"FIND {answer}")
        assert submit(answer).reward == 1
        for text, reward in (
            (other_date(answer), 1),
            (answer[:-1] + str((int(answer[-1]) + 1) % 10), 0),
            (answer[:-5], 0),
            (second, 0),
        ):
            env.reset(scenario)
            assert submit(text).reward == reward, text
