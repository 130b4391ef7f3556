"""Rows of the files that a user names: JSONL, Parquet or CSV, each with the words that say where it stands.

A row that cannot be used is one sentence with file and line, never skipped. Ours.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.frame.types import UsageError


def bad_file(path: Path, problem: str, wanted: str) -> UsageError:
    return UsageError(f"task.options: {problem} in {str(path)!r}. {wanted}")


def read_rows(path: Path, wanted: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """("line 3", row) for each row. The form is told by the name: .parquet, .csv, else one JSON object a line; blank
    lines are passed over.

    wanted: the sentence that says what the file should hold. Raises UsageError.
    """
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
        elif path.suffix == ".csv":
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                for row in reader:
                    yield f"line {reader.line_num}", dict(row)
        else:
            with path.open(encoding="utf-8") as file:
                yield from _json_rows(path, file, wanted)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise UsageError(f"task.options: cannot read {str(path)!r}: {reason}. {wanted}") from error


def _json_rows(path: Path, lines: Iterator[str], wanted: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise bad_file(path, f"line {number} is not JSON", wanted) from error
        if not isinstance(row, dict):
            raise bad_file(path, f"line {number} is no JSON object", wanted)
        yield f"line {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        batches = pq.ParquetFile(path).iter_batches()
        yield from (
            (f"row {number}", row)
            for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1)
        )
    except pa.ArrowException as error:
        raise OSError(0, "it is not a Parquet file") from error


def text_of(row: dict[str, Any], key: str, path: Path, where: str, wanted: str) -> str:
    """A field that must be a text with something in it, without the white space around it. Raises UsageError."""
    return whole_text_of(row, key, path, where, wanted).strip()


def whole_text_of(row: dict[str, Any], key: str, path: Path, where: str, wanted: str) -> str:
    """The same as it stands there: for text that somebody is to read as its author wrote it."""
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise bad_file(path, f"{where} has no text {key!r}", wanted)
    return value
