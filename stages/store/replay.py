"""Rows of all runs, in DuckDB.

Append-only. Every row carries the id of the run that wrote it. A run's rows appear in one transaction, together with
its row in `commits`. Readers ask for the rows of finished runs, so they never see a dead run's rows. DuckDB lets one
process write at a time. So the file is opened late, closed early, and waited for (duckdb_file.py).

The file is an index that can be made again: a run's artifacts keep its rows, too. A reader that lacks the rows of a
finished run takes them in from there (kept_rows.py), in one transaction as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.frame.signals import signals_held
from stages.frame.types import MissingInput, Row, UsageError
from stages.store.commits import Commit, Source
from stages.store.duckdb_file import let_go, opened, replaced
from stages.store.machine import first_line
from stages.store.tables import PRODUCERS, TABLES, arrow, columns_of, compact, write_parquet

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

IMPOSSIBLE = (
    ("turns", "not coalesce(isfinite(reward), false)", "with a reward that is no finite number"),
    ("turns", "terminated and truncated", "both terminated and truncated"),
    ("episodes", "not coalesce(isfinite(total_reward), false)", "with a total reward that is no finite number"),
)
"""(table, condition, what it means) of rows that no environment may leave; until 2026-11-27 some could."""
AT_ONCE = 10_000  # rows that are taken in in one transaction, and some more
PIECE = 2048  # rows that DuckDB hands over at a time, the fewest that it can


class Replay:
    """The DuckDB file at `path`. `wait_s` bounds how long another process that holds it is waited for. source: where the
    rows of runs are that the file lacks.
    """

    def __init__(self, path: Path, wait_s: float = 30.0, source: Source | None = None) -> None:
        self.path = Path(path).absolute()
        self.wait_s = wait_s
        self.source = source

    def check(self) -> None:
        """Say what is wrong with the file, before work is done whose rows could not be written to it."""
        if self.path.exists():
            with self._open(write=False):
                pass

    def commit(self, run_id: str, stage: str, tables: Mapping[str, Sequence[Row]]) -> None:
        """Write all rows of a run and its row in `commits`, or nothing. Raises ValueError where it has before."""
        batches = {table: arrow(table, run_id, rows) for table, rows in tables.items() if rows}
        n_rows = {table: len(rows) for table, rows in tables.items()}
        if not self._put({run_id: Commit(stage, datetime.now(UTC).isoformat(), n_rows, batches)}):
            raise ValueError(f"run {run_id} has committed its rows to {self.path} before; nothing was written")

    def _put(self, commits: Mapping[str, Commit]) -> list[str]:
        """Write them in one transaction; which of them are new. A run that has committed before is left as it is."""
        with self._open(write=True) as connection:  # nobody else has the file meanwhile
            query = "select run_id from commits where list_contains(?, run_id)"
            known = connection.execute(query, [list(commits)]).fetchall()
            new = [run_id for run_id in commits if (run_id,) not in known]
            connection.execute("begin")
            for run_id, one in ((run_id, commits[run_id]) for run_id in new):
                with signals_held():  # while DuckDB asks Python for the rows
                    for table, batch in one.batches.items():
                        connection.register("incoming", batch)
                        connection.execute(f"insert into {table} select * from incoming")
                        connection.unregister("incoming")
                row = [run_id, one.stage, one.committed_at, json.dumps(one.n_rows)]
                connection.execute("insert into commits values (?, ?, ?, ?)", row)
            connection.execute("commit")
        return new

    def fetch(self, run_ids: Sequence[str]) -> bool:
        """Take in the rows of finished runs that the file lacks; False where one of the runs is not finished.

        Raises MissingInput where rows are damaged or gone.
        """
        wanted, found, n, n_rows = dict.fromkeys(run_ids), dict[str, Commit](), 0, 0
        for run_id in wanted:
            if self.source and (one := self.source.commit_of(run_id)):
                found[run_id] = one
                n, n_rows = n + 1, n_rows + sum(one.n_rows.values())
            if n_rows >= AT_ONCE:
                self._put(found)
                found, n_rows = {}, 0
        if found:
            self._put(found)  # but those that another process has taken in meanwhile
        return n == len(wanted)

    def lacking(self) -> list[str]:
        """Finished runs whose rows are not in the file, oldest first."""
        finished = self.source.finished() if self.source else ()
        if not finished or not self.path.exists():
            return list(finished)
        with self._open(write=False) as connection:
            known = {run_id for (run_id,) in connection.execute("select run_id from commits").fetchall()}
        return [run_id for run_id in finished if run_id not in known]

    @contextmanager
    def made_again(self) -> Iterator[Replay]:
        """An empty replay beside this one; its file takes the place of this one's at the end, and not before."""
        with replaced(self.path, self.wait_s) as path:
            yield Replay(path, self.wait_s, self.source)

    def copy(self, run_id: str, to: Replay) -> bool:
        """Give a run's rows to another replay; False where they are not here."""
        with self._open(write=False) as connection:
            query = "select stage, committed_at, n_rows from commits where run_id = ?"
            if not (found := connection.execute(query, [run_id]).fetchall()):
                return False
            batches = {
                table: connection.sql(query, params=values).to_arrow_table()
                for table in TABLES.keys() - {"commits"}
                for query, values in [_selection(table, [run_id], "")]
            }
        ((stage, committed_at, n_rows),) = found
        return bool(to._put({run_id: Commit(stage, committed_at, json.loads(n_rows), batches)}))

    def rows(self, table: str, run_ids: Sequence[str], *, where: str = "") -> list[Row]:
        """All rows that these runs wrote to `table`, complete, for people to look at. Order: runs as named, within a
        run as written. A stage reads by `read`.

        where: an SQL condition on the columns. Raises MissingInput for a run that never committed.
        """
        columns = columns_of(table)
        if not run_ids:
            return []
        with self._open_for(table, run_ids) as connection:
            found = connection.execute(*_selection(table, run_ids, where)).fetchall()
        rows = [dict(zip(columns, values, strict=True)) for values in found]
        for name in (name for name, kind in columns.items() if kind == "JSON"):
            for row in rows:
                row[name] = json.loads(row[name])
        return rows

    def read(
        self,
        table: str,
        run_ids: Sequence[str],
        columns: Sequence[str],
        *,
        by: Sequence[str] = (),
        among: Collection[tuple[Any, ...]] = (),
    ) -> list[Row]:
        """As `contract.Reader` says: the columns that are named, and nothing else is read from the file."""
        kinds = columns_of(table, [*columns, *by])
        runs = list(dict.fromkeys(run_ids))
        if not runs or (by and not among):
            return []
        rows: list[Row] = []
        with self._open_for(table, runs) as connection:
            for run_id in runs:
                query, values = _narrow(table, columns, run_id, by, among)
                found: list[tuple[int, Row]] = []
                # In pieces, so that the rows are never there twice; sorted here, since DuckDB sorts whole rows.
                for batch in connection.sql(query, params=values).to_arrow_reader(PIECE):
                    found += zip(batch.column(0).to_pylist(), compact(batch, columns, kinds), strict=True)
                rows += [row for _, row in sorted(found, key=lambda one: one[0])]
        return rows

    def count(self, table: str, run_ids: Sequence[str]) -> int:
        """Rows that these runs committed to `table`; 0 for a run that never committed."""
        columns_of(table)
        runs, known, n = list(dict.fromkeys(run_ids)), set[str](), 0
        if runs and self.path.exists():
            committed = "select list(run_id) from commits where list_contains($1, run_id)"
            query = f"select count(*), ({committed}) from {table} where list_contains($1, run_id)"
            with self._open(write=False) as connection:
                ((n, found),) = connection.execute(query, [runs]).fetchall()
            known = set(found or ())
        fetched = [run_id for run_id in runs if run_id not in known and self.fetch([run_id])]
        return int(n) + (self.count(table, fetched) if fetched else 0)

    def export(self, run_ids: Sequence[str], folder: Path) -> list[Path]:
        """One Parquet file a table that these runs wrote rows to. JSON columns stay JSON text."""
        folder.mkdir(parents=True, exist_ok=True)
        batches = {}
        with self._open_for("commits", run_ids) as connection:
            for table in TABLES:
                query, parameters = _selection(table, run_ids, "")
                batches[table] = connection.sql(query, params=parameters).to_arrow_table()
        return [write_parquet(batch, folder / f"{table}.parquet") for table, batch in batches.items() if batch.num_rows]

    def query(self, sql: str, relations: Mapping[str, Any]) -> Any:
        """What a person asks in SQL, as an Arrow table; reads only. relations: tables beside the file's own, by name.

        Raises UsageError for SQL that DuckDB cannot run, with what it says.
        """
        import duckdb

        self.fetch(self.lacking())
        with self._open(write=False) as connection:
            for name, table in relations.items():
                connection.register(name, table)
            connection.execute("set enable_external_access = false")  # `copy ... to` would write a file
            try:
                if (found := connection.sql(sql)) is None:
                    raise UsageError("sql: wanted a query that answers with rows, such as one that begins with select.")
                rows = found.to_arrow_table()
            except (
                duckdb.ProgrammingError,
                duckdb.DataError,
                duckdb.NotSupportedError,
                duckdb.PermissionException,
            ) as error:
                raise UsageError(f"sql: {first_line(error)}") from None
        let_go()  # what was set holds for all that this DuckDB is asked later
        return rows

    def verify(self, finished_run_ids: Sequence[str]) -> list[str]:
        """Run ids with rows that are not among the finished runs: a kill came between the commit and the end."""
        if not self.path.exists():
            return []
        every = " union ".join(f"select run_id from {table}" for table in TABLES)
        with self._open(write=False) as connection:
            found = connection.execute(f"select run_id from ({every}) order by run_id").fetchall()
        finished = set(finished_run_ids)
        return [run_id for (run_id,) in found if run_id not in finished]

    def impossible(self) -> dict[str, list[str]]:
        """Runs that committed rows which no environment may leave: run id -> what they are, as "3 turns ..."."""
        found: dict[str, list[str]] = {}
        if not self.path.exists():
            return found
        with self._open(write=False) as connection:
            for table, condition, what in IMPOSSIBLE:
                query = f"select run_id, count(*) from {table} where {condition} group by run_id order by run_id"
                for run_id, n in connection.execute(query).fetchall():
                    found.setdefault(run_id, []).append(f"{n} {table} {what}")
        return found

    def find_episode(self, prefix: str, is_finished: Callable[[str], bool] = lambda run_id: True) -> Row:
        """The episode whose id starts with `prefix`, of the newest run with it that `is_finished` accepts.

        Raises UsageError where there is none, or where the prefix fits several ids.
        """
        found: list[tuple[str, str]] = []
        if prefix:
            self.fetch(self.lacking())
        if prefix and self.path.exists():
            query = "select episode_id, run_id from episodes where starts_with(episode_id, ?) order by rowid desc"
            with self._open(write=False) as connection:
                found = connection.execute(query, [prefix]).fetchall()
        # Rows that were taken in later are no newer.
        age = {run_id: i for i, run_id in enumerate(self.source.finished() if self.source and found[1:] else ())}
        found.sort(key=lambda one: age.get(one[1], -1), reverse=True)
        finished = {run_id for run_id in {run_id for _, run_id in found} if is_finished(run_id)}
        newest: dict[str, str] = {}
        for episode_id, run_id in found:
            if run_id in finished:
                newest.setdefault(episode_id, run_id)
        if not newest:
            raise UsageError(f"no episode starts with {prefix!r} in {self.path}. See: turnwise show RUN")
        if len(newest) > 1:
            raise UsageError(
                f"{prefix!r} is the start of {len(newest)} episodes ({', '.join(list(newest)[:3])}, ...): give more characters"
            )
        ((episode_id, run_id),) = newest.items()
        return next(row for row in self.rows("episodes", [run_id]) if row["episode_id"] == episode_id)

    def runs_with(self, episode_id: str) -> list[str]:
        """Runs that wrote rows of an episode, to whatever table, in the order in which they committed."""
        tables = [table for table, columns in TABLES.items() if "episode_id" in columns]
        every = " union ".join(f"select run_id from {table} where episode_id = $1" for table in tables)
        self.fetch(self.lacking())
        with self._open(write=False) as connection:
            found = connection.execute(
                f"select run_id from commits where run_id in ({every}) order by committed_at", [episode_id]
            ).fetchall()
        return [run_id for (run_id,) in found]

    @contextmanager
    def _open_for(self, table: str, run_ids: Sequence[str]) -> Iterator[DuckDBPyConnection]:
        """A connection for reading, once every run is known to have committed."""
        missing = list(run_ids)
        for fetched in (False, True):
            if self.path.exists():
                with self._open(write=False) as connection:
                    known = connection.execute(
                        "select run_id from commits where list_contains(?, run_id)", [list(run_ids)]
                    ).fetchall()
                    missing = [run_id for run_id in run_ids if (run_id,) not in known]
                    if not missing:
                        yield connection
                        return
            if fetched or not self.fetch(missing):
                break
        advice = f"turnwise rerun {PRODUCERS[table]} --of {missing[0]}" if table in PRODUCERS else "turnwise runs"
        raise MissingInput(
            f"rows of {table} were wanted from run {missing[0]}, but it never committed any to {self.path}. Run: {advice}"
        )

    def _open(self, *, write: bool) -> AbstractContextManager[DuckDBPyConnection]:
        return opened(self.path, write=write, wait_s=self.wait_s)


def _selection(table: str, run_ids: Sequence[str], where: str) -> tuple[str, list[list[str]]]:
    runs = list(dict.fromkeys(run_ids))
    condition = f" and ({where})" if where else ""
    # rowid counts the rows in the order they were inserted: nothing is ever deleted.
    return (
        f"select {', '.join(columns_of(table))} from {table} where list_contains($1, run_id){condition} order by list_position($1, run_id), rowid",
        [runs],
    )


def _narrow(
    table: str, columns: Sequence[str], run_id: str, by: Sequence[str], among: Collection[tuple[Any, ...]]
) -> tuple[str, list[Any]]:
    query, values = f"select rowid, {', '.join(columns)} from {table} where run_id = $1", [run_id]
    if not by:
        return query, values
    lists = ", ".join(f"unnest(${i + 2})" for i in range(len(by)))
    key = f"({', '.join(by)})" if len(by) > 1 else by[0]
    return f"{query} and {key} in (select {lists})", [*values, *(list(one) for one in zip(*among, strict=True))]
