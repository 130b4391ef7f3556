"""The replay's DuckDB file: made completely or not at all, upgraded once, opened late and closed early, with clear
errors.

Making a DuckDB takes 15 ms, attaching a file to one under 1 ms. A stage that reads a hundred runs opens the file
hundreds of times. So a process keeps a DuckDB without a file and attaches the file only while it is used. Between two
uses any other process may have the file.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stages.frame.types import TurnwiseError, UsageError
from stages.store.machine import disk_full, first_line
from stages.store.sqlite import exclusive
from stages.store.tables import SCHEMA_VERSION, schema_sql

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

AGAIN = "Run: turnwise verify --rebuild, which makes it again from the runs"
NAME = "replay"  # of the file among the databases of the DuckDB that is kept
_using = threading.RLock()  # a DuckDB attaches a file once: threads of a process wait for each other
_kept: dict[Path, DuckDBPyConnection] = {}  # file -> the DuckDB to which it is attached; of the last file only


@contextmanager
def opened(path: Path, *, write: bool, wait_s: float) -> Iterator[DuckDBPyConnection]:
    """A connection whose tables are those of the file, which is made where one who writes finds none.

    What is not committed when the caller raises is rolled back. Another process that holds the file is waited for, at
    most wait_s. Raises TurnwiseError where it cannot be had, UsageError where a newer turnwise made it.
    """
    import duckdb

    try:
        with _using, _checked(path, write, wait_s) as connection:
            yield connection
    except (duckdb.Error, OSError) as error:
        raise _sentence(error, path) from error
    except RuntimeError as error:
        if str(error) != "Query interrupted":
            raise
        # DuckDB looks for signals while it works, and makes this of whatever a handler raised: Ctrl-C, or a flow that
        # is being cancelled.
        raise KeyboardInterrupt from error


def let_go() -> None:
    """Close the DuckDB that is kept, with all that was set in it; the next use makes another one."""
    while _kept:
        _kept.popitem()[1].close()


# A process that was forked would have the DuckDB without its threads, and crash when it ends.
os.register_at_fork(before=let_go)
atexit.register(let_go)  # one that is still there when Python ends is told as a leak


@contextmanager
def _checked(path: Path, write: bool, wait_s: float) -> Iterator[DuckDBPyConnection]:
    if write and not path.exists():
        _create(path, wait_s)
    with _attached(path, write, wait_s) as connection:
        if not _is_older(connection, path):
            yield connection
            return
    # A reader does so, too: it may ask for any of the tables that are missing.
    with exclusive(path, wait_s), _attached(path, True, wait_s) as connection:
        if _is_older(connection, path):  # nobody else has meanwhile
            connection.execute(schema_sql())
    with _attached(path, write, wait_s) as connection:
        yield connection


@contextmanager
def _attached(path: Path, write: bool, wait_s: float) -> Iterator[DuckDBPyConnection]:
    connection = attach(path, write, wait_s)
    try:
        yield connection
        connection.close()
        _kept[path].execute(f"detach {NAME}")  # takes the write-ahead log into the file
    except BaseException:
        connection.close()
        let_go()  # a DuckDB in which something failed may hold the file, and need not work any more
        raise


def attach(path: Path, write: bool, wait_s: float) -> DuckDBPyConnection:
    """A connection to the file, waiting 20 ms and then longer while another process holds it."""
    import duckdb

    deadline = time.monotonic() + wait_s
    pause_s = 0.02
    quoted = str(path).replace("'", "''")
    while True:
        try:
            whole = _duckdb(path)
            whole.execute(f"attach '{quoted}' as {NAME}{'' if write else ' (read_only)'}")
            connection = whole.cursor()
            connection.execute(f"use {NAME}")
            return connection
        except duckdb.Error as error:
            held = "onflicting lock" in str(error) or "already attached" in str(error)
            if not held or time.monotonic() + pause_s > deadline:
                let_go()
                raise
        except BaseException:  # Ctrl-C: the file may be attached by now
            let_go()
            raise
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.2)


def _duckdb(path: Path) -> DuckDBPyConnection:
    import duckdb

    if path not in _kept:
        let_go()
        _kept[path] = duckdb.connect(config={"temp_directory": f"{path}.tmp"})
    return _kept[path]


def _create(path: Path, wait_s: float) -> None:
    """Make the file under another name first: one that a kill or a full disk left half-made never opens again."""
    import duckdb

    with exclusive(path, wait_s):
        if path.exists():
            return
        unfinished = path.with_suffix(".part")
        _clear(unfinished)
        connection = duckdb.connect(str(unfinished))
        try:
            connection.execute(schema_sql())
        finally:
            connection.close()  # takes the write-ahead log into the file
        _put(unfinished, path)


@contextmanager
def replaced(path: Path, wait_s: float) -> Iterator[Path]:
    """The name of a new, empty file beside `path`, which takes its place at the end. A kill before leaves the old one."""
    import duckdb

    new = path.with_name(f"{path.stem}.new{path.suffix}")
    with exclusive(path.with_name(f"{path.stem}.rebuild.lock"), wait_s):
        _clear(new)
        with opened(new, write=True, wait_s=wait_s):
            pass
        try:
            yield new
        except BaseException:
            let_go()
            _clear(new)
            raise
        with _using, exclusive(path, wait_s):
            try:
                if path.exists():  # attached, so that nobody has it; then its write-ahead log is in it, and gone
                    with _attached(path, True, wait_s) as connection:
                        connection.execute("checkpoint")
                        new.replace(path)
            except duckdb.Error as error:
                if "onflicting lock" in str(error):
                    raise _sentence(error, path) from error
            if new.exists():  # there was no file, or a damaged one
                _put(new, path)


def _clear(file: Path) -> None:
    """Delete an unfinished file, and what DuckDB left beside it."""
    for leftover in file.parent.glob(f"{file.name}*"):
        leftover.unlink()


def _put(new: Path, path: Path) -> None:
    """The file takes its place. The write-ahead log of a file that is gone or damaged would be taken for its own."""
    path.with_name(f"{path.name}.wal").unlink(missing_ok=True)
    new.replace(path)


def _is_older(connection: DuckDBPyConnection, path: Path) -> bool:
    """Whether the file was made by an older turnwise. Raises UsageError for a newer one, TurnwiseError for another's."""
    import duckdb

    try:
        # Asked straight away: a look into DuckDB's own list of tables costs more than opening the file.
        ((version,),) = connection.execute("select max(version) from schema_version").fetchall()
    except duckdb.CatalogException as error:
        raise TurnwiseError(f"{path} was wanted as a replay, but it has none of its tables. {AGAIN}") from error
    if version > SCHEMA_VERSION:
        found = f"has schema {version}, but this turnwise reads only up to {SCHEMA_VERSION}"
        raise UsageError(f"the replay {path} {found}. Update turnwise, or use another folder")
    return bool(version < SCHEMA_VERSION)


def _sentence(error: Exception, path: Path) -> Exception:
    """The error as one sentence where the disk, the file or a lock is the cause; otherwise the error itself."""
    text = str(error)
    if full := disk_full(error, path):
        return full
    if "onflicting lock" in text:
        found = re.search(r"held in (.*?PID \d+\))", text)
        holder = found[1] if found else "another process"
        return TurnwiseError(
            f"the replay {path} was wanted, but {holder} holds it. Wait for it or stop it, then run the same command again"
        )
    if re.search(r"Permission denied|not permitted|Read-only file system", text):
        # Also of one who only reads: the file of an older turnwise is given the tables that it lacks.
        return TurnwiseError(
            f"the replay {path} was wanted, but it cannot be opened for writing. Check who owns the file, or work on a copy of it"
        )
    if re.search(r"not a valid DuckDB|Could not read enough bytes|corrupt|checksum|serializ", text, re.IGNORECASE):
        return TurnwiseError(f"the replay {path} was wanted, but the file is damaged ({first_line(error)}). {AGAIN}")
    return error
