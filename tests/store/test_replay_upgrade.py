"""A replay of an older turnwise is given the tables that it lacks when it is opened, in one piece and once, or a
sentence says why not.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest
from toys import ENVIRONMENT, turn_row

from stages.frame.types import TurnwiseError
from stages.store import duckdb_file
from stages.store.replay import Replay
from stages.store.tables import schema_sql


def older(replay: Replay) -> dict[str, Any]:
    """Make the file one of schema 1, which had no certificates, with a turn of run r1; returns the turn."""
    turn = turn_row(0, [1, 2], [3], [-0.1])
    replay.commit("r1", "collect", {"turns": [turn]})
    with duckdb.connect(str(replay.path)) as raw:
        raw.execute("drop table certificates; delete from schema_version; insert into schema_version values (1)")
    return turn


@pytest.mark.parametrize("first", ["read", "write", "verify"])
def test_a_file_of_an_older_schema_gains_the_table_it_lacks_and_loses_nothing(replay: Replay, first: str) -> None:
    """Whatever is asked of it first; it does so once."""
    turn = older(replay)
    if first == "read":
        assert replay.rows("certificates", ["r1"]) == []
    elif first == "verify":
        assert replay.verify(["r1"]) == []
    row = {
        "episode_id": "e",
        "turn": 0,
        "extended": False,
        "position": 7,
        "produced": ["a", "<2>"],
        "rendered": [],
        "gap_mean": None,
        "gap_max": None,
    }
    replay.commit("r2", "self_ac", {"certificates": [row]})
    assert replay.rows("certificates", ["r1", "r2"]) == [{"run_id": "r2", **row}]
    assert replay.rows("turns", ["r1"]) == [{"run_id": "r1", **turn}]
    assert (replay.count("commits", ["r1", "r2"]), replay.verify([])) == (2, ["r1", "r2"])
    with duckdb.connect(str(replay.path)) as raw:
        assert raw.execute("select version from schema_version order by 1").fetchall() == [(1,), (2,)]


def test_an_upgrade_that_fails_leaves_the_file_as_it_was(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    older(replay)
    whole = schema_sql()
    monkeypatch.setattr(
        "stages.store.duckdb_file.schema_sql", lambda: whole.removesuffix("commit") + "select * from nowhere"
    )
    with pytest.raises(duckdb.CatalogException):
        replay.rows("turns", ["r1"])
    with duckdb.connect(str(replay.path), read_only=True) as raw:
        assert raw.execute("select version from schema_version").fetchall() == [(1,)]
        assert ("certificates",) not in raw.execute("select table_name from duckdb_tables()").fetchall()
    monkeypatch.undo()
    assert replay.rows("certificates", ["r1"]) == []


def test_an_older_file_that_must_not_be_written_to_is_one_sentence(
    replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    older(replay)
    real = duckdb_file.attach

    def read_only_disk(path: Path, write: bool, wait_s: float) -> Any:
        if write:
            raise duckdb.IOException(f'IO Error: Cannot open file "{path}": Read-only file system')
        return real(path, write, wait_s)

    monkeypatch.setattr(duckdb_file, "attach", read_only_disk)
    with pytest.raises(
        TurnwiseError, match=r"replay.duckdb was wanted, but it cannot be opened for writing\. .* work on a copy of it$"
    ):
        replay.rows("turns", ["r1"])


def test_several_processes_that_meet_an_older_file_upgrade_it_once(replay: Replay) -> None:
    older(replay)
    code = "import sys; from pathlib import Path; from stages.store.replay import Replay; print(Replay(Path(sys.argv[1])).rows('certificates', ['r1']))"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(replay.path)], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        for _ in range(2)
    ]
    assert [one.communicate(timeout=60)[0] for one in both] == ["[]\n", "[]\n"]
    assert [one.returncode for one in both] == [0, 0]
    with duckdb.connect(str(replay.path), read_only=True) as raw:
        assert raw.execute("select version from schema_version order by 1").fetchall() == [(1,), (2,)]
