"""What is compared, and how: a difference above 1e-6 is one wherever it stands, and rounding is none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from flows.keep.recompute import compare

CASES: list[tuple[Any, Any, str]] = [
    (1.0, 1.0 + 9e-7, ""),
    (1.0, 1.0 + 2e-6, "x"),
    (1e6, 1e6 + 0.5, ""),
    (1e6, 1e6 + 2.0, "x"),
    (0.0, 2e-6, "x"),
    (float("nan"), float("nan"), ""),
    (float("nan"), 0.0, "x"),
    (None, 0.0, "x"),
    (True, 1.0, ""),
    ("a", "b", "x"),
    ([1, 2], [1, 2, 3], "length of x"),
    ([1, [2, 3.0]], [1, [2, 4.0]], "x[1][1]"),
    ({"a": 1, "b": 2}, {"a": 1}, "x.b"),
    ({"a": {"b": 1}}, {"a": {"b": 2}}, "x.a.b"),
]


@pytest.mark.parametrize(("stored", "found", "where"), CASES)
def test_a_difference_is_found_where_it_stands(stored: Any, found: Any, where: str) -> None:
    assert [one.where for one in compare.compare("x", stored, found).differences] == ([where] if where else [])


def test_a_row_is_named_by_its_number_and_its_turn() -> None:
    rows = [{"episode_id": "e", "turn": i, "loss": 0.5, "seconds": 1.0} for i in range(3)]
    other = [{**row, "seconds": 9.0} for row in rows]
    assert not compare.rows("priorities", rows, other).differences
    other[2]["loss"] = 0.6
    (found,) = compare.rows("priorities", rows, other).differences
    assert (found.where, found.stored, found.recomputed) == ("priorities row 2 (e turn 2), loss", "0.5", "0.6")
    (found,) = compare.rows("priorities", rows, other[:2]).differences
    assert (found.where, found.stored, found.recomputed) == ("rows of priorities", "3", "2")


def test_a_weight_is_found_by_its_name_and_place(tmp_path: Path) -> None:
    old, new = tmp_path / "old" / "adapter", tmp_path / "new" / "adapter"
    for folder, value in ((old, 0.5), (new, 0.5 + 3e-6)):
        folder.mkdir(parents=True)
        save_file({"a": torch.zeros(2, 2), "b": torch.tensor([0.5, 0.5, value])}, folder / "w.safetensors")
        (folder / "config.json").write_text(json.dumps({"modules": ["q", "v"] if value == 0.5 else ["v", "q"]}))
    (found,) = compare.files("adapter", old, new).differences
    assert found.where == "adapter/w.safetensors: b[2]"
    assert compare.files("adapter", old, old).names == {"adapter/w.safetensors", "adapter/config.json"}
    (old / "w.safetensors").unlink()
    assert [one.where for one in compare.files("adapter", old, new).differences] == ["adapter/w.safetensors"]


def test_a_table_is_compared_by_its_values(tmp_path: Path) -> None:
    for name, value in (("old", 1.0), ("new", 1.1)):
        pq.write_table(pa.table({"advantage": [0.0, value]}), tmp_path / f"{name}.parquet")
    (found,) = compare.files("ledger.parquet", tmp_path / "old.parquet", tmp_path / "new.parquet").differences
    assert found.where == "ledger.parquet.advantage[1]"


def test_times_are_no_metrics_of_a_replay_and_a_missing_metric_is_a_difference() -> None:
    assert not compare.metrics({"a": 1.0, "run_s": 2.0}, {"a": 1.0, "run_s": 3.0}).differences
    assert [one.where for one in compare.metrics({}, {"a": 1.0}).differences] == ["metric a"]


def test_a_reply_is_its_ids_with_or_without_the_token_that_ended_it() -> None:
    def decode(ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    text = [("turn 0", "no", (110, 111)), ("turn 1", "no", (110, 111, 0)), ("turn 2", "made by hand", ())]
    assert compare.replies(text, decode) == compare.Compared(2, what=("2 replies",))
    (found,) = compare.replies([("turn 0", "no", (110, 112))], decode).differences
    assert (found.where, found.recomputed) == ("turn 0: text of its ids", "'np'")
