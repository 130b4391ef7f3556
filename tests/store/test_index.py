"""The DuckDB file is an index that can be made again: finished runs keep their rows as Parquet, and a reader that lacks
them takes them in from there, exactly, once, and never from a file that is damaged.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
import toys
from old_stores import CERTIFICATE, ROWS

from stages.frame.contract import Context, Outputs
from stages.frame.types import Changed, MissingInput, TurnwiseError
from stages.store import artifacts
from stages.store.execute import execute
from stages.store.replay import Replay
from stages.store.tables import TABLES, export_rows
from stages.store.upkeep import complete, orphans, rebuild
from stages.store.workspace import Workspace

NAN = float("nan")
AWKWARD: dict[str, list[dict[str, Any]]] = {
    **ROWS,
    "certificates": [CERTIFICATE, {**CERTIFICATE, "produced": [], "rendered": ["", "\u2028"], "gap_max": NAN}],
    "episodes": [
        toys.episode_row(f"e{i}", scenario={"deep": [{"a": [1, 2.5, None]}], "text": 'it\'s "so"\n\\ \u2028'}, messages=messages)
        for i, messages in enumerate([[], [{"role": "user", "content": "héllo \U0001f600"}]])
    ],
    "turns": [
        toys.turn_row(3, [], [2**31 - 1], [-0.0, NAN, float("-inf"), -1e-300], terminated=True),
        toys.turn_row(1, [1] * 300, [], []),
        {**toys.turn_row(2, [1], [2], [-0.5]), "log_probs": None, "thought": None},
        {**toys.turn_row(0, [1], [2], [-0.5]), "log_probs": [-0.5, None]},
    ],
    "priorities": [],  # written, and empty
}  # fmt: skip


def run_of(workspace: Workspace, rows: dict[str, Any], seed: int = 0) -> str:
    """A finished stage run that left these rows."""
    stage = replace(toys.SOURCE, run=lambda context: Outputs({}, rows))
    return execute(stage, run=toys.ToyRun(seed=seed), inputs={}, iteration=0, workspace=workspace).run_id


def content(path: Path) -> dict[str, str]:
    """Table -> its columns, types and rows in order, NaN, -0.0 and all; but for the time of a commit."""
    with duckdb.connect(str(path), read_only=True) as raw:
        found = {}
        for table, columns in TABLES.items():
            names = ", ".join(name for name in columns if name != "committed_at")
            kinds = raw.execute(f"describe {table}").fetchall()
            found[table] = repr((kinds, raw.execute(f"select {names} from {table} order by rowid").fetchall()))
    return found


def folder_of(workspace: Workspace, run_id: str) -> Path:
    return workspace.tracking.artifact(run_id, "outputs.json").parent


def test_rows_of_a_deleted_file_come_back_exactly_with_the_same_commit(workspace: Workspace) -> None:
    runs = [run_of(workspace, AWKWARD), run_of(workspace, {}, seed=1)]
    file = workspace.replay.path
    before, read = content(file), repr(workspace.replay.read("turns", runs, list(TABLES["turns"])))
    file.unlink()
    assert repr(workspace.replay.read("turns", runs, list(TABLES["turns"]))) == read
    assert content(file) == before
    file.unlink()
    assert rebuild(workspace.replay) == {}
    assert content(file) == before
    assert [row["n_rows"] for row in workspace.replay.rows("commits", runs)][1] == {}


def test_the_time_of_a_commit_that_is_taken_in_is_that_of_the_runs_end(workspace: Workspace) -> None:
    run_id = run_of(workspace, AWKWARD)
    workspace.replay.path.unlink()
    (row,) = workspace.replay.rows("commits", [run_id])
    assert row["committed_at"].endswith("+00:00")
    with pytest.raises(ValueError, match="has committed its rows"):
        workspace.replay.commit(run_id, "source", {})


def test_a_command_after_the_file_was_deleted_reads_what_it_would_have_read(workspace: Workspace) -> None:
    runs = toys.run_chain(workspace)
    seen = toys.visible(workspace, runs)
    workspace.replay.path.unlink()
    again = toys.run_chain(workspace, toys.ToyRun(total=toys.ToyConfig(scale=2.0)))  # a new run of the last stage
    assert [one.reused for one in again] == [True, True, False]
    assert toys.visible(workspace, runs) == seen


def test_counts_episodes_and_queries_see_the_runs_that_the_file_lacks(workspace: Workspace) -> None:
    old = run_of(workspace, {"episodes": [toys.episode_row("abc", iteration=1)]})
    new = run_of(workspace, {"episodes": [toys.episode_row("abc", iteration=2)]}, seed=1)
    replay = workspace.replay
    uses: list[Callable[[], Any]] = [
        lambda: replay.count("episodes", [old, new, "nobody"]),
        lambda: replay.query("select count(*) as n from episodes", {}).to_pylist(),
        lambda: replay.runs_with("abc"),
        lambda: replay.find_episode("abc")["run_id"],
    ]
    for use, wanted in zip(uses, [2, [{"n": 2}], [old, new], new], strict=True):
        replay.path.unlink()
        replay.rows("episodes", [new])  # so that the newer one is taken in before the older one
        assert use() == wanted


@pytest.mark.parametrize("status", ["RUNNING", "FAILED", "KILLED"])
def test_a_run_that_is_not_finished_is_never_taken_in(workspace: Workspace, status: Any) -> None:
    tracking = workspace.tracking
    run_id = tracking.start("source", "half a run", {"stage": "source"})
    (file,) = export_rows(run_id, {"turns": AWKWARD["turns"]}, workspace.home / "rows")
    tracking.save(run_id, file, "rows/turns.parquet")
    tracking.write_json(run_id, "outputs.json", {"rows": {"turns": 4}})
    tracking.seal(run_id)
    if status != "RUNNING":
        tracking.finish(run_id, status)
    with pytest.raises(MissingInput, match="it never committed any"):
        workspace.replay.rows("turns", [run_id])
    assert workspace.replay.count("turns", [run_id]) == 0
    assert (complete(workspace.replay), workspace.replay.path.exists()) == ({}, False)


def cut(file: Path, run_id: str) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def gone(file: Path, run_id: str) -> None:
    file.unlink()


def unsealed_and_cut(file: Path, run_id: str) -> None:
    (file.parent.parent / artifacts.SEAL).unlink()
    cut(file, run_id)


def unsealed_and_gone(file: Path, run_id: str) -> None:
    (file.parent.parent / artifacts.SEAL).unlink()
    file.unlink()


def of_another_run(file: Path, run_id: str) -> None:
    export_rows("f" * 32, {"turns": AWKWARD["turns"]}, file.parent)
    artifacts.seal(file.parent.parent)


def of_fewer_columns(file: Path, run_id: str) -> None:
    pq.write_table(pq.read_table(file).drop_columns(["seconds"]), file)
    artifacts.seal(file.parent.parent)


def of_another_type(file: Path, run_id: str) -> None:
    table = pq.read_table(file)
    at = table.schema.get_field_index("turn")
    pq.write_table(table.set_column(at, "turn", table.column("turn").cast("double")), file)
    artifacts.seal(file.parent.parent)


@pytest.mark.parametrize("harm", [cut, gone, unsealed_and_cut, unsealed_and_gone, of_another_run, of_fewer_columns, of_another_type])  # fmt: skip
def test_damaged_or_missing_parquet_is_one_sentence_and_no_row(
    workspace: Workspace, harm: Callable[[Path, str], None]
) -> None:
    whole, harmed = run_of(workspace, AWKWARD), run_of(workspace, AWKWARD, seed=1)
    harm(folder_of(workspace, harmed) / "rows" / "turns.parquet", harmed)
    workspace.replay.path.unlink()
    named = "outputs.json" if harm is unsealed_and_gone else "rows/turns.parquet"
    with pytest.raises(Changed, match=rf"{named}.*Run: turnwise verify --mend, then the same command again$") as told:
        workspace.replay.rows("turns", [harmed])
    assert str(told.value).count("\n") == 0 and harmed in str(told.value)
    assert not workspace.replay.path.exists()
    assert complete(workspace.replay) == {harmed: str(told.value)}  # the other runs are taken in
    assert len(workspace.replay.rows("turns", [whole])) == 4
    assert workspace.replay.lacking() == [harmed]


def test_a_run_of_before_there_were_seals_and_counts_is_taken_in(workspace: Workspace) -> None:
    run_id = run_of(workspace, AWKWARD)
    before = workspace.replay.rows("targets", [run_id])
    folder = folder_of(workspace, run_id)
    (folder / artifacts.SEAL).unlink()
    (folder / "outputs.json").write_text(json.dumps({"metrics": {}}))
    workspace.replay.path.unlink()
    assert workspace.replay.rows("targets", [run_id]) == before
    (row,) = workspace.replay.rows("commits", [run_id])
    assert row["n_rows"] == {table: len(rows) for table, rows in sorted(AWKWARD.items()) if rows}


def test_a_file_that_lacks_nothing_asks_nobody(workspace: Workspace) -> None:
    run_id = run_of(workspace, AWKWARD)

    class Nobody:
        def finished(self) -> list[str]:
            raise AssertionError

        def commit_of(self, run_id: str) -> None:
            raise AssertionError

    replay = Replay(workspace.replay.path, source=Nobody())
    assert len(replay.read("turns", [run_id], ["turn"])) == len(replay.rows("turns", [run_id])) == 4
    assert replay.count("turns", [run_id]) == 4


def test_a_rebuilt_file_has_no_orphans_and_takes_the_place_of_a_damaged_one(workspace: Workspace) -> None:
    run_id = run_of(workspace, AWKWARD)
    file = workspace.replay.path
    before = content(file)
    workspace.replay.commit("f" * 32, "source", AWKWARD)
    assert orphans(workspace) == ["f" * 32]
    whole = file.read_bytes()
    for damaged in (whole, b"", b"no database", whole[: len(whole) // 2], os.urandom(20_000)):
        file.write_bytes(damaged)
        file.with_name(f"{file.name}.wal").write_bytes(b"" if damaged == whole else os.urandom(100))
        if damaged != whole:
            with pytest.raises(TurnwiseError, match=r"Run: turnwise verify --rebuild"):
                workspace.replay.rows("turns", [run_id])
        assert rebuild(workspace.replay) == {}
        assert content(file) == before
    assert not list(file.parent.glob("*.new.duckdb*"))


def test_rows_that_no_artifact_has_any_more_are_copied_from_the_old_file(workspace: Workspace) -> None:
    kept, lost = run_of(workspace, AWKWARD), run_of(workspace, {"turns": AWKWARD["turns"]}, seed=1)
    (folder_of(workspace, lost) / "rows" / "turns.parquet").unlink()
    before = content(workspace.replay.path)
    assert rebuild(workspace.replay) == {}
    assert content(workspace.replay.path) == before
    workspace.replay.path.write_bytes(b"damaged")
    assert rebuild(workspace.replay).keys() == {lost}
    assert workspace.replay.rows("turns", [kept])


READER = """
import sys
from pathlib import Path
from toys import toy_workspace
workspace = toy_workspace(Path(sys.argv[1]))
sys.stdin.readline()
print(len(workspace.replay.rows("turns", sys.argv[2:])), "mlflow" in sys.modules)
"""


def test_two_processes_that_take_in_the_same_runs_at_once_double_nothing(workspace: Workspace) -> None:
    """Nor do they import MLflow."""
    runs = [run_of(workspace, AWKWARD, seed) for seed in range(12)]
    before = content(workspace.replay.path)
    for _ in range(2):
        workspace.replay.path.unlink()
        command = [sys.executable, "-c", READER, str(workspace.home), *runs]
        both = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=toys.ENVIRONMENT)
            for _ in range(2)
        ]
        assert [one.communicate("go\n", timeout=120)[0] for one in both] == ["48 False\n"] * 2
        assert content(workspace.replay.path) == before


def test_a_reader_that_finds_the_rows_there_already_leaves_them(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one came between the look and the transaction."""
    run_id = run_of(workspace, AWKWARD)
    before = content(workspace.replay.path)
    workspace.replay.path.unlink()
    other, source = Replay(workspace.replay.path, source=workspace.replay.source), workspace.replay.source
    assert source is not None
    asked = source.commit_of

    def slow(self: Any, one: str) -> Any:
        found = asked(one)
        monkeypatch.undo()
        assert len(other.rows("turns", [run_id])) == 4
        return found

    monkeypatch.setattr(type(source), "commit_of", slow)
    assert len(workspace.replay.rows("turns", [run_id])) == 4
    assert content(workspace.replay.path) == before


KILLED = """
import os, signal, sys
from pathlib import Path
from stages.store import duckdb_file
from stages.store.upkeep import rebuild
from toys import toy_workspace

home, point, run_id = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
attach = duckdb_file.attach

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

class Deadly:
    def __init__(self, connection):
        self.connection = connection
    def __getattr__(self, name):
        return getattr(self.connection, name)
    def execute(self, query, *parameters):
        if query.startswith(point):
            die()
        done = self.connection.execute(query, *parameters)
        if point == "committed" and query == "commit":
            die()
        return done

duckdb_file.attach = lambda *arguments: Deadly(attach(*arguments))
if point == "replace":
    Path.replace = lambda self, target: die()
workspace = toy_workspace(home)
rebuild(workspace.replay) if sys.argv[4] else workspace.replay.rows("turns", [run_id])
"""
POINTS = ("insert into turns", "insert into commits", "commit", "committed")


def killed(workspace: Workspace, point: str, run_id: str, how: str = "") -> None:
    command = [sys.executable, "-c", KILLED, str(workspace.home), point, run_id, how]
    assert subprocess.run(command, env=toys.ENVIRONMENT, timeout=120, check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize("point", POINTS)
def test_a_reader_killed_while_it_takes_rows_in_leaves_all_of_a_run_or_nothing(
    workspace: Workspace, point: str
) -> None:
    run_id = run_of(workspace, AWKWARD)
    before = content(workspace.replay.path)
    workspace.replay.path.unlink()
    killed(workspace, point, run_id)
    alone = Replay(workspace.replay.path)  # which can take in nothing
    assert alone.count("commits", [run_id]) == (point == "committed")
    assert [alone.count(table, [run_id]) for table in ("turns", "episodes", "targets")] == ([4, 2, 1] if point == "committed" else [0] * 3)  # fmt: skip
    assert len(workspace.replay.rows("turns", [run_id])) == 4
    assert content(workspace.replay.path) == before


@pytest.mark.parametrize("point", [*POINTS, "checkpoint", "replace"])
def test_a_rebuild_that_is_killed_leaves_the_old_file_and_is_begun_again(workspace: Workspace, point: str) -> None:
    run_id = run_of(workspace, AWKWARD)
    before, whole = content(workspace.replay.path), workspace.replay.path.read_bytes()
    killed(workspace, point, run_id, "rebuild")
    assert workspace.replay.path.read_bytes() == whole
    assert rebuild(workspace.replay) == {}
    assert content(workspace.replay.path) == before


def test_a_rebuild_that_fails_leaves_nothing_beside_the_old_file(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(workspace, AWKWARD)
    whole = workspace.replay.path.read_bytes()

    def interrupted(self: Any, run_id: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(workspace.replay.source), "commit_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rebuild(workspace.replay)
    assert workspace.replay.path.read_bytes() == whole
    assert not list(workspace.replay.path.parent.glob("*.new.duckdb*"))


@pytest.mark.parametrize("told", [5, {"turns": 3}, {"turns": None}, {**{name: len(rows) for name, rows in AWKWARD.items()}, "more": 1}])  # fmt: skip
def test_counts_that_are_not_those_of_the_files_are_one_sentence(workspace: Workspace, told: Any) -> None:
    run_id = run_of(workspace, AWKWARD)
    folder = folder_of(workspace, run_id)
    (folder / "outputs.json").write_text(json.dumps({"rows": told}))
    artifacts.seal(folder)
    workspace.replay.path.unlink()
    with pytest.raises(Changed, match=r"outputs\.json, but it tells of .*Run: turnwise verify --mend"):
        workspace.replay.rows("turns", [run_id])


def test_a_rebuild_waits_for_who_holds_the_file_and_then_names_them(workspace: Workspace) -> None:
    run_of(workspace, AWKWARD)
    code = "import duckdb, sys; raw = duckdb.connect(sys.argv[1]); print('held', flush=True); sys.stdin.readline()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(workspace.replay.path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(TurnwiseError, match=rf"PID {holder.pid}\) holds it"):
            rebuild(Replay(workspace.replay.path, wait_s=0.2, source=workspace.replay.source))
        holder.kill()
    assert workspace.replay.lacking() == []


def test_a_stage_reads_what_its_file_lacks(workspace: Workspace) -> None:
    source = execute(toys.SOURCE, run=toys.ToyRun(), inputs={}, iteration=0, workspace=workspace).run_id
    workspace.replay.path.unlink()
    read = []

    def run(context: Context) -> Outputs:
        read.extend(context.replay.read("turns", [source], ["turn"]))
        return Outputs({})

    stage = replace(toys.DOUBLE, run=run)
    execute(stage, run=toys.ToyRun(), inputs={"source": [source]}, iteration=0, workspace=workspace)
    assert [row["turn"] for row in read] == [0, 1, 2, 3, 4]
