"""Tables of the replay, and rows as Arrow and Parquet.

Rows pass to DuckDB and to Parquet in whole batches, one Arrow table for each replay table. Ids are 32-bit integers,
log-probs Python's 64-bit floats. So both give back exactly what an engine produced.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from stages.frame.types import Row
from stages.store.machine import first_line, whole

SCHEMA_VERSION = 2  # 2: certificates


def _columns(text: str) -> dict[str, str]:
    """Column -> type, from SQL as in `create table`, behind the id of the run that wrote the row."""
    return dict(column.split() for column in f"run_id VARCHAR, {text}".split(", "))


# Columns in the order of the table. JSON columns take any JSON value and give it back as Python objects.
TABLES: Mapping[str, Mapping[str, str]] = {
    "commits": _columns("stage VARCHAR, committed_at VARCHAR, n_rows JSON"),
    "episodes": _columns(
        "episode_id VARCHAR, iteration INTEGER, task VARCHAR, split VARCHAR, scenario_id VARCHAR, scenario JSON, "
        "adapter VARCHAR, outcome VARCHAR, total_reward DOUBLE, n_turns INTEGER, n_malformed INTEGER, "
        "attempts INTEGER, seconds DOUBLE, n_tokens INTEGER, error VARCHAR, messages JSON"
    ),
    "turns": _columns(
        "episode_id VARCHAR, turn INTEGER, state_len INTEGER, prompt_ids INTEGER[], action_ids INTEGER[], "
        "log_probs DOUBLE[], text VARCHAR, thought VARCHAR, action VARCHAR, observation VARCHAR, reward DOUBLE, "
        "terminated BOOLEAN, truncated BOOLEAN, malformed BOOLEAN, seconds DOUBLE"
    ),
    "targets": _columns(
        "target_id VARCHAR, role VARCHAR, episode_id VARCHAR, turn INTEGER, terminal BOOLEAN, student_ids INTEGER[], "
        "completion_ids INTEGER[], teacher_ids INTEGER[], student_prompt VARCHAR, teacher_prompt VARCHAR, raw VARCHAR, "
        "completion VARCHAR, weight DOUBLE, info JSON"
    ),
    "judgements": _columns(
        "episode_id VARCHAR, turn INTEGER, state_len INTEGER, action VARCHAR, futures JSON, critique VARCHAR, "
        "verdict VARCHAR, refined VARCHAR, info JSON"
    ),
    "priorities": _columns("episode_id VARCHAR, turn INTEGER, loss DOUBLE, step INTEGER"),
    "certificates": _columns(
        "episode_id VARCHAR, turn INTEGER, extended BOOLEAN, position INTEGER, produced VARCHAR[], rendered VARCHAR[], "
        "gap_mean DOUBLE, gap_max DOUBLE"
    ),
}
ARRAYS = {"INTEGER[]": "i", "DOUBLE[]": "d"}
"""Types that a stage reads as `array.array`. Unlike a numpy array it is compared, iterated and tested for being empty
as a list is, and its elements are Python's own numbers.
"""

# Who writes a table first, for the advice in an error.
PRODUCERS = {
    "episodes": "collect",
    "turns": "collect",
    "targets": "targets",
    "judgements": "refine",
    "priorities": "critic",
}


def columns_of(table: str, names: Sequence[str] = ()) -> Mapping[str, str]:
    """Column -> type. Raises ValueError for an unknown table, and for a name that is none of its columns."""
    if table not in TABLES:
        raise ValueError(f"no table {table!r} in the replay; there are {', '.join(TABLES)}")
    if odd := [name for name in names if name not in TABLES[table]]:
        raise ValueError(f"no column {odd[0]!r} in table {table}; there are {', '.join(TABLES[table])}")
    return TABLES[table]


def schema_sql() -> str:
    """Statements, one transaction, that make a replay, or give an older one the tables that it lacks."""
    known = {**TABLES, "schema_version": {"version": "INTEGER"}}
    tables = [
        f"create table if not exists {table} ({', '.join(f'{name} {kind}' for name, kind in columns.items())})"
        for table, columns in known.items()
    ]
    return ";".join(["begin", *tables, f"insert into schema_version values ({SCHEMA_VERSION})", "commit"])


def arrow(table: str, run_id: str, rows: Sequence[Row]) -> Any:
    """Rows as an Arrow table with exactly the columns of `table`; their own run_id, if any, is replaced.

    Raises ValueError where a row lacks a column, has an unknown one, or a value does not fit without loss.
    """
    import pyarrow as pa

    columns = columns_of(table)
    for row in rows:
        if odd := (row.keys() | {"run_id"}) ^ columns.keys():
            raise ValueError(
                f"a row of {table} must have exactly the columns {', '.join(columns)}; missing or unknown: {', '.join(sorted(odd))}"
            )
    arrays = [pa.array([run_id] * len(rows), pa.string())]
    for name, kind in list(columns.items())[1:]:
        values = [row[name] for row in rows]
        try:
            if kind == "JSON":
                values = [json.dumps(value, ensure_ascii=False, allow_nan=False) for value in values]
            arrays.append(_column(values, kind))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"column {name} of {table} must be {kind}: {error}") from error
    return pa.Table.from_arrays(arrays, names=list(columns))


def _column(values: list[Any], kind: str) -> Any:
    """Raises where a value does not fit without loss."""
    import pyarrow as pa

    if kind in ARRAYS:
        try:
            return _joined(values, ARRAYS[kind], _arrow_type(kind))
        except (TypeError, OverflowError):  # Arrow takes what may be missing, and says of the rest what it is
            pass
    # Asked for integers at once, Arrow would cut 1.5 down to 1; its cast refuses.
    wanted = _arrow_type(kind)
    return pa.array(values).cast(wanted) if kind.startswith("INTEGER") else pa.array(values, wanted)


def _joined(values: Sequence[Sequence[Any]], letter: str, kind: Any) -> Any:
    """Lists of numbers as one array and where each begins: a third of the time that Arrow takes for Python's lists."""
    import pyarrow as pa

    joined, edges = array(letter), array("i", [0])
    for one in values:
        joined.extend(array(letter, one))
        edges.append(len(joined))
    offsets, flat = (
        pa.Array.from_buffers(t, len(a), [None, pa.py_buffer(a)])
        for t, a in ((pa.int32(), edges), (kind.value_type, joined))
    )
    return pa.ListArray.from_arrays(offsets, flat)


def compact(batch: Any, columns: Sequence[str], kinds: Mapping[str, str]) -> list[Row]:
    """Rows of an Arrow batch; lists of numbers as `array.array`, JSON as Python objects."""
    values = {}
    for name in columns:
        column, kind = batch.column(name), kinds[name]
        if kind in ARRAYS:
            values[name] = _arrays(column, ARRAYS[kind])
        else:
            values[name] = [json.loads(one) for one in column.to_pylist()] if kind == "JSON" else column.to_pylist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*values.values(), strict=True)]


def _arrays(column: Any, letter: str) -> list[Any]:
    """Each list as an array; what is missing, or holds something missing, as Python has it."""
    numbers = column.values
    if column.null_count or numbers.null_count:
        return [one if one is None or None in one else array(letter, one) for one in column.to_pylist()]
    flat, edges = memoryview(numbers.to_numpy(zero_copy_only=True)), column.offsets.to_pylist()
    return [array(letter, flat[start:end].tobytes()) for start, end in pairwise(edges)]


def write_parquet(batch: Any, path: Path) -> Path:
    """Write an Arrow table; the file appears whole or not at all. Raises TurnwiseError on a full disk."""
    import pyarrow.parquet as pq

    with whole(path) as file:
        pq.write_table(batch, file, compression="zstd")
    return path


def read_batch(path: Path, table: str) -> Any:
    """A file of `export_rows` as an Arrow table. Raises ValueError for another file, and for other columns or types."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = columns_of(table)
    try:
        batch = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"it is no Parquet file ({first_line(error)})") from error
    if (found := batch.schema.names) != list(kinds):
        raise ValueError(f"columns {', '.join(kinds)} were wanted, found {', '.join(found)[:200]}")
    for name, kind in kinds.items():
        if (odd := batch.schema.field(name).type) != _arrow_type(kind):
            raise ValueError(f"column {name} must be {kind}, found {odd}")
    return batch


def read_parquet(path: Path, table: str) -> list[Row]:
    """Its rows, without the run's id. Raises as `read_batch` does."""
    kinds, batch = columns_of(table), read_batch(path, table)
    columns = {name: batch.column(name).to_pylist() for name in kinds if name != "run_id"}
    for name in (name for name in columns if kinds[name] == "JSON"):
        columns[name] = [json.loads(one) for one in columns[name]]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def export_rows(run_id: str, tables: Mapping[str, Sequence[Row]], folder: Path) -> list[Path]:
    """The rows that a run is about to commit: one Parquet file a table that has any."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        write_parquet(arrow(table, run_id, rows), folder / f"{table}.parquet") for table, rows in tables.items() if rows
    ]


def _arrow_type(kind: str) -> Any:
    import pyarrow as pa

    scalars = {
        "VARCHAR": pa.string(),
        "JSON": pa.string(),
        "INTEGER": pa.int32(),
        "DOUBLE": pa.float64(),
        "BOOLEAN": pa.bool_(),
    }
    return pa.list_(scalars[kind.removesuffix("[]")]) if kind.endswith("[]") else scalars[kind]
