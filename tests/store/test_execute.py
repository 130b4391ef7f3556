"""One stage: reused by fingerprint or run, its leavings in order, its inputs guarded, its failures marked and told."""

from __future__ import annotations

import errno
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine, event
from toys import DOUBLE, SOURCE, TOTAL, ToyConfig, ToyRun, run_chain, toy_workspace, visible

from stages.frame.contract import Context, Outputs, Stage
from stages.frame.types import EngineUnavailable, MissingInput, TurnwiseError
from stages.store.execute import execute, lineage_inputs
from stages.store.replay import Replay
from stages.store.stage_context import stage_seed
from stages.store.tracking import Tracking
from stages.store.upkeep import orphans, recover
from stages.store.workspace import Workspace


def run_source(workspace: Workspace, run: ToyRun | None = None, **options: Any) -> Any:
    return execute(SOURCE, run=run or ToyRun(), inputs={}, iteration=0, workspace=workspace, **options)


def failing(error: BaseException) -> Stage:
    def run(context: Context) -> Outputs:
        (context.workdir / "half.txt").write_text("half")
        raise error

    return replace(SOURCE, run=run)


def test_a_finished_run_is_reused_and_says_what_the_first_one_said(workspace: Workspace, home: Path) -> None:
    first = run_chain(workspace)
    second = run_chain(toy_workspace(home))
    assert [each.reused for each in first] == [False, False, False]
    assert [each.reused for each in second] == [True, True, True]
    assert [replace(each, reused=True) for each in first] == second
    assert visible(workspace, first) == visible(workspace, second)


def test_another_config_iteration_or_seed_is_a_new_run_and_leaves_the_old(workspace: Workspace) -> None:
    first = run_source(workspace)
    others = [
        run_source(workspace, ToyRun(source=ToyConfig(rows=3))),
        run_source(workspace, ToyRun(seed=1)),
        execute(SOURCE, run=ToyRun(), inputs={}, iteration=1, workspace=workspace),
        run_source(workspace, force=True),
    ]
    assert len({each.run_id for each in [first, *others]}) == 5
    assert not any(each.reused for each in others)
    assert workspace.replay.count("turns", [first.run_id]) == 5
    assert run_source(workspace).run_id == others[-1].run_id  # the newest of the same fingerprint


def test_a_forced_run_gives_the_same_rows(workspace: Workspace) -> None:
    first, second = run_chain(workspace), run_chain(workspace, force=True)
    assert not any(each.reused for each in second)
    assert visible(workspace, first) == visible(workspace, second)


def test_a_changed_middle_stage_reuses_what_lies_above_it(workspace: Workspace) -> None:
    first = run_chain(workspace)
    second = run_chain(workspace, ToyRun(double=ToyConfig(scale=3.0)))
    assert [each.reused for each in second] == [True, False, False]
    assert second[0].run_id == first[0].run_id
    # one rounding a row
    assert second[2].metrics["total/loss"] == pytest.approx(3 * first[2].metrics["total/loss"], rel=1e-12)


def test_what_a_run_leaves_in_the_store(workspace: Workspace) -> None:
    parent = workspace.tracking.start("pipeline", "demo", {})
    source = run_source(workspace, parent=parent, tags={"rerun_of": "old"})
    double = execute(
        DOUBLE, run=ToyRun(), inputs={"source": [source.run_id]}, iteration=0, workspace=workspace, parent=parent
    )
    tracking = workspace.tracking
    tags = tracking.tags(source.run_id)
    assert tags.keys() >= {
        "fingerprint",
        "pipeline",
        "iteration",
        "inputs",
        "git_commit",
        "git_dirty",
        "seed",
        "rerun_of",
        "host",
        "pid",
    }
    assert (tags["pipeline"], tags["rerun_of"], tags["seed"], tags["iteration"]) == (parent, "old", "0", "0")
    assert (
        json.loads(tracking.tags(double.run_id)["inputs"])
        == {"source": [source.run_id]}
        == lineage_inputs(workspace, double.run_id)
    )
    assert tracking.metrics(source.run_id).keys() == {"source/rows", "source/loss", "source/run_s", "source/cpu_s"}
    assert (
        tracking._client.get_run(source.run_id).data.params.items()
        >= {"source.rows": "5", "task.max_turns": "8", "seed": "0"}.items()
    )
    config = json.loads(tracking.artifact(source.run_id, "config.json").read_text())
    assert config["config"]["source"] == {"rows": 5, "scale": 1.0}
    assert config["config"].keys() == {"source", "task", "model", "roles"}
    kept = pq.read_table(tracking.artifact(source.run_id, "rows/turns.parquet")).to_pylist()
    assert kept == workspace.replay.rows("turns", [source.run_id])
    assert not (tracking.artifact(double.run_id, "rows") / "turns.parquet").exists()
    assert orphans(workspace) == []
    assert list((workspace.home / "data" / "tmp").iterdir()) == []


def test_the_context_holds_what_the_contract_says(workspace: Workspace) -> None:
    seen: list[Context] = []

    def run(context: Context) -> Outputs:
        seen.append(context)
        assert list(context.workdir.iterdir()) == []
        context.progress("rows", 3).advance(2)
        return Outputs({})

    first, second = run_source(workspace), run_source(workspace, ToyRun(seed=1))
    stage = replace(TOTAL, run=run)
    execute(
        stage,
        run=ToyRun(seed=4),
        inputs={"source": [first.run_id, second.run_id], "double": []},
        iteration=7,
        workspace=workspace,
    )
    (context,) = seen
    assert (context.config, context.iteration, context.seed) == (ToyConfig(), 7, stage_seed(4, "total", 7))
    assert context.inputs == {"source": [first.run_id, second.run_id]}
    assert (context.latest("source"), context.latest("double")) == (second.run_id, None)
    assert not context.workdir.exists()


def test_a_stage_sees_only_its_inputs(workspace: Workspace) -> None:
    source, stranger = run_source(workspace), run_source(workspace, ToyRun(seed=1))

    def rows(context: Context) -> Outputs:
        return Outputs({"rows": float(len(context.replay.read("turns", [source.run_id, stranger.run_id], ["turn"])))})

    def file(context: Context) -> Outputs:
        return Outputs({}, files={"copy": context.artifact(stranger.run_id, "adapter")})

    for look in (rows, file):
        stage = replace(DOUBLE, run=look)
        with pytest.raises(ValueError, match=f"double reads run {stranger.run_id}, which is not among its inputs"):
            execute(stage, run=ToyRun(), inputs={"source": [source.run_id]}, iteration=0, workspace=workspace)
    with pytest.raises(ValueError, match=r"declares inputs .* but was given total"):
        execute(DOUBLE, run=ToyRun(), inputs={"total": [source.run_id]}, iteration=0, workspace=workspace)


@pytest.mark.parametrize("status", ["FAILED", "KILLED", "RUNNING"])
def test_a_run_that_did_not_finish_is_no_input_even_where_it_has_rows(workspace: Workspace, status: Any) -> None:
    dead = workspace.tracking.start("source", "source 0", {"fingerprint": "f"})
    workspace.replay.commit(dead, "source", {})
    if status != "RUNNING":
        workspace.tracking.finish(dead, status)
    with pytest.raises(
        MissingInput,
        match=f"double needs source run {dead}, but that run is not finished. Run: turnwise rerun source --of {dead}",
    ):
        execute(DOUBLE, run=ToyRun(), inputs={"source": [dead]}, iteration=0, workspace=workspace)
    assert orphans(workspace) == [dead]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineUnavailable("down"), "FAILED"),
        (ZeroDivisionError("no"), "FAILED"),
        (KeyboardInterrupt(), "KILLED"),
        (SystemExit(1), "KILLED"),
    ],
    ids=lambda value: str(value) or "interrupt",
)
def test_a_stage_that_raises_leaves_a_marked_run_and_nothing_to_read(
    workspace: Workspace, error: BaseException, status: str
) -> None:
    with pytest.raises(type(error)) as caught:
        execute(failing(error), run=ToyRun(), inputs={}, iteration=0, workspace=workspace)
    assert caught.value is error
    (info,) = workspace.tracking.runs("source", 5)
    assert info.status == status
    assert info.tags["error"].startswith(type(error).__name__)
    assert workspace.replay.count("commits", [info.run_id]) == 0
    assert list((workspace.home / "data" / "tmp").iterdir()) == []
    again = run_source(workspace)
    assert not again.reused
    assert workspace.replay.count("turns", [info.run_id, again.run_id]) == 5


@pytest.mark.parametrize("written", ["runs", "metrics"])
def test_an_interrupt_waits_for_a_write_of_the_store(written: str, workspace: Workspace) -> None:
    """A session that is broken off while it commits is not always closed by SQLAlchemy: the run would stay RUNNING, after
    a wait for its own lock. So would one that is interrupted before anybody knows its id.
    """

    def interrupt(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(f"INSERT INTO {written} "):
            signal.raise_signal(signal.SIGINT)

    def run(context: Context) -> Outputs:
        (own,) = workspace.tracking.runs("source", 1)
        workspace.tracking.log(own.run_id, {"loss": 1.0})
        raise AssertionError("the interrupt was lost")

    event.listen(Engine, "before_cursor_execute", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            execute(replace(SOURCE, run=run), run=ToyRun(), inputs={}, iteration=0, workspace=workspace)
    finally:
        signal.signal(signal.SIGINT, before)
        event.remove(Engine, "before_cursor_execute", interrupt)
    (info,) = workspace.tracking.runs("source", 5)
    assert (info.status, info.tags["error"]) == ("KILLED", "KeyboardInterrupt")
    assert info.metrics == ({"loss": 1.0} if written == "metrics" else {})


def test_rows_that_do_not_fit_fail_the_stage_before_anything_is_written(workspace: Workspace) -> None:
    stage = replace(SOURCE, run=lambda context: Outputs({}, {"turns": [{"turn": 1}]}))
    with pytest.raises(ValueError, match="a row of turns must have exactly"):
        execute(stage, run=ToyRun(), inputs={}, iteration=0, workspace=workspace)
    assert [info.status for info in workspace.tracking.runs("source", 5)] == ["FAILED"]
    assert not workspace.replay.path.exists()


def test_a_full_disk_is_one_sentence_wherever_it_is_met(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(TurnwiseError, match=r"the disk is full\. Free some space and run the same command again"):
        execute(failing(full), run=ToyRun(), inputs={}, iteration=0, workspace=workspace)

    def fail(*arguments: Any, **options: Any) -> None:
        raise full

    for owner, name in (
        ("shutil", "copyfile"),
        ("shutil", "copytree"),
        ("pyarrow.parquet", "write_table"),
        ("pathlib.Path", "write_text"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"{owner}.{name}", fail)
            with pytest.raises(TurnwiseError, match="the disk is full"):
                run_source(workspace)
    assert {info.status for info in workspace.tracking.runs("source", 9)} == {"FAILED"}
    assert not workspace.replay.path.exists()
    assert not run_source(workspace).reused


def test_other_os_errors_keep_their_name(workspace: Workspace) -> None:
    with pytest.raises(PermissionError):
        execute(
            failing(PermissionError(errno.EACCES, "not yours")),
            run=ToyRun(),
            inputs={},
            iteration=0,
            workspace=workspace,
        )


def test_a_failure_between_commit_and_end_leaves_rows_that_nobody_reads(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Tracking, "finish", lambda *arguments: (_ for _ in ()).throw(TurnwiseError("store locked")))
        with pytest.raises(TurnwiseError, match="store locked"):
            run_source(workspace)
    (lost,) = orphans(workspace)
    again = run_source(workspace)
    assert not again.reused
    assert again.run_id != lost
    assert workspace.tracking.status(lost) == "RUNNING"  # this process lives, so `recover` leaves it
    assert recover(workspace) == []


def test_the_engine_is_made_only_for_a_stage_that_runs(workspace: Workspace) -> None:
    made: list[Any] = []

    def engine(run: Any) -> Any:
        made.append(run)

    watched = replace(workspace, engine=engine)
    run_source(watched)
    run_source(watched)
    assert made == [ToyRun()]


def test_the_order_is_artifacts_metrics_rows_end(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill is harmless by this order: whatever ends a run well has all its leavings behind it."""
    calls: list[str] = []
    for owner, name in ((Tracking, "save"), (Tracking, "record"), (Replay, "commit"), (Tracking, "finish")):

        def noted(*arguments: Any, name: str = name, original: Any = getattr(owner, name), **options: Any) -> Any:
            calls.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, noted)
    run_source(workspace)
    assert list(dict.fromkeys(calls)) == ["save", "record", "commit", "finish"]
