"""Reading of ReAct replies."""

from __future__ import annotations

import pytest

from stages.react import parse_react
from stages.types import Malformed


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
    "text", ["", "go", "Thought: go", "Action:", "Action:  \n ", "Thought: a\nAction: x\nAction:", "transaction: x", "Action:\nObservation: x"]
)
def test_no_action_is_malformed(text: str) -> None:
    with pytest.raises(Malformed, match="Action:"):
        parse_react(text)
