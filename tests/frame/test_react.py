"""Reading of ReAct replies, by words and by tags."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages import envs
from stages.frame.react import parse_react
from stages.frame.types import Malformed


@pytest.mark.parametrize(
    ("text", "thought", "action"),
    [
        ("Thought: it is small.\nAction: check photo", "it is small.", "check photo"),
        ("thought : it is small . action : check photo", "it is small .", "check photo"),
        ("Action: go", "", "go"),
        ("I would say go. Action: go", "I would say go.", "go"),
        ("Thought: a\nAction: x\nThought: b\nAction: y", "b", "y"),
        ("Thought: my Action: must be careful.\nAction: y", "my Action: must be careful.", "y"),
        ("Thought: a\nAction: x\nObservation: invented", "a", "x"),
        ("Thought: a\nAction: two\nlines", "a", "two\nlines"),
        ("Thought: the transaction: fine\nAction: go", "the transaction: fine", "go"),
        ("Thought: first\nThought: second\nAction: go", "second", "go"),
    ],
)
def test_last_action_counts_with_the_thought_before_it(text: str, thought: str, action: str) -> None:
    assert parse_react(text) == (thought, action)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "go",
        "Thought: go",
        "Action:",
        "Action:  \n ",
        "Thought: a\nAction: x\nAction:",
        "transaction: x",
        "Action:\nObservation: x",
    ],
)
def test_no_action_is_malformed(text: str) -> None:
    with pytest.raises(Malformed, match="Action:"):
        parse_react(text)


@pytest.mark.parametrize(
    ("text", "thought", "action"),
    [
        ("<think>it is small</think><action>NAVIGATE(Lamp)</action>", "it is small", "NAVIGATE(Lamp)"),
        ("<THINK> a </Think>\n<Action> go </ACTION>", "a", "go"),
        ("<action>go</action>", "", "go"),
        ("I would say go. <action>go</action> So be it.", "I would say go.", "go"),
        ("<think>a</think><action>x</action><think>b</think><action>y</action>", "b", "y"),
        ("<think>a</think><action>x</action>\nObservation: invented <think>b</think><action>y", "a", "x"),
        ("<think>a</think><action>x</action><think>b, so <action>y</action>", "a", "x"),
        ("<think>maybe <action>x</action></think><action>y</action>", "maybe <action>x</action>", "y"),
        ("<think>a</think><action>x</action><think>or <action>y</action></think>", "a", "x"),
        ("<action>x <action>y</action>", "x", "y"),
        ("<action>two\nlines</action>", "", "two\nlines"),
        ("<think>a</think>Action: no. <action>y</action>", "a", "y"),
        ("opened in the prompt</think><action>y</action>", "opened in the prompt", "y"),
        ("I may <action>x</action> or not</think><action>y</action>", "I may <action>x</action> or not", "y"),
        # Without an <action> tag it is read by words, outside of the thought.
        ("<think>no Action: here</think>Action: go", "no Action: here", "go"),
        ("<think>a</think>Thought: b\nAction: go", "b", "go"),
        ("Thought: 1 < 2 and 3 > 2. Action: go", "1 < 2 and 3 > 2.", "go"),
    ],
)
def test_tags_are_read_with_the_last_closed_action(text: str, thought: str, action: str) -> None:
    assert parse_react(text) == (thought, action)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<think>a", "the tag <think> is not closed"),
        ("<think>a <action>x</action>", "the tag <think> is not closed"),
        ("<think>a. Action: x", "the tag <think> is not closed"),
        ("<think>a</think><action>x", "the tag <action> is not closed"),
        ("Thought: a\nAction: <Action>x", "the tag <action> is not closed"),
        ("<action> </action>", "nothing between <action> and </action>"),
        ("<action>x</action><action></action>", "nothing between <action> and </action>"),
        ("<think>a</think>", "no 'Action:'"),
        ("<think>Action: x</think>", "no 'Action:'"),
        ("I may <action>x</action> or not</think>", "no 'Action:'"),
        ("</action>", "no 'Action:'"),
    ],
)
def test_what_is_wrong_with_the_tags_is_told(text: str, said: str) -> None:
    with pytest.raises(Malformed, match=re.escape(said)):
        parse_react(text)


PIECES = [
    "<think>", "</think>", "<action>", "</action>", "<Action>", "</THINK>", "go", " Action: ", "Thought: ", "\n", "<",
    "x y",
]  # fmt: skip


def by_walking(text: str) -> tuple[str, str] | None:
    """The slow twin of the tags, by character: (thought, action) of the last closed action outside of thinking."""
    lower, at, start, inside, thought, outside = text.lower(), 0, 0, False, "", ""
    found: tuple[str, str] | None = None
    if "</think>" in lower and "<think>" not in lower[: lower.index("</think>")]:
        inside = True
    while at < len(text):
        rest = lower[at:]
        if inside:
            if rest.startswith("</think>"):
                inside, thought = False, text[start:at].strip()
                at += len("</think>")
            else:
                at += 1
        elif rest.startswith("<think>") and "</think>" not in rest:
            return found
        elif rest.startswith("<think>"):
            inside, at = True, at + len("<think>")
            start = at
        elif (
            rest.startswith("<action>") and "</action>" in rest and "<action>" not in rest[1 : rest.index("</action>")]
        ):
            close = at + rest.index("</action>")
            found = (thought or outside.strip(), text[at + len("<action>") : close].strip())
            thought, outside, at = "", "", close + len("</action>")
        elif rest.startswith("<action>"):
            at += len("<action>")
        else:
            outside += text[at]
            at += 1
    return found


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_tags_are_read_as_a_walk_over_the_characters_reads_them(text: str) -> None:
    expected = by_walking(text)
    if expected is not None and expected[1]:
        assert parse_react(text) == expected
    elif expected is not None:
        with pytest.raises(Malformed, match="nothing between"):
            parse_react(text)
    elif any(tag in text.lower() for tag in ("<action>", "<think>", "</think>")):
        try:
            _, action = parse_react(text)
        except Malformed:
            return
        assert "<action>" not in action.lower()


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([piece for piece in PIECES if piece[:1] != "<"] + ["<", "</action>"]), max_size=12).map(
        "".join
    )
)
def test_without_an_opening_tag_nothing_changes(text: str) -> None:
    """Equal to the rule of "Action:" alone, written down again."""
    before, colon, after = re.sub(r"(?i)\baction\s*:", "\0", text).rpartition("\0")
    action = re.split(r"(?im)^\s*(?:observation|thought)\s*:", after)[0].strip()
    if not colon or not action:
        with pytest.raises(Malformed):
            parse_react(text)
    else:
        said = re.split(r"(?i)\bthought\s*:", before)[-1].replace("\0", "Action:").strip()
        found = parse_react(text)
        assert (re.sub(r"(?i)action\s*:", "Action:", found[0]), found[1]) == (said, action)


@pytest.mark.parametrize("tag", ["<think>", "<action>", "</think>", "<think></think>", "Action: "])
def test_a_reply_of_tags_alone_is_read_in_no_time(tag: str) -> None:
    """A policy in trouble repeats a token. Linear, 20,000 take 10 ms; a pattern that looks ahead takes minutes."""
    began = time.perf_counter()
    with pytest.raises(Malformed):
        parse_react(tag * 20_000)
    assert time.perf_counter() - began < 5.0


FORMS = ("Thought: t\nAction: {}", "<think>t</think><action>{}</action>")


@pytest.mark.parametrize("form", FORMS)
def test_game24_and_wiki_search_read_both_forms(form: str) -> None:
    games = [
        scenario
        for scenario in envs.scenarios("game24", {}, "train", 400, 0)
        if sorted(scenario.data["numbers"])[:2] == [1, 1]
    ]
    game = envs.make_env("game24", {})()
    game.reset(games[0])
    step = game.step({"role": "assistant", "content": form.format("expand 0: 1 + 1 = 2")})
    assert "Node 1 is" in str(step.messages[0]["content"])
    wiki = envs.make_env("wiki_search", {})()
    (scenario,) = envs.scenarios("wiki_search", {}, "train", 1, 0)
    wiki.reset(scenario)
    step = wiki.step({"role": "assistant", "content": form.format("BACK()")})
    assert step.messages[0]["content"] == "No page is open. Use NAVIGATE."
    step = wiki.step({"role": "assistant", "content": form.format(f"SUBMIT({scenario.data['answer']})")})
    assert (step.reward, step.terminated) == (1.0, True)
