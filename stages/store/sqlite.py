"""A SQLite file as a store for several processes: made by one at a time, in WAL mode, with clear errors."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from stages.frame.types import TurnwiseError
from stages.store.database import Ask
from stages.store.machine import disk_full, first_line, is_dead

STORE_LOCK_TIMEOUT_S = 600.0  # a first creation takes up to a minute on a busy machine, and others may queue before us


@dataclass(frozen=True)
class SqliteFile:
    """A `Database` in a file of the project folder. Equal work is settled by lock files there, so there are no claims."""

    path: Path
    listed = "with listed as (select value as run_uuid from json_each(?))"
    join = "cross join"  # done as written, by the index of the runs: else a whole table might be gone through

    def __str__(self) -> str:
        return str(self.path)

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.path}"

    def ids(self, run_ids: Sequence[str]) -> str:
        return json.dumps(list(run_ids))

    def exists(self) -> bool:
        return self.path.exists()

    def told(self) -> AbstractContextManager[None]:
        return told(self.path)

    def exclusive(self) -> AbstractContextManager[None]:
        return exclusive(self.path, STORE_LOCK_TIMEOUT_S)

    @contextmanager
    def opened(self) -> Iterator[Ask]:
        with told(self.path), closing(sqlite3.connect(self.path, timeout=20)) as raw:
            yield lambda query, values=(): raw.execute(query, values).fetchall()

    def claimed(self, fingerprint: str, waiting: Callable[[], None]) -> AbstractContextManager[None]:
        return nullcontext()

    def signs(self) -> Mapping[str, str]:
        return {}

    def begun(self, run_id: str) -> None:
        return None

    def ended(self, run_id: str) -> None:
        return None

    def dead(self, running: Sequence[Mapping[str, str]]) -> list[bool]:
        return [is_dead(tags) for tags in running]


@contextmanager
def exclusive(db: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock file beside `db`, to create, upgrade or first open it. Raises TurnwiseError past the timeout."""
    from filelock import FileLock, Timeout

    db.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(db.with_suffix(".lock"), timeout=timeout_s):
            yield
    except Timeout as error:
        waited = f"for {timeout_s:.0f} s another process has been creating it"
        raise TurnwiseError(
            f"the store {db} was wanted, but {waited}. Stop it and run the same command again"
        ) from error


def check(db: Path) -> None:
    """Read the file once, and put it in WAL mode: readers never wait for a writer, and a commit costs half."""
    with closing(sqlite3.connect(db, timeout=20)) as raw:
        raw.execute("pragma journal_mode = wal")
        raw.execute("select count(*) from sqlite_master")


def copy(db: Path, to: Path) -> Path:
    """Copy a database that may be in use."""
    with closing(sqlite3.connect(db)) as source, closing(sqlite3.connect(to)) as target:
        source.backup(target)
    return to


@contextmanager
def told(db: Path) -> Iterator[None]:
    """Turn what SQLite says of disk, file or lock, through any library, into a TurnwiseError; others pass."""
    try:
        yield
    except TurnwiseError:
        raise
    except Exception as error:
        if sentence := disk_full(error, db) or _sentence(str(error), db, first_line(error)):
            raise sentence from error
        raise


def _sentence(text: str, db: Path, quoted: str) -> TurnwiseError | None:
    if any(said in text for said in ("file is not a database", "disk image is malformed", "no such table")):
        return TurnwiseError(
            f"the store {db} was wanted, but the file is damaged ({quoted}). Restore it, or move it away"
        )
    if "database is locked" in text:
        return TurnwiseError(
            f"the store {db} was wanted, but another process keeps it locked. Stop it and run the same command again"
        )
    if "disk I/O error" in text:
        return TurnwiseError(
            f"the store {db} could not be read or written ({quoted}). Look whether the disk is full or failing, then run the same command again"
        )
    if any(
        said in text
        for said in ("unable to open database file", "readonly database", "Permission denied", "Read-only file system")
    ):
        return TurnwiseError(
            f"the store {db} was wanted, but it cannot be opened for writing. Check who owns the folder"
        )
    return None
