"""Run one stage, or reuse its finished run. Files, metrics and rows are written in an order that survives a kill.

    fingerprint -> finished run? reuse : start -> run -> artifacts, metrics -> rows (one transaction) -> finish

Only finished runs are ever read, so a kill before the last arrow leaves nothing that counts. That holds for the files
of a half-done run, and for rows that were committed before the run finished (docs/explanation/architecture.md, "Stage
contract").
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.frame.contract import Outputs, Stage, check_roles, fingerprint, ingredients
from stages.frame.own import apart
from stages.frame.sections import WAYS
from stages.frame.types import MissingInput, TurnwiseError
from stages.llm.metered import Metered
from stages.store.contents import contents
from stages.store.equal_work import held
from stages.store.machine import disk_full, is_here
from stages.store.notes import code_version, stage_note
from stages.store.runs import NOTE, flat
from stages.store.stage_context import context_of
from stages.store.tables import export_rows
from stages.store.tracking import Status, Tracking
from stages.store.workspace import Bar, StageRun, Workspace, silent

INGREDIENTS = "fingerprint.json"
"""Artifact of a stage run: what its fingerprint is the hash of. Runs of before 2026-11-23 have none."""


def execute(
    stage: Stage,
    *,
    run: Any,
    inputs: Mapping[str, Sequence[str]],
    iteration: int,
    workspace: Workspace,
    parent: str | None = None,
    name: str = "",
    force: bool = False,
    tags: Mapping[str, str] = {},
    progress: Bar = silent,
    say: Callable[[str], None] = lambda text: None,
) -> StageRun:
    """Reuse the finished run of this stage with the same fingerprint, or make one.

    If another process is making it, this one waits and tells `say`. With force it is then made once more.

    run: the RunConfig: `seed`, the shared sections, and one section a stage. inputs: upstream stage -> run ids, oldest
    first. parent: the pipeline's run. name: what a new run is called. Raises MissingInput if an input run is not
    finished, UsageError if a role's prompt is missing, and what the stage raises. The run is then marked FAILED, or
    KILLED on Ctrl-C.
    """
    inputs = {name: list(runs) for name, runs in inputs.items() if runs}
    _check_inputs(stage, inputs, workspace.tracking)
    parts = stage_ingredients(stage, run=run, inputs=inputs, iteration=iteration, workspace=workspace)
    key = fingerprint(parts)
    tracking, checkpoints = workspace.tracking, workspace.checkpoints(key)
    if not force and (done := tracking.finished(key, stage.name)):
        return stored_run(stage, done, iteration, tracking)

    def waiting() -> None:
        say(_same_work(key, stage.name, tracking))

    with held(workspace.lock(key), waiting), tracking.claimed(key, waiting):
        if force:  # from the start, too
            _forget(key, workspace)
        elif done := tracking.finished(key, stage.name):  # by the one that was waited for
            return stored_run(stage, done, iteration, tracking)
        own = {
            "stage": stage.name,
            "fingerprint": key,
            "iteration": str(iteration),
            "seed": str(run.seed),
            "inputs": json.dumps(inputs),
        }
        if parent:
            own["pipeline"] = parent
        own[NOTE] = stage_note(stage.name, iteration, inputs, {**own, **tags}, tracking.link)
        title = name or f"{stage.name} {iteration}"
        run_id = tracking.start(stage.name, title, {**own, **code_version(), **tags}, parent)
        with ending(run_id, workspace):
            found = _run(stage, run_id, run, inputs, iteration, workspace, parts, checkpoints, progress)
        _forget(key, workspace)
        return found


def _forget(key: str, workspace: Workspace) -> None:
    """What a killed run of this fingerprint left for the next one."""
    shutil.rmtree(workspace.checkpoints(key), ignore_errors=True)
    workspace.forget(key)


def stage_fingerprint(
    stage: Stage, *, run: Any, inputs: Mapping[str, Sequence[str]], iteration: int, workspace: Workspace
) -> str:
    """The fingerprint that `execute` looks up, for `--dry-run`. Raises as `stage_ingredients` does."""
    return fingerprint(stage_ingredients(stage, run=run, inputs=inputs, iteration=iteration, workspace=workspace))


def stage_ingredients(
    stage: Stage, *, run: Any, inputs: Mapping[str, Sequence[str]], iteration: int, workspace: Workspace
) -> dict[str, Any]:
    """What that fingerprint is made of. Raises UsageError for a missing prompt, environment, or option of it."""
    inputs = {name: runs for name, runs in inputs.items() if runs}
    hashes = workspace.prompt_hashes(run) if stage.roles else {}
    check_roles(stage, inputs, hashes, where=run.roles.prompts if stage.roles else "")
    shared = {name: getattr(run, name).counted(exclude=WAYS) for name in stage.shared}
    return ingredients(
        stage, getattr(run, stage.name), shared=shared, seed=run.seed, iteration=iteration, prompt_hashes=hashes,
        model_hash=workspace.model_hash(run), inputs=inputs, contents=contents(stage, run),
    )  # fmt: skip


def lineage_inputs(workspace: Workspace, run_id: str) -> dict[str, list[str]]:
    """The inputs that a stored run had: upstream stage -> run ids."""
    stored = workspace.tracking.read_json(run_id, "inputs.json")
    return {str(name): [str(each) for each in runs] for name, runs in stored.items()}


def readers(workspace: Workspace, run_id: str, stage: str) -> list[str]:
    """Finished runs of the stage that read this run, newest first."""

    def read(one: str) -> bool:
        return any(run_id in runs for runs in lineage_inputs(workspace, one).values())

    known = workspace.tracking.reading(run_id, stage)
    return [one for one, says in known if says or (says is None and read(one))]


def _run(
    stage: Stage, run_id: str, run: Any, inputs: Mapping[str, Sequence[str]], iteration: int, workspace: Workspace,
    parts: Mapping[str, Any], checkpoints: Path, progress: Bar,
) -> StageRun:  # fmt: skip
    tracking, workdir = workspace.tracking, workspace.workdir(run_id)
    workdir.mkdir(parents=True)
    config = getattr(run, stage.name)
    shared = {name: getattr(run, name).model_dump(mode="json") for name in stage.sections}
    resolved = {stage.name: config.model_dump(mode="json"), **shared}
    whole = {
        "stage": stage.name,
        "version": stage.version,
        "seed": run.seed,
        "iteration": iteration,
        "config": resolved,
    }
    tracking.write_json(run_id, "config.json", whole)
    tracking.write_json(run_id, "inputs.json", inputs)
    tracking.write_json(run_id, INGREDIENTS, parts)
    engine = Metered(workspace.engine(run))
    context = context_of(
        stage, run=run, inputs=inputs, iteration=iteration, workspace=workspace, engine=engine, workdir=workdir,
        checkpoints=checkpoints, progress=progress,
    )  # fmt: skip
    started, cpu_started = time.perf_counter(), cpu_seconds()
    with apart():  # an environment is foreign code, and so are the libraries
        outputs = workspace.work(stage, context)
    outputs = replace(outputs, metrics={**outputs.metrics, **engine.metrics(stage.name)})
    seconds, cpu_s = time.perf_counter() - started, cpu_seconds() - cpu_started
    _save(stage, run_id, outputs, {"seconds": seconds, "cpu_s": cpu_s}, workspace)
    metrics = {**outputs.metrics, f"{stage.name}/run_s": seconds, f"{stage.name}/cpu_s": cpu_s}
    tracking.record(
        run_id,
        metrics=metrics,
        curves=outputs.curves,
        params={**dict(flat(resolved)), "seed": run.seed, "iteration": iteration},
    )
    tracking.seal(run_id)
    workspace.replay.commit(run_id, stage.name, outputs.rows)
    tracking.finish(run_id)
    return StageRun(stage.name, run_id, iteration, dict(outputs.metrics), False, seconds, cpu_s)


def cpu_seconds() -> float:
    """Processor time of this process and of those that it started and saw end."""
    return sum(os.times()[:4])


def _save(stage: Stage, run_id: str, outputs: Outputs, times: Mapping[str, float], workspace: Workspace) -> None:
    tracking = workspace.tracking
    for path, local in outputs.files.items():
        tracking.save(run_id, local, path)
    for file in export_rows(run_id, outputs.rows, workspace.workdir(run_id) / "rows"):
        tracking.save(run_id, file, f"rows/{file.name}")
    n_rows = {table: len(rows) for table, rows in outputs.rows.items()}
    told = {"stage": stage.name, "metrics": dict(outputs.metrics), "rows": n_rows, **times}
    tracking.write_json(run_id, "outputs.json", told)


def stored_run(stage: Stage, run_id: str, iteration: int, tracking: Tracking) -> StageRun:
    """A finished run as one that is reused. Raises MissingInput where its files are gone."""
    # From the file, not from MLflow's table: that also holds the curves' last values, and cannot hold an infinity.
    outputs = tracking.read_json(run_id, "outputs.json")
    return StageRun(
        stage.name, run_id, iteration, outputs["metrics"], True, float(outputs["seconds"]), float(outputs["cpu_s"])
    )


def _same_work(fingerprint: str, stage: str, tracking: Tracking) -> str:
    working = tracking.working(fingerprint, stage)
    if working is None:
        return "waiting for another process, which does the same work"
    where = "" if is_here(working.tags) else f" on {working.tags['host']}"
    who = f"run {working.run_id[:8]} (process {working.tags['pid']}{where})"
    return f"waiting for {who}, which does the same work"


def _check_inputs(stage: Stage, inputs: Mapping[str, Sequence[str]], tracking: Tracking) -> None:
    for name, runs in inputs.items():
        if name not in stage.inputs:
            raise ValueError(f"{stage.name} declares inputs {stage.inputs}, but was given {name}")
        for run_id in runs:
            if not tracking.is_finished(run_id):
                raise MissingInput(
                    f"{stage.name} needs {name} run {run_id}, but that run is not finished. Run: turnwise rerun {name} --of {run_id}"
                )


@contextmanager
def ending(run_id: str, workspace: Workspace) -> Iterator[None]:
    """Remove the scratch folder, and close the run of a stage that raised."""
    try:
        yield
    except Exception as error:
        _close(run_id, "FAILED", error, workspace)
        where = Path(getattr(error, "filename", None) or workspace.workdir(run_id))
        # A full disk has as many names as there are libraries that write.
        if not isinstance(error, TurnwiseError) and (full := disk_full(error, where)):
            raise full from error
        raise
    except BaseException as error:  # Ctrl-C, or a flow that is being cancelled
        _close(run_id, "KILLED", error, workspace)
        raise
    finally:
        shutil.rmtree(workspace.workdir(run_id), ignore_errors=True)


def _close(run_id: str, status: Status, error: BaseException, workspace: Workspace) -> None:
    # A full disk that stopped the stage stops this too: the run stays RUNNING, unread, until `recover` finds its
    # process gone.
    with suppress(TurnwiseError):
        workspace.tracking.finish(run_id, status, f"{type(error).__name__}: {error}".removesuffix(": "))
