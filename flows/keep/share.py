"""Moves a project into the store that `turnwise.toml` names: its finished runs, with their ids, artifacts and versions.

Runs enter one by one, inputs first. One last step finishes each, so a kill leaves no half run. The same command goes
on. Rows need no step: they lie among the artifacts, and this folder's DuckDB file has them under the same ids.
What the store has already stays, and stays the newest: moved runs count as older. The embedded store is only read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from flows.book import EXPERIMENT
from flows.keep.bundle.write import stage_runs
from stages.frame.types import MissingInput, UsageError
from stages.store import search
from stages.store.equal_work import held
from stages.store.execute import lineage_inputs
from stages.store.shared import FILE, shared_store
from stages.store.tracking import Tracking
from stages.store.workspace import Bar, Workspace

HOW = "docs/how-to/machines.md shows one"


@dataclass(frozen=True)
class Shared:
    """What was moved. left_out: run -> why it was not."""

    new: tuple[str, ...]
    known: int
    running: int  # in the embedded store: they have not ended, and were not moved
    versions: tuple[str, ...]
    left_out: Mapping[str, str]


def share(workspace: Workspace, bar: Bar, say: Callable[[str], None]) -> Shared:
    """Copy the finished runs of the embedded store that are not there yet into the shared one of the same folder.

    Raises UsageError where the folder names no shared store, or has no runs of its own.
    """
    if shared_store(workspace.home) is None:
        raise UsageError(f"share: wanted a {FILE} that names the store, but {workspace.home} has none; {HOW}")
    own, to = Tracking(workspace.home / "mlflow"), workspace.tracking
    stages = search.stage_runs(own.db)
    others = [one for one in own.finished_runs()[::-1] if one not in set(stages)]
    if not (runs := [*stages, *others]):  # a pipeline run begins before its stages
        raise UsageError(f"share: wanted finished runs in {own.db}, found none. Nothing was moved")

    def waiting() -> None:
        say("waiting for another `turnwise share` into this store")

    with held(workspace.lock("share"), waiting), to.claimed("share", waiting):
        there, new, left_out = set(to.finished_runs()), list[str](), dict[str, str]()
        known, progress = len(there.intersection(runs)), bar("runs", len(runs))
        for run_id in runs:
            if run_id not in there:
                try:
                    _move(run_id, replace(workspace, tracking=own), to, there)
                    there.add(run_id)
                    new.append(run_id)
                except MissingInput as error:  # damaged, or of a damaged one: the others are moved all the same
                    left_out[run_id] = str(error)
            progress.advance()
        versions = to.models.take(own.models, there, to.address)
    return Shared(tuple(new), known, len(own.running()), tuple(versions), left_out)


def _move(run_id: str, source: Workspace, to: Tracking, there: set[str]) -> None:
    """Raises MissingInput where a file is not what was written, or where a run that this one names is not there."""
    own = source.tracking
    folder = own.artifact(run_id, "")  # held against its hashes
    experiment = own.experiment(run_id)
    if "stage" in own.tags(run_id):
        named = [one for runs in lineage_inputs(source, run_id).values() for one in runs]
    else:
        named = stage_runs(source, run_id) if experiment == EXPERIMENT else []
    if lacking := [one for one in named if one not in there]:
        raise MissingInput(
            f"{experiment} run {run_id[:8]} names run {lacking[0][:8]}, which was not moved. Run it again"
        )

    def fill() -> None:
        to.save(run_id, folder, ".")
        if changed := to.changed(run_id):
            raise MissingInput(
                f"{changed[0]} of {experiment} run {run_id[:8]} was damaged on its way. Run: turnwise share"
            )

    to.adopt(own.record_of(run_id), fill, older=True)
