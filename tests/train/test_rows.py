"""Stored rows, and a file of general rows, as training rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stages.frame.types import UsageError
from stages.train.rows import TrainRow, general_rows, read_jsonl, target_rows


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


MESSAGES = '"messages": [{"role": "user", "content": "w1"}]'
BROKEN = [
    "{", "[]", "3", "null", '{"role": "x", "messages": []}', '{"role": "x", "messages": 3, "reply": ""}', "[" * 100_000, "1" * 5_000, "\ufeff{}",
    f'{{"role": "x", {MESSAGES}, "reply": null}}', f'{{"role": "x", {MESSAGES}, "reply": 3}}', f'{{"role": null, {MESSAGES}, "reply": "y"}}',
    f'{{"role": "x", {MESSAGES}, "reply": "\\ud800"}}', '{"role": "x", "messages": [], "reply": "y"}', '{"role": "x", "messages": [[]], "reply": "y"}',
    '{"role": "x", "messages": {"role": "user"}, "reply": "y"}', '{"role": "x", "messages": [{"role": "user", "content": null}], "reply": "y"}',
]  # fmt: skip


@pytest.mark.parametrize("line", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_line_of_general_rows_is_named(base: Path, tmp_path: Path, line: str) -> None:
    good = json.dumps({"role": "x", "messages": [{"role": "user", "content": "w1"}], "reply": "y"})
    (tmp_path / "general.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(
        UsageError, match=r"general.jsonl, line 2: wanted an object with role, messages and reply"
    ) as caught:
        general_rows(str(base), str(tmp_path / "general.jsonl"))
    assert "\n" not in str(caught.value)


def test_a_missing_file_of_general_rows_is_one_sentence(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="found none; make it with: turnwise pretrain"):
        general_rows(str(base), str(tmp_path / "none.jsonl"))


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_another_encoding_is_one_sentence_with_file_and_line(tmp_path: Path, encoding: str) -> None:
    line = '{"role": "x", "messages": [{"role": "user", "content": "w1"}], "reply": "\xe9"}\n'
    (tmp_path / "general.jsonl").write_text(line, encoding=encoding)
    with pytest.raises(UsageError, match=r"^general.jsonl, line 1: wanted .*'utf-8' codec can't decode byte"):
        read_jsonl(str(tmp_path / "general.jsonl"))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "general.jsonl").write_text(content)
    with pytest.raises(UsageError, match=r"^general.jsonl has no rows"):
        read_jsonl(str(tmp_path / "general.jsonl"))


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "role": st.text(),
                "messages": st.lists(
                    st.fixed_dictionaries({"role": st.text(), "content": st.text()}), min_size=1, max_size=3
                ),
                "reply": st.text(),
            }
        ),
        min_size=1,
        max_size=4,
    ),
    ascii=st.booleans(),
)
@example(
    rows=[{"role": "x", "messages": [{"role": "u", "content": "a\u2028b\x85c\x0cd"}], "reply": "\r\u2029"}], ascii=False
)
@settings(max_examples=50, deadline=None)
def test_rows_of_any_text_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], ascii: bool
) -> None:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_bytes("".join(json.dumps(row, ensure_ascii=ascii) + "\n" for row in rows).encode())
    assert read_jsonl(str(file)) == rows


@given(
    content=st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from(["role", "messages", "reply", "content"]), inner)
        ),
        max_leaves=12,
    ).map(lambda value: json.dumps(value).encode())
)
@settings(max_examples=150, deadline=None)
def test_any_other_content_is_one_sentence(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"^rows.jsonl(, line \d+: wanted| has no rows)") as caught:
        read_jsonl(str(file))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400
