"""Stored rows, and a file of general rows, as training rows."""

from __future__ import annotations

import json
from pathlib import Path

import models
import pytest

from stages.frame.types import UsageError
from stages.train.rows import TrainRow, general_rows, target_rows


def test_target_rows_are_the_student_s_prompt_and_never_the_teacher_s() -> None:
    rows = [models.successor_row(f"e{i}", f"prompt {i}", f"reply {i}", weight=0.1 * i, turn=i) for i in range(3)]
    for i, (row, found) in enumerate(zip(rows, target_rows(rows), strict=True)):
        assert found == TrainRow(tuple(row["student_ids"]), tuple(row["completion_ids"]), 0.1 * i, (f"e{i}", i))


def test_general_rows_are_the_file_s_text_and_end_with_the_end_token(base: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    row = {"role": "evaluator", "messages": [{"role": "user", "content": "Judge. w1"}], "reply": "Optimality: No. w2"}
    file = tmp_path / "general.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps(row | {"role": "policy", "reply": "w3"}) + "\n")
    first, second = general_rows(str(base), str(file))
    assert tokenizer.decode(first.completion_ids) == "Optimality: No. w2 <|end|>"
    assert first.completion_ids[-1] == second.completion_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(first.prompt_ids) == "<|user|> Judge. w1 <|assistant|>"
    assert (first.key, second.key) == (("general", "evaluator"), ("general", "policy"))


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"role": "x", "messages": []}', "3", '{"role": "x", "messages": 3, "reply": ""}']
)
def test_a_broken_line_of_general_rows_is_named(base: Path, tmp_path: Path, line: str) -> None:
    good = json.dumps({"role": "x", "messages": [], "reply": "y"})
    (tmp_path / "general.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(
        UsageError, match=r"general.jsonl, line 2: wanted an object with role, messages and reply"
    ) as caught:
        general_rows(str(base), str(tmp_path / "general.jsonl"))
    assert "\n" not in str(caught.value)


def test_a_missing_file_of_general_rows_is_one_sentence(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="found none; make it with: turnwise pretrain"):
        general_rows(str(base), str(tmp_path / "none.jsonl"))
