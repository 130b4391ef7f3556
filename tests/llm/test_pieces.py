"""Pieces of a privileged text, against a slow twin and by hand."""

from __future__ import annotations

import random
import re

import pytest

from stages.llm.pieces import leaked_piece
from stages.llm.roles import check_student

SECRET = "the order #W2 was shipped on Monday, so it cannot be cancelled any more"
KNOWN = "Please cancel my order #W2. I ordered on Monday, so it is new."


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("I think: it CANNOT be cancelled,\nany more.", "it cannot be cancelled any more"),
        ("so it cannot be cancelled", "so it cannot be cancelled"),
        ("it cannot be changed, nor cancelled any more", ""),
        ("my order #W2 ... ordered on Monday, so it is new", ""),
        ("the order was shipped; Monday it cannot", ""),
        ("", ""),
    ],
)
def test_the_longest_piece_of_at_least_four_words_that_is_not_known(text: str, piece: str) -> None:
    assert leaked_piece(text, ["another text", SECRET], KNOWN, words=4) == piece


def test_a_piece_that_is_known_as_a_whole_is_none_and_one_longer_is() -> None:
    assert leaked_piece(SECRET, [SECRET], SECRET, words=1) == ""
    # "on Monday, so it" is known
    assert leaked_piece("on Monday so it cannot", [SECRET], KNOWN, words=4) == "monday so it cannot"
    with pytest.raises(ValueError, match="words must be"):
        leaked_piece("x", ["x"], "", words=0)


def test_it_equals_a_loop_over_all_runs_of_all_lengths() -> None:
    rng = random.Random(0)
    found = 0
    for _ in range(400):
        text, one, known = (" ".join(rng.choices("abc", k=rng.randrange(14))) for _ in range(3))
        piece, n = leaked_piece(text, [one], known, words=3), len(text.split())
        words = text.split()

        def secret(run: list[str], one: str = one, known: str = known) -> bool:
            said = " ".join(run)
            return bool(re.search(rf"\b{said}\b", one)) and not re.search(rf"\b{said}\b", known)

        runs = [words[i:j] for i in range(n) for j in range(i + 3, n + 1)]
        leaked = [run for run in runs if all(secret(run[k : k + 3]) for k in range(len(run) - 2))]
        longest: list[str] = max(leaked, key=len) if leaked else []
        assert piece == " ".join(longest)
        found += bool(piece)
    assert 50 < found < 350


def test_a_student_prompt_with_a_part_of_an_observation_raises() -> None:
    student = f"Predict.\n{KNOWN}\nAction: cancel"
    check_student(student, student, [SECRET])
    for leak in ("it cannot be cancelled any more", "so it cannot be cancelled"):
        with pytest.raises(AssertionError, match=f"only the teacher may know: '{leak}'"):
            check_student(f"{student}\n{leak}", student, [SECRET])
    check_student(f"{student}\nit cannot be changed", student, [SECRET])
