"""A store that cannot be made, opened or written: two at once, killed halfway, newer, damaged, full. One sentence each."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from toys import ENVIRONMENT

from stages.frame.types import TurnwiseError, UsageError
from stages.store.tracking import Tracking

INITIALISE = """
import sys
from pathlib import Path
from typing import Any
from stages.store.tracking import Tracking
tracking = Tracking(Path(sys.argv[1]))
tracking.finish(tracking.start("critic", "c", {}))
"""


def test_two_processes_that_initialise_one_store_at_once_both_succeed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INITIALISE, str(tmp_path / "mlflow")]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) for _ in range(2)]
    errors = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    tracking = Tracking(tmp_path / "mlflow")
    assert [info.status for info in tracking.runs("critic", 5)] == ["FINISHED", "FINISHED"]
    with closing(sqlite3.connect(tracking.root / "mlflow.db")) as raw:
        assert raw.execute("pragma journal_mode").fetchone() == ("wal",)
    assert not list(tracking.root.glob("*.part*"))


def test_a_creation_that_was_killed_halfway_is_begun_again(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlflow.part").write_bytes(b"half a store")
    (tmp_path / "mlflow.part-wal").write_bytes(b"and its log")

    def initialise(engine: object) -> None:
        assert (tmp_path / "mlflow.part").stat().st_size < 5000  # the leftover is gone
        with (
            closing(sqlite3.connect(empty_store)) as source,
            closing(sqlite3.connect(tmp_path / "mlflow.part")) as target,
        ):
            source.backup(target)

    # the real one takes seconds, and runs above
    monkeypatch.setattr("mlflow.store.db.utils._initialize_tables", initialise)
    tracking = Tracking(tmp_path)
    tracking.initialise()
    assert tracking.runs("critic", 1) == []


def test_a_store_of_a_newer_mlflow_is_one_sentence(tracking: Tracking) -> None:
    with closing(sqlite3.connect(tracking.root / "mlflow.db")) as raw:
        raw.execute("update alembic_version set version_num = 'ffffffffffff'")
        raw.commit()
    with pytest.raises(UsageError, match=r"newer MLflow than the one installed .*ffffffffffff.* Install the newer one"):
        tracking.initialise()
    with closing(sqlite3.connect(tracking.root / "mlflow.db")) as raw:
        assert raw.execute("select version_num from alembic_version").fetchone() == ("ffffffffffff",)


def test_a_damaged_store_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"no database at all, and long enough for a header" * 100)
    with pytest.raises(
        TurnwiseError, match=r"mlflow.db was wanted, but the file is damaged .*Restore it, or move it away"
    ):
        Tracking(tmp_path).initialise()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(sqlite3.OperationalError) database or disk is full", "the disk is full. Free some space"),
        ("(sqlite3.OperationalError) disk I/O error", "Look whether the disk is full or failing"),
        ("(sqlite3.OperationalError) database is locked", "another process keeps it locked"),
        ("(sqlite3.OperationalError) attempt to write a readonly database", "Check who owns the folder"),
        ("(sqlite3.DatabaseError) database disk image is malformed", "the file is damaged"),
    ],
)
def test_what_sqlite_says_is_told_in_a_sentence(
    text: str, said: str, tracking: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.exceptions import MlflowException

    run_id = tracking.start("critic", "c", {})

    def fail(*arguments: object) -> None:
        raise MlflowException(text)

    monkeypatch.setattr(tracking._client, "set_terminated", fail)
    with pytest.raises(TurnwiseError, match=said) as caught:
        tracking.finish(run_id)
    assert "\n" not in str(caught.value)


SMALL_DISK = """
import resource, sys
from pathlib import Path
from typing import Any
from stages.store.tracking import Tracking
from stages.frame.types import TurnwiseError
tracking = Tracking(Path(sys.argv[1]))
run_id = tracking.start("critic", "c", {})
size = sum(path.stat().st_size for path in tracking.root.glob("mlflow.db*"))
resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
try:
    tracking.record(run_id, curves={"critic/nll": [0.5] * 20000})
except TurnwiseError as error:
    print(error)
"""


def test_a_store_that_cannot_grow_is_one_sentence_and_goes_on_later(tracking: Tracking) -> None:
    command = [sys.executable, "-c", SMALL_DISK, str(tracking.root)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120, check=False)
    assert "disk is full" in done.stdout, done.stderr
    assert len(done.stdout.splitlines()) == 1
    (dead,) = tracking.reap()
    assert tracking.status(dead) == "KILLED"
    tracking.finish(tracking.start("critic", "again", {}))
