"""The replay's file among threads, forks and failures: held while it is used, and by nobody between two uses."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import duckdb
import pytest

from stages.frame.types import UsageError
from stages.store.replay import Replay


def priority(turn: int) -> dict[str, Any]:
    return {"episode_id": "e", "turn": turn, "loss": 0.5, "step": 0}


def test_between_two_uses_the_file_is_held_by_nobody_and_threads_wait_for_each_other(replay: Replay) -> None:
    """The DuckDB to which it is attached is kept: another one of the same process can open the file all the same."""
    replay.commit("r0", "critic", {"priorities": [priority(0)]})
    with duckdb.connect(str(replay.path)) as raw:
        raw.execute("insert into commits values ('r1', 'critic', '', '{}')")
    with ThreadPoolExecutor(4) as pool:
        writes = [pool.submit(replay.commit, f"t{i}", "critic", {"priorities": [priority(i)]}) for i in range(8)]
        counts = [pool.submit(replay.count, "commits", ["r0", "r1"]) for _ in range(8)]
        assert [one.result() for one in counts] == [2] * 8
        assert [one.result() for one in writes] == [None] * 8
    assert replay.count("priorities", ["r0", *(f"t{i}" for i in range(8))]) == 9


FORKED = """
import os, sys
from pathlib import Path
from stages.store.replay import Replay
replay = Replay(Path(sys.argv[1]))
replay.commit("r0", "critic", {})
child = os.fork()
if child == 0:
    replay.commit("r1", "critic", {})
    sys.exit(7)
print(os.waitpid(child, 0)[1] >> 8, replay.count("commits", ["r0", "r1"]))
"""


def test_a_forked_process_has_a_duckdb_of_its_own(replay: Replay) -> None:
    """With its parent's, whose threads it does not have, it would crash when it ends."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(replay.path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.stderr) == ("7 2\n", "")


def test_a_use_that_fails_leaves_nothing_behind_and_the_next_one_works(replay: Replay) -> None:
    replay.commit("r0", "critic", {"priorities": [priority(0)]})
    with suppress(KeyError), replay._open(write=True) as connection:
        connection.execute("begin")
        connection.execute("delete from priorities")
        raise KeyError
    assert replay.count("priorities", ["r0"]) == 1
    with pytest.raises(UsageError, match="sql: "):
        replay.query("select nonsense", {})
    assert replay.query("select count(*) as n from priorities", {}).to_pylist() == [{"n": 1}]
    replay.commit("r1", "critic", {})  # also after a query, for which DuckDB was forbidden to open files
