"""What may happen to a replay's file: signals and errors while it is used, two that write at once, a holder, damage, a full
disk. Nothing is lost, and a failure is a sentence.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from toys import ENVIRONMENT, priority_row, turn_row

from stages.frame.signals import TIME_IS_UP
from stages.frame.types import TurnwiseError, UsageError
from stages.store.replay import Replay
from stages.store.tables import arrow


def test_an_error_inside_the_transaction_leaves_no_row(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    replay.commit("r1", "critic", {"priorities": [priority_row(1)]})
    # the last statement before the commit fails
    monkeypatch.setattr("stages.store.replay.json.dumps", lambda value: "no JSON")
    with pytest.raises(duckdb.Error):
        replay.commit("r2", "critic", {"priorities": [priority_row(1)]})
    assert replay.count("priorities", ["r1", "r2"]) == replay.count("commits", ["r1", "r2"]) == 1


INTERRUPTED = """
import os, signal, sys, threading
from pathlib import Path
from stages.store.replay import Replay

def terminated(number, frame):
    raise SystemExit

signal.signal(signal.SIGTERM, terminated)
try:
    with Replay(Path(sys.argv[1]))._open(write=False) as connection:
        # Only a thread that works looks for signals; were this query's one task another's, the main thread would wait.
        connection.execute("set threads = 1")
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        connection.execute("select count(*) from range(1000000000) a, range(1000) b").fetchall()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_signal_in_the_middle_of_a_query_is_an_interrupt_and_no_error(replay: Replay) -> None:
    """In a process of its own: signals reach DuckDB in the main thread alone."""
    replay.commit("r1", "collect", {"priorities": [priority_row(0)]})
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(replay.path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


class Terminated(BaseException):
    """As Prefect's: what a flow raises when it is being cancelled."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, TIME_IS_UP])
def test_a_signal_while_duckdb_asks_for_the_rows_arrives_as_what_it_is(
    replay: Replay, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """DuckDB makes of whatever is raised there an error of the rows, and the run would be told as one that failed."""

    class Rows:
        def __init__(self, table: pa.Table) -> None:
            self.table = table

        def __arrow_c_stream__(self, schema: Any = None) -> Any:
            signal.raise_signal(number)
            return self.table.__arrow_c_stream__(schema)

    def terminated(*_: Any) -> None:
        raise Terminated

    monkeypatch.setattr("stages.store.replay.arrow", lambda *arguments: Rows(arrow(*arguments)))
    before = signal.signal(number, terminated)
    try:
        with pytest.raises(Terminated):
            replay.commit("r1", "critic", {"priorities": [priority_row(1)]})
        assert signal.getsignal(number) is terminated
    finally:
        signal.signal(number, before)
    assert replay.count("commits", ["r1"]) == 0


def test_a_creation_that_was_killed_halfway_is_begun_again(replay: Replay) -> None:
    replay.path.parent.mkdir()
    for leftover in ("replay.part", "replay.part.wal"):
        (replay.path.parent / leftover).write_bytes(b"half a replay")
    replay.commit("r1", "critic", {"priorities": [priority_row(1)]})
    assert replay.count("priorities", ["r1"]) == 1
    assert sorted(path.name for path in replay.path.parent.iterdir()) == ["replay.duckdb", "replay.lock"]


def test_a_newer_schema_is_one_sentence(replay: Replay) -> None:
    replay.commit("r1", "critic", {})
    with duckdb.connect(str(replay.path)) as raw:
        raw.execute("update schema_version set version = 99")
    for use in (
        lambda: replay.rows("turns", ["r1"]),
        lambda: replay.commit("r2", "critic", {}),
        lambda: replay.verify([]),
    ):
        with pytest.raises(UsageError, match=r"schema 99, but this turnwise reads only up to 2\. Update turnwise"):
            use()


@pytest.mark.parametrize("content", [b"no database at all", b"", os.urandom(4096) * 8], ids=["text", "empty", "random"])
def test_a_damaged_file_is_one_sentence(replay: Replay, content: bytes) -> None:
    replay.path.parent.mkdir()
    replay.path.write_bytes(content)
    with pytest.raises(TurnwiseError, match=r"(damaged|none of its tables).*Run: turnwise verify --rebuild"):
        replay.rows("turns", ["r1"])


def test_a_file_damaged_in_the_middle_is_one_sentence_or_reads_right(replay: Replay) -> None:
    replay.commit("r1", "collect", {"turns": [turn_row(i, [i] * 50, [i] * 50, [-0.5] * 50) for i in range(500)]})
    whole = bytearray(replay.path.read_bytes())
    for at in range(8192, len(whole), 4096):
        whole[at : at + 64] = os.urandom(64)
    replay.path.write_bytes(whole)
    with pytest.raises(TurnwiseError, match="damaged"):
        replay.rows("turns", ["r1"])


@contextmanager
def child(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs `code`; it goes on when a line is written to it."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        yield process
        process.kill()


HOLD = """
import duckdb, sys, time
connection = duckdb.connect(sys.argv[1])
print("held", flush=True)
sys.stdin.readline()
time.sleep(0.2)
connection.close()
print("released", flush=True)
sys.stdin.readline()
"""


def test_a_held_file_is_waited_for_and_then_its_holder_is_named(replay: Replay) -> None:
    replay.commit("r1", "critic", {"priorities": [priority_row(1)]})
    with child(HOLD, str(replay.path)) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        impatient = Replay(replay.path, wait_s=0.2)
        for use in (lambda: impatient.commit("r2", "critic", {}), lambda: impatient.rows("priorities", ["r1"])):
            with pytest.raises(TurnwiseError, match=rf"PID {holder.pid}\) holds it\. Wait for it or stop it"):
                use()
        holder.stdin.write("go on\n")
        holder.stdin.flush()
        replay.commit("r2", "critic", {"priorities": [priority_row(2)]})  # waits until it is released
        assert holder.stdout.readline() == "released\n"
    assert replay.count("priorities", ["r1", "r2"]) == 2


WRITE = """
import sys
from pathlib import Path
from stages.store.replay import Replay
replay = Replay(Path(sys.argv[1]))
sys.stdin.readline()
for i in range(15):
    replay.commit(f"{sys.argv[2]}{i}", "critic", {"priorities": [{"episode_id": sys.argv[2], "turn": t, "loss": 0.5, "step": i} for t in range(20)]})
    assert len(replay.rows("priorities", [f"{sys.argv[2]}{i}"])) == 20
"""


def test_two_processes_that_write_at_once_lose_nothing(replay: Replay) -> None:
    with child(WRITE, str(replay.path), "a") as first, child(WRITE, str(replay.path), "b") as second:
        for process in (first, second):  # both start on a file that does not exist yet
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        errors = [process.communicate(timeout=120)[1] for process in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0), errors
    for name in "ab":
        runs = [f"{name}{i}" for i in range(15)]
        assert [row["turn"] for row in replay.rows("priorities", runs)] == list(range(20)) * 15
    assert len(replay.verify([])) == 30


SMALL_DISK = """
import resource, sys
from pathlib import Path
from stages.store.replay import Replay
from stages.frame.types import TurnwiseError
from toys import turn_row
resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, 1_500_000))
rows = [turn_row(i, list(range(i, i + 700)), [i], [-0.5], text=str(i) * 300) for i in range(3000)]
try:
    Replay(Path(sys.argv[1])).commit("r2", "collect", {"turns": rows})
except TurnwiseError as error:
    print(error)
"""


def test_a_full_disk_is_one_sentence_and_loses_nothing(replay: Replay) -> None:
    replay.commit("r1", "critic", {"priorities": [priority_row(1)]})
    done = subprocess.run(
        [sys.executable, "-c", SMALL_DISK, str(replay.path)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=120,
        check=False,
    )
    assert "the disk is full. Free some space" in done.stdout, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert replay.count("commits", ["r1", "r2"]) == replay.count("priorities", ["r1"]) == 1
    replay.commit("r2", "collect", {"turns": [turn_row(0, [1], [2], [-0.5])]})
    assert replay.verify([]) == ["r1", "r2"]
