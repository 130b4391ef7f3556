"""Artifacts of runs as plain files under `<root>/<experiment>/<run id>/artifacts`, where MLflow's page finds them.

Weights (*.safetensors) can be dropped. What is dropped is named first, in a file beside the artifacts, and deleted then:
a reader looks there first, so a kill in between leaves nothing that would pass for whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from stages.frame.types import Dropped, MissingInput
from stages.store.machine import disk_told

DROPPED = "dropped.json"
"""Names the files of a run's artifacts that were dropped."""


def folder_of(root: Path, uri: str) -> Path:
    """Local folder of a run's artifacts.

    MLflow stores it as an absolute location. Only its end holds after the project was moved, so only that is used.
    """
    return root.joinpath(*uri.rstrip("/").split("/")[-3:])


def save(folder: Path, local: Path, path: str) -> None:
    """Copy a file or folder to be the artifact `path`."""
    target = folder / path
    with disk_told(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if local.is_dir():
            shutil.copytree(local, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(local, target)


def write_json(folder: Path, path: str, value: Any) -> None:
    """Write a value; the file changes whole or not at all, since a pipeline's summary is read while it runs and after
    it died.
    """
    target = folder / path
    unfinished = target.with_name(f".{target.name}.part")
    with disk_told(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(target)


def existing(folder: Path, path: str) -> Path:
    """The artifact `path`. Raises Dropped where it is, or holds, what was dropped, else MissingInput where it is not."""
    local = folder / path
    if any(name == path or name.startswith(f"{path}/") for name in dropped(folder)):
        stage, run_id = folder.parts[-3:-1]
        told = "was dropped by turnwise gc; it can be made again from the inputs of that run"
        raise Dropped(
            f"artifact {path} of {stage} run {run_id} was wanted, but {told}. Run: turnwise rerun {stage} --of {run_id}",
            run_id,
        )
    if not local.exists():
        stage, run_id = folder.parts[-3:-1]
        advice = f"turnwise rerun {stage} --of {run_id}"
        raise MissingInput(
            f"artifact {path} of {stage} run {run_id} was wanted, but {local} does not exist. Run: {advice}"
        )
    return local


def dropped(folder: Path) -> list[str]:
    """Names of the files that were dropped, or were about to be when gc was killed."""
    note = folder / DROPPED
    found: list[str] = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else []
    return found


def weights(folder: Path) -> dict[str, int]:
    """Bytes of each file of weights that is there, by its name in the folder."""
    return {str(file.relative_to(folder)): file.stat().st_size for file in sorted(folder.rglob("*.safetensors"))}


def drop(folder: Path, names: Collection[str], wanted: Callable[[], bool]) -> bool:
    """Delete these files, unless the run is wanted after all; whether they are gone.

    wanted: is asked when readers can see that the files are dropped. Who began to read before is among the runs that it
    looks at; who begins later is told.
    """
    before = dropped(folder)
    write_json(folder, DROPPED, sorted({*before, *names}))
    if wanted():
        if before:
            write_json(folder, DROPPED, before)
        else:
            (folder / DROPPED).unlink()
        return False
    for name in names:
        (folder / name).unlink(missing_ok=True)
    return True
