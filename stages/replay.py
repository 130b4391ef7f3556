"""Rows of all runs: the only module that imports DuckDB.

Append-only. Every row carries the id of the run that wrote it, and a run's rows appear in one transaction together
with its row in `commits`; readers ask for the rows of given (finished) runs, so a dead run's rows are never seen.
DuckDB lets one process write at a time: a connection is opened late, closed early, and waited for with a bound.
"""

from __future__ import annotations

import errno
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.types import MissingInput, Row, TurnwiseError, UsageError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

SCHEMA_VERSION = 1

# One line a column, in the order of the table. JSON columns take any JSON value and give it back as Python objects.
TABLES: Mapping[str, Mapping[str, str]] = {
    "commits": {"run_id": "VARCHAR", "stage": "VARCHAR", "committed_at": "VARCHAR", "n_rows": "JSON"},
    "episodes": {
        "run_id": "VARCHAR",
        "episode_id": "VARCHAR",
        "iteration": "INTEGER",
        "task": "VARCHAR",
        "split": "VARCHAR",
        "scenario_id": "VARCHAR",
        "scenario": "JSON",
        "adapter": "VARCHAR",
        "outcome": "VARCHAR",
        "total_reward": "DOUBLE",
        "n_turns": "INTEGER",
        "n_malformed": "INTEGER",
        "attempts": "INTEGER",
        "seconds": "DOUBLE",
        "n_tokens": "INTEGER",
        "error": "VARCHAR",
        "messages": "JSON",
    },
    "turns": {
        "run_id": "VARCHAR",
        "episode_id": "VARCHAR",
        "turn": "INTEGER",
        "state_len": "INTEGER",
        "prompt_ids": "INTEGER[]",
        "action_ids": "INTEGER[]",
        "log_probs": "DOUBLE[]",
        "text": "VARCHAR",
        "thought": "VARCHAR",
        "action": "VARCHAR",
        "observation": "VARCHAR",
        "reward": "DOUBLE",
        "terminated": "BOOLEAN",
        "truncated": "BOOLEAN",
        "malformed": "BOOLEAN",
        "seconds": "DOUBLE",
    },
    "targets": {
        "run_id": "VARCHAR",
        "target_id": "VARCHAR",
        "role": "VARCHAR",
        "episode_id": "VARCHAR",
        "turn": "INTEGER",
        "terminal": "BOOLEAN",
        "student_ids": "INTEGER[]",
        "completion_ids": "INTEGER[]",
        "teacher_ids": "INTEGER[]",
        "student_prompt": "VARCHAR",
        "teacher_prompt": "VARCHAR",
        "raw": "VARCHAR",
        "completion": "VARCHAR",
        "weight": "DOUBLE",
        "info": "JSON",
    },
    "judgements": {
        "run_id": "VARCHAR",
        "episode_id": "VARCHAR",
        "turn": "INTEGER",
        "state_len": "INTEGER",
        "action": "VARCHAR",
        "futures": "JSON",
        "critique": "VARCHAR",
        "verdict": "VARCHAR",
        "refined": "VARCHAR",
        "info": "JSON",
    },
    "priorities": {"run_id": "VARCHAR", "episode_id": "VARCHAR", "turn": "INTEGER", "loss": "DOUBLE", "step": "INTEGER"},
}
PRODUCERS = {"episodes": "collect", "turns": "collect", "targets": "targets", "judgements": "refine", "priorities": "critic"}  # for advice only


class Replay:
    """The DuckDB file at `path`. `wait_s` bounds how long another process that holds it is waited for."""

    def __init__(self, path: Path, wait_s: float = 30.0) -> None:
        self.path = Path(path).absolute()
        self.wait_s = wait_s

    def commit(self, run_id: str, stage: str, tables: Mapping[str, Sequence[Row]]) -> None:
        """Write all rows of a run and its row in `commits`, or nothing. Raises ValueError if the run has committed before."""
        batches = {table: _arrow(table, run_id, rows) for table, rows in tables.items() if rows}
        n_rows = {table: len(rows) for table, rows in tables.items()}
        with self._open(write=True) as connection:
            if connection.execute("select 1 from commits where run_id = ?", [run_id]).fetchone():
                raise ValueError(f"run {run_id} has committed its rows to {self.path} before; nothing was written")
            connection.execute("begin")
            for table, batch in batches.items():
                connection.register("incoming", batch)
                connection.execute(f"insert into {table} select * from incoming")
                connection.unregister("incoming")
            connection.execute("insert into commits values (?, ?, ?, ?)", [run_id, stage, datetime.now(UTC).isoformat(), json.dumps(n_rows)])
            connection.execute("commit")

    def rows(self, table: str, run_ids: Sequence[str], *, where: str = "") -> list[Row]:
        """All rows that these runs wrote to `table`: run by run as named, within a run in the order written.

        where: an SQL condition on the columns. Raises MissingInput for a run that never committed (a run that committed
        no row to this table is no error).
        """
        columns = _columns(table)
        if not run_ids:
            return []
        with self._open_for(table, run_ids) as connection:
            found = connection.execute(*_selection(table, run_ids, where)).fetchall()
        rows = [dict(zip(columns, values, strict=True)) for values in found]
        for name in (name for name, kind in columns.items() if kind == "JSON"):
            for row in rows:
                row[name] = None if row[name] is None else json.loads(row[name])
        return rows

    def count(self, table: str, run_ids: Sequence[str]) -> int:
        """Rows that these runs committed to `table`; 0 for a run that never committed."""
        _columns(table)
        if not run_ids or not self.path.exists():
            return 0
        with self._open(write=False) as connection:
            found = connection.execute(f"select count(*) from {table} where list_contains(?, run_id)", [list(run_ids)]).fetchone()
        return int(found[0]) if found else 0

    def export(self, run_ids: Sequence[str], folder: Path) -> list[Path]:
        """One Parquet file a table that these runs wrote rows to. JSON columns stay JSON text."""
        folder.mkdir(parents=True, exist_ok=True)
        with self._open_for("commits", run_ids) as connection:
            batches = {table: connection.execute(*_selection(table, run_ids, "")).to_arrow_table() for table in TABLES}
        return [_write_parquet(batch, folder / f"{table}.parquet") for table, batch in batches.items() if batch.num_rows]

    def verify(self, finished_run_ids: Sequence[str]) -> list[str]:
        """Run ids that have rows but are not among the finished runs: left by a kill between the commit and the run's end."""
        if not self.path.exists():
            return []
        every = " union ".join(f"select run_id from {table}" for table in TABLES)
        with self._open(write=False) as connection:
            found = connection.execute(f"select run_id from ({every}) order by run_id").fetchall()
        finished = set(finished_run_ids)
        return [run_id for (run_id,) in found if run_id not in finished]

    def find_episode(self, prefix: str, is_finished: Callable[[str], bool] = lambda run_id: True) -> Row:
        """The episode whose id starts with `prefix`; of several runs that wrote it, the newest that `is_finished` accepts.

        Raises UsageError where there is none, or where the prefix fits several ids.
        """
        found: list[tuple[str, str]] = []
        if prefix and self.path.exists():
            with self._open(write=False) as connection:
                found = connection.execute("select episode_id, run_id from episodes where starts_with(episode_id, ?) order by rowid desc", [prefix]).fetchall()
        finished = {run_id for run_id in {run_id for _, run_id in found} if is_finished(run_id)}
        newest: dict[str, str] = {}
        for episode_id, run_id in found:
            if run_id in finished:
                newest.setdefault(episode_id, run_id)
        if not newest:
            raise UsageError(f"no episode starts with {prefix!r} in {self.path}. See: turnwise show RUN")
        if len(newest) > 1:
            raise UsageError(f"{prefix!r} is the start of {len(newest)} episodes ({', '.join(list(newest)[:3])}, ...): give more characters")
        ((episode_id, run_id),) = newest.items()
        return next(row for row in self.rows("episodes", [run_id]) if row["episode_id"] == episode_id)

    @contextmanager
    def _open_for(self, table: str, run_ids: Sequence[str]) -> Iterator[DuckDBPyConnection]:
        """A connection for reading, once every run is known to have committed."""
        missing = list(run_ids)
        if self.path.exists():
            with self._open(write=False) as connection:
                known = {run_id for (run_id,) in connection.execute("select run_id from commits where list_contains(?, run_id)", [list(run_ids)]).fetchall()}
                missing = [run_id for run_id in run_ids if run_id not in known]
                if not missing:
                    yield connection
                    return
        advice = f"turnwise rerun {PRODUCERS[table]} --of {missing[0]}" if table in PRODUCERS else "turnwise runs"
        raise MissingInput(f"rows of {table} were wanted from run {missing[0]}, but it never committed any to {self.path}. Run: {advice}")

    @contextmanager
    def _open(self, *, write: bool) -> Iterator[DuckDBPyConnection]:
        import duckdb

        try:
            connection = self._connect(write)
            try:
                _check_schema(connection, self.path, create=write)
                yield connection
            finally:
                connection.close()  # an open transaction is rolled back
        except (duckdb.Error, OSError) as error:
            raise _sentence(error, self.path) from error

    def _connect(self, write: bool) -> DuckDBPyConnection:
        """Open the file, waiting 20 ms and then longer while another process, or another mode of this one, holds it."""
        import duckdb

        self.path.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self.wait_s
        pause_s = 0.02
        while True:
            try:
                return duckdb.connect(str(self.path), read_only=not write)
            except (duckdb.IOException, duckdb.ConnectionException) as error:
                held = "lock" in str(error) or "different configuration" in str(error)
                if not held or time.monotonic() + pause_s > deadline:
                    raise
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.2)


def write_parquet(run_id: str, tables: Mapping[str, Sequence[Row]], folder: Path) -> list[Path]:
    """The rows that a run is about to commit, one Parquet file a table that has any."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_write_parquet(_arrow(table, run_id, rows), folder / f"{table}.parquet") for table, rows in tables.items() if rows]


def _columns(table: str) -> Mapping[str, str]:
    if table not in TABLES:
        raise ValueError(f"no table {table!r} in the replay; there are {', '.join(TABLES)}")
    return TABLES[table]


def _selection(table: str, run_ids: Sequence[str], where: str) -> tuple[str, list[list[str]]]:
    columns = ", ".join(f'"{name}"' for name in _columns(table))
    runs = list(dict.fromkeys(run_ids))
    condition = f" and ({where})" if where else ""
    return f"select {columns} from {table} where list_contains($1, run_id){condition} order by list_position($1, run_id), rowid", [runs]


def _arrow(table: str, run_id: str, rows: Sequence[Row]) -> Any:
    """Rows as an Arrow table with exactly the columns of `table`: DuckDB takes it whole, and no float is rounded."""
    import pyarrow as pa

    types = {
        "VARCHAR": pa.string(),
        "JSON": pa.string(),
        "INTEGER": pa.int32(),
        "DOUBLE": pa.float64(),
        "BOOLEAN": pa.bool_(),
        "INTEGER[]": pa.list_(pa.int32()),
        "DOUBLE[]": pa.list_(pa.float64()),
    }
    columns = _columns(table)
    for row in rows:
        odd = row.keys() ^ columns.keys() - {"run_id"} if "run_id" not in row else row.keys() ^ columns.keys()
        if odd:
            raise ValueError(f"a row of {table} must have exactly the columns {', '.join(columns)}; missing or unknown: {', '.join(sorted(odd))}")
    arrays = [pa.array([run_id] * len(rows), pa.string())]
    for name, kind in list(columns.items())[1:]:
        values = [row[name] for row in rows]
        if kind == "JSON":
            values = [json.dumps(value, ensure_ascii=False, allow_nan=False) for value in values]
        try:
            arrays.append(pa.array(values, types[kind]))
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise ValueError(f"column {name} of {table} must be {kind}: {error}") from error
    return pa.Table.from_arrays(arrays, names=list(columns))


def _write_parquet(batch: Any, path: Path) -> Path:
    import pyarrow.parquet as pq

    unfinished = path.with_suffix(".part")
    try:
        pq.write_table(batch, unfinished, compression="zstd")
    except OSError as error:
        raise _sentence(error, path) from error
    return unfinished.replace(path)


def _check_schema(connection: DuckDBPyConnection, path: Path, *, create: bool) -> None:
    known = connection.execute("select 1 from duckdb_tables() where table_name = 'schema_version'").fetchone()
    if known:
        version = connection.execute("select max(version) from schema_version").fetchone()
        if version and version[0] > SCHEMA_VERSION:
            raise UsageError(f"the replay {path} has schema {version[0]}, and this turnwise reads up to {SCHEMA_VERSION}. Update turnwise, or use another folder")
    elif create:
        ddl = [f"create table {table} ({', '.join(f'{name!r} {kind}' for name, kind in columns.items())})".replace("'", '"') for table, columns in TABLES.items()]
        connection.execute(";".join(["begin", *ddl, "create table schema_version (version INTEGER)", f"insert into schema_version values ({SCHEMA_VERSION})", "commit"]))


def _sentence(error: Exception, path: Path) -> Exception:
    """The error as one sentence where the disk, the file or a lock is the cause; otherwise the error itself."""
    text = str(error)
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or re.search(r"No space left|File too large|quota exceeded|disk is full", text, re.IGNORECASE):
        return TurnwiseError(f"{path} could not be written: the disk is full. Free some space and run the same command again; nothing was half-written")
    if "onflicting lock" in text:
        holder = re.search(r"held in (.*?PID \d+\))", text)
        return TurnwiseError(f"the replay {path} was wanted, but {holder[1] if holder else 'another process'} holds it. Wait for it or stop it, then run the same command again")
    if re.search(r"not a valid DuckDB|[Cc]orrupt|checksum|[Ss]erializ", text):
        return TurnwiseError(f"the replay {path} was wanted, but the file is damaged ({text.splitlines()[0][:120]}). Restore it, or move it away and start again")
    return error
