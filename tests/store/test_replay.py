"""The replay: what is written comes back, appears in one piece, and failures of file, lock and disk are told in a
sentence.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import episode_row, turn_row

from stages.frame.signals import TIME_IS_UP
from stages.frame.types import MissingInput, TurnwiseError, UsageError
from stages.store.replay import Replay
from stages.store.tables import TABLES, arrow, export_rows

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
}


@pytest.fixture
def replay(tmp_path: Path) -> Replay:
    return Replay(tmp_path / "data" / "replay.duckdb")


def priority(turn: int, loss: float = 0.5) -> dict[str, Any]:
    return {"episode_id": f"e{turn}", "turn": turn, "loss": loss, "step": 0}


def without_run(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "run_id"} for row in rows]


def test_rows_come_back_as_they_were_written(replay: Replay) -> None:
    awkward = {"quotes": 'it\'s "so"', "none": None, "nested": [{"a": [1, 2.5]}], "text": "ä\n\t\\ \u2028"}
    episode = episode_row(
        "e1", scenario=awkward, messages=[], adapter=None, error='line\nwith "quotes"; drop table turns'
    )
    turn = turn_row(0, [1, 2], [], [], terminated=True)
    replay.commit("r1", "collect", {"episodes": [episode], "turns": [turn]})
    assert replay.rows("episodes", ["r1"]) == [{"run_id": "r1", **episode}]
    assert replay.rows("turns", ["r1"]) == [{"run_id": "r1", **turn}]
    assert list(replay.rows("turns", ["r1"])[0]) == list(TABLES["turns"])


def test_rows_of_a_run_come_in_the_order_written_and_runs_in_the_order_named(replay: Replay) -> None:
    for run_id in ("r1", "r2"):
        replay.commit(run_id, "critic", {"priorities": [priority(turn) for turn in (3, 1, 2)]})
    read = replay.rows("priorities", ["r2", "r1", "r2"])
    assert [(row["run_id"], row["turn"]) for row in read] == [
        ("r2", 3),
        ("r2", 1),
        ("r2", 2),
        ("r1", 3),
        ("r1", 1),
        ("r1", 2),
    ]
    assert [row["turn"] for row in replay.rows("priorities", ["r1"], where="turn > 1 or turn < 0")] == [3, 2]
    assert replay.count("priorities", ["r1", "r2"]) == 6
    assert replay.count("priorities", ["r1", "nobody"]) == 3


def test_only_the_rows_of_named_runs_are_read(replay: Replay) -> None:
    replay.commit("r1", "critic", {"priorities": [priority(1)]})
    replay.commit("r2", "critic", {"priorities": [priority(2)]})
    assert [row["turn"] for row in replay.rows("priorities", ["r1"], where="true or true")] == [1]
    assert replay.rows("priorities", []) == []


def test_a_run_that_never_committed_is_missing_input_with_what_to_do(replay: Replay) -> None:
    with pytest.raises(MissingInput, match=r"rows of targets were wanted from run r9.*turnwise rerun targets --of r9"):
        replay.rows("targets", ["r9"])
    assert not replay.path.exists()
    replay.commit("r1", "collect", {"episodes": [], "turns": []})
    assert replay.rows("targets", ["r1"]) == []  # it committed, and had no such rows
    with pytest.raises(MissingInput, match="r9"):
        replay.rows("turns", ["r1", "r9"])
    with pytest.raises(MissingInput, match="r9"):
        replay.export(["r9"], replay.path.parent / "out")


def test_a_run_commits_once(replay: Replay) -> None:
    replay.commit("r1", "critic", {"priorities": [priority(1)]})
    with pytest.raises(ValueError, match="r1 has committed"):
        replay.commit("r1", "critic", {"priorities": [priority(2)]})
    assert replay.count("priorities", ["r1"]) == 1


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"turns": [priority(1)]}, "missing or unknown: action"),
        ({"priorities": [priority(1) | {"extra": 1}]}, "missing or unknown: extra"),
        ({"priorities": [priority(1) | {"turn": 1.5}]}, "column turn of priorities must be INTEGER"),
        ({"priorities": [priority(1) | {"turn": 2**40}]}, "column turn of priorities must be INTEGER"),
        ({"priorities": [priority(1) | {"loss": "high"}]}, "column loss of priorities must be DOUBLE"),
        ({"episodes": [episode_row("e1", scenario={"x": float("nan")})]}, "column scenario of episodes must be JSON"),
        ({"episodes": [episode_row("e1", messages=[object()])]}, "column messages of episodes must be JSON"),
        ({"nowhere": [priority(1)]}, "no table 'nowhere'"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_before_anything_is_written(
    replay: Replay, rows: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        replay.commit("r1", "critic", {"priorities": [priority(0)]} | rows)
    assert not replay.path.exists()


def test_an_error_inside_the_transaction_leaves_no_row(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    replay.commit("r1", "critic", {"priorities": [priority(1)]})
    monkeypatch.setattr(
        "stages.store.replay.json.dumps", lambda value: "no JSON"
    )  # the last statement before the commit fails
    with pytest.raises(duckdb.Error):
        replay.commit("r2", "critic", {"priorities": [priority(1)]})
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
    replay.commit("r1", "collect", {"priorities": [priority(0)]})
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
            replay.commit("r1", "critic", {"priorities": [priority(1)]})
        assert signal.getsignal(number) is terminated
    finally:
        signal.signal(number, before)
    assert replay.count("commits", ["r1"]) == 0


def test_verify_names_the_runs_that_have_rows_but_did_not_finish(replay: Replay) -> None:
    assert replay.verify([]) == []
    replay.commit("r1", "critic", {"priorities": [priority(1)]})
    replay.commit("r2", "critic", {})
    assert replay.verify(["r1", "r0"]) == ["r2"]
    assert replay.verify([]) == ["r1", "r2"]


def test_an_episode_is_found_by_the_start_of_its_id_in_the_newest_finished_run(replay: Replay) -> None:
    with pytest.raises(UsageError, match="no episode starts with 'a'"):
        replay.find_episode("a")
    replay.commit("r1", "collect", {"episodes": [episode_row("abc1", iteration=1), episode_row("abd2")]})
    replay.commit("r2", "collect", {"episodes": [episode_row("abc1", iteration=2)]})
    assert replay.find_episode("abc")["iteration"] == 2
    assert replay.find_episode("abc", lambda run_id: run_id == "r1")["iteration"] == 1
    with pytest.raises(UsageError, match="start of 2 episodes"):
        replay.find_episode("ab")
    for nothing in ("abx", "", "%"):
        with pytest.raises(UsageError, match="no episode starts"):
            replay.find_episode(nothing)


def test_export_writes_one_parquet_a_table_that_has_rows(replay: Replay, tmp_path: Path) -> None:
    turn = turn_row(0, [1, 2], [3], [-0.1])
    for run_id in ("r1", "r2"):
        replay.commit(run_id, "collect", {"turns": [turn], "episodes": []})
    files = replay.export(["r1"], tmp_path / "out")
    assert (
        sorted(file.name for file in files)
        == ["commits.parquet", "turns.parquet"]
        == sorted(os.listdir(tmp_path / "out"))
    )
    assert pq.read_table(tmp_path / "out" / "turns.parquet").to_pylist() == [{"run_id": "r1", **turn}]
    assert json.loads(pq.read_table(tmp_path / "out" / "commits.parquet").to_pylist()[0]["n_rows"]) == {
        "turns": 1,
        "episodes": 0,
    }


TOKENS = st.integers(0, 2**31 - 1)
LOG_PROB = st.floats(allow_nan=False) | st.floats(-30, 0).map(lambda x: float.fromhex(x.hex()))
TURN = st.tuples(st.lists(TOKENS, max_size=6), st.lists(st.tuples(TOKENS, LOG_PROB), max_size=6), st.text(max_size=12))


@settings(max_examples=25, deadline=None)
@given(st.lists(TURN, min_size=1, max_size=6))
def test_token_ids_and_log_probs_survive_duckdb_and_parquet_exactly(turns: list[Any]) -> None:
    rows = [
        turn_row(i, prompt, [t for t, _ in action], [p for _, p in action], text=text)
        for i, (prompt, action, text) in enumerate(turns)
    ]
    with tempfile.TemporaryDirectory() as folder:
        replay = Replay(Path(folder) / "replay.duckdb")
        replay.commit("r1", "collect", {"turns": rows})
        (before,) = export_rows("r1", {"turns": rows}, Path(folder) / "rows")
        _, after = replay.export(["r1"], Path(folder) / "out")
        for read in (replay.rows("turns", ["r1"]), pq.read_table(before).to_pylist(), pq.read_table(after).to_pylist()):
            assert without_run(read) == rows
            # == takes -0.0 for 0.0; the bits must be the same
            assert [[p.hex() for p in row["log_probs"]] for row in read] == [
                [p.hex() for p in row["log_probs"]] for row in rows
            ]


def test_a_creation_that_was_killed_halfway_is_begun_again(replay: Replay) -> None:
    replay.path.parent.mkdir()
    for leftover in ("replay.part", "replay.part.wal"):
        (replay.path.parent / leftover).write_bytes(b"half a replay")
    replay.commit("r1", "critic", {"priorities": [priority(1)]})
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
    with pytest.raises(TurnwiseError, match=r"(damaged|none of its tables).*[Mm]ove it away"):
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
    replay.commit("r1", "critic", {"priorities": [priority(1)]})
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
        replay.commit("r2", "critic", {"priorities": [priority(2)]})  # waits until it is released
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
    replay.commit("r1", "critic", {"priorities": [priority(1)]})
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
