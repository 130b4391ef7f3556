"""The oracles of 20 Questions: the rule over the package's own table, and an LLM."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stages.envs.objects import forms, own_table, words
from stages.envs.oracle import fold, llm_oracle, rule_oracle
from stages.frame.types import EngineUnavailable, Message, SimulatorError


@pytest.mark.parametrize(("target", "text", "answer"), [
    ("cat", "Is it alive?", "yes"), ("cat", "Is it a living thing?", "yes"), ("cat", "Is it an animal?", "yes"), ("cat", "Is it a mammal?", "yes"),
    ("cat", "Does it have four legs?", "yes"), ("cat", "Does it have wings?", "no"), ("cat", "Is it man-made?", "no"),
    ("cat", "Is it inanimate?", "no"),
    ("piano", "Is it a musical instrument?", "yes"), ("piano", "Is it made of wood?", "yes"), ("piano", "Was it manufactured?", "yes"),
    ("piano", "Can I eat it?", "no"), ("piano", "Is it bigger than a breadbox?", "yes"), ("piano", "Is it found in nature?", "no"),
    ("hammer", "Would I find it in a garage?", "yes"), ("hammer", "Could you hold it in one hand?", "yes"), ("hammer", "Is it soft?", "no"),
    ("refrigerator", "Does it use electricity?", "yes"), ("refrigerator", "Is it larger than a person?", "yes"),
    ("refrigerator", "Is it portable?", "no"), ("refrigerator", "Would you find it in the kitchen?", "yes"),
    ("eagle", "Can it fly?", "yes"), ("eagle", "Is it a bird?", "yes"), ("eagle", "Does it have feathers?", "yes"), ("eagle", "Does it swim?", "no"),
    ("rose", "Is it a plant?", "yes"), ("rose", "Is it an animal or a plant?", "yes"), ("rose", "Is it an animal and a plant?", "no"),
    ("rose", "Is it not an animal?", "yes"), ("rose", "Isn't it a plant?", "yes"), ("apple", "Is it a fruit?", "yes"),
    ("apple", "Is it sweet?", "yes"),
    ("car", "Does it have wheels?", "yes"), ("car", "Is it a small electronic device?", "no"), ("sock", "Do you wear it?", "yes"),
    ("cat", "Is it a dog?", "no"), ("mirror", "Is it a pair of glasses?", "no"),
    ("cat", "What is it?", None), ("cat", "Is it a quark?", None), ("cat", "Does it enjoy opera?", None),
])  # fmt: skip
def test_rule_oracle_answers_natural_questions(target: str, text: str, answer: str | None) -> None:
    assert rule_oracle(own_table())(target, text) == answer


def test_table_is_sound() -> None:
    table = own_table()
    assert 60 <= len(table.items) <= 150
    assert len(table.attributes) >= 25
    owners: dict[tuple[str, ...], str] = {}
    for name, attribute in table.attributes.items():
        assert set(attribute.of) <= set(table.attributes)
        for phrase in (*attribute.yes, *attribute.no):
            key = tuple(map(fold, words(phrase)))
            assert owners.setdefault(key, name) == name, f"{phrase!r} asks for {name} and for {owners[key]}"
    named: dict[tuple[str, ...], str] = {}
    for item in table.items.values():
        assert item.attributes <= set(table.attributes)
        for form in set().union(*map(forms, (item.name, *item.also))):
            assert named.setdefault(form, item.name) == item.name, f"{form} names {item.name} and {named[form]}"
    vectors = [item.attributes for item in table.items.values()]
    assert len(set(vectors)) == len(vectors), "two objects that no question can tell apart"
    for name in table.attributes:
        share = sum(name in vector for vector in vectors)
        assert 0 < share < len(vectors), name


class Scripted:
    """An LLM that gives these replies in turn and counts."""

    def __init__(self, *replies: str) -> None:
        self.replies, self.asked = list(replies), []  # type: ignore[var-annotated]

    def __call__(self, messages: Sequence[Message], **sampling: object) -> str:
        self.asked.append(list(messages))
        return self.replies.pop(0)


@pytest.mark.parametrize(
    ("reply", "answer"), [("Yes.", "yes"), ("no", "no"), (" **No**, it is not.", "no"), ("YES, mostly", "yes")]
)
def test_llm_oracle_reads_yes_or_no_at_the_start(reply: str, answer: str) -> None:
    llm = Scripted(reply)
    assert llm_oracle(llm, tries=1)("cat", "Is it alive?") == answer
    assert "cat" in str(llm.asked)
    assert "Is it alive?" in str(llm.asked)


def test_llm_oracle_is_asked_again_and_then_fails() -> None:
    llm = Scripted("It depends.", "Nope", "Yes")
    assert llm_oracle(llm, tries=3)("cat", "Is it alive?") == "yes"
    assert len(llm.asked) == 3
    assert llm.asked[0] != llm.asked[1]  # at temperature 0 the same prompt would get the same reply
    with pytest.raises(SimulatorError, match="said 'Nobody knows' in 2 tries"):
        llm_oracle(Scripted("Yesterday", "Nobody knows"), tries=2)("cat", "Is it alive?")


def test_llm_oracle_answers_once_per_object_and_normalised_question() -> None:
    llm = Scripted("Yes", "No", "No")
    oracle = llm_oracle(llm, tries=1)
    assert [oracle("cat", text) for text in ("Is it alive?", "is it  ALIVE", "Is it alive ?!")] == ["yes"] * 3
    assert oracle("piano", "Is it alive?") == "no"
    assert oracle("cat", "Is it old?") == "no"
    assert len(llm.asked) == 3


def test_llm_that_is_down_is_a_simulator_error() -> None:
    def down(messages: Sequence[Message], **sampling: object) -> str:
        raise EngineUnavailable("no server")

    with pytest.raises(SimulatorError, match="no server"):
        llm_oracle(down, tries=3)("cat", "Is it alive?")
