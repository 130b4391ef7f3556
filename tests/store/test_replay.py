"""The replay: what is written comes back as it was, in one piece, and is found."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import episode_row, priority_row, turn_row

from stages.frame.types import MissingInput, UsageError
from stages.store.replay import Replay
from stages.store.tables import TABLES, export_rows


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
        replay.commit(run_id, "critic", {"priorities": [priority_row(turn) for turn in (3, 1, 2)]})
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
    replay.commit("r1", "critic", {"priorities": [priority_row(1)]})
    replay.commit("r2", "critic", {"priorities": [priority_row(2)]})
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
    replay.commit("r1", "critic", {"priorities": [priority_row(1)]})
    with pytest.raises(ValueError, match="r1 has committed"):
        replay.commit("r1", "critic", {"priorities": [priority_row(2)]})
    assert replay.count("priorities", ["r1"]) == 1


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"turns": [priority_row(1)]}, "missing or unknown: action"),
        ({"priorities": [priority_row(1) | {"extra": 1}]}, "missing or unknown: extra"),
        ({"priorities": [priority_row(1) | {"turn": 1.5}]}, "column turn of priorities must be INTEGER"),
        ({"priorities": [priority_row(1) | {"turn": 2**40}]}, "column turn of priorities must be INTEGER"),
        ({"priorities": [priority_row(1) | {"loss": "high"}]}, "column loss of priorities must be DOUBLE"),
        ({"episodes": [episode_row("e1", scenario={"x": float("nan")})]}, "column scenario of episodes must be JSON"),
        ({"episodes": [episode_row("e1", messages=[object()])]}, "column messages of episodes must be JSON"),
        ({"nowhere": [priority_row(1)]}, "no table 'nowhere'"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_before_anything_is_written(
    replay: Replay, rows: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        replay.commit("r1", "critic", {"priorities": [priority_row(0)]} | rows)
    assert not replay.path.exists()


def test_verify_names_the_runs_that_have_rows_but_did_not_finish(replay: Replay) -> None:
    assert replay.verify([]) == []
    replay.commit("r1", "critic", {"priorities": [priority_row(1)]})
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
