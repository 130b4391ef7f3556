"""Puts the runs of a bundle into the stores of this project, with their ids and fingerprints. They can be shown, rerun
and reused as if they were made here.

Runs enter one by one, inputs first. One last step finishes each, so a kill leaves no half run. The same command goes
on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass

from flows.book import EXPERIMENT
from flows.keep.bundle import check
from flows.keep.bundle.layout import FILES, Bundle
from stages.store.artifacts import sha256
from stages.store.contents import path_hash
from stages.store.equal_work import held
from stages.store.machine import whole
from stages.store.mlflow_run import Record
from stages.store.workspace import Workspace


@dataclass(frozen=True)
class Taken:
    """What an import did. different: files of the project that are not those of the bundle, and were left as they are."""

    run_id: str
    new: tuple[str, ...]
    known: tuple[str, ...]
    different: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()  # files that the bundle names and does not hold, and the project lacks


def take_in(bundle: Bundle, workspace: Workspace, say: Callable[[str], None] = lambda text: None) -> Taken:
    """Put the runs of a bundle that are not here yet into the stores, and its files where there are none."""
    with held(workspace.lock("import"), lambda: say("waiting for another import")):
        different = tuple(_place(bundle, path, workspace) for path in bundle.files)
        new = {record.run_id: _take(bundle, record, workspace) for record in bundle.records}
    return Taken(
        bundle.manifest.run,
        tuple(run_id for run_id, is_new in new.items() if is_new),
        tuple(run_id for run_id, is_new in new.items() if not is_new),
        tuple(path for path in different if path),
        tuple(one.path for one in bundle.manifest.left_out if not one.sha256 or path_hash(one.path) != one.sha256),
    )


def _take(bundle: Bundle, record: Record, workspace: Workspace) -> bool:
    tracking, run_id = workspace.tracking, record.run_id

    def fill() -> None:
        tracking.save(run_id, bundle.artifacts(run_id), ".")
        if record.experiment != EXPERIMENT and not workspace.replay.count("commits", [run_id]):
            workspace.replay.commit(run_id, record.experiment, check.rows(bundle, run_id))

    return tracking.adopt(record, fill)


def _place(bundle: Bundle, path: str, workspace: Workspace) -> str:
    """Put a file where there is none; its path where there is another one."""
    source, target = bundle.folder / FILES / path, workspace.home / path
    if target.exists():
        return "" if target.is_file() and sha256(target) == sha256(source) else path
    with whole(target) as file:
        shutil.copyfile(source, file)
    return ""
