"""Artifacts of runs as plain files under `ROOT/EXPERIMENT/RUN/artifacts`, where MLflow's page finds them.

Weights (*.safetensors) can be dropped. A file beside the artifacts first names them, then they are deleted. A reader
looks there first, so a kill in between leaves nothing that seems complete.

A finished run is sealed: a file beside its artifacts has the sha256 of each. Reading a changed artifact is an error.
Runs from before 2026-11-23 have no seal and are read without this check.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from stages.frame.types import Changed, Dropped, MissingInput
from stages.store.machine import disk_told, whole

DROPPED = "dropped.json"
"""Names the files of a run's artifacts that were dropped."""
SEAL = "sha256.json"
"""Artifact path -> sha256, of a run that is finished."""
_seen: set[tuple[Path, int, int]] = set()  # (file, size, time of change) that this process has read and found right


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


def write_text(folder: Path, path: str, text: str) -> None:
    """Write a text; the file changes whole or not at all, since it may be read meanwhile."""
    with whole(folder / path) as file:
        file.write_text(text, encoding="utf-8")


def write_json(folder: Path, path: str, value: Any) -> None:
    """Write a value as JSON, as `write_text` does."""
    write_text(folder, path, json.dumps(value, indent=1) + "\n")


def seal(folder: Path) -> None:
    """Keep the hash of every file."""
    write_json(folder, SEAL, {name: sha256(folder / name) for name in sorted(files_of(folder) - {SEAL})})


def rows_of(folder: Path) -> list[str]:
    """Names of the files of a run's rows, as sealed; without a seal, of those that are there."""
    note = folder / SEAL
    names: Collection[str] = read_json(note) if note.is_file() else files_of(folder)
    return sorted(name for name in names if name.startswith("rows/"))


def files_of(folder: Path) -> set[str]:
    """Names of all files of a run."""
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def changed(folder: Path, path: str = "") -> list[str]:
    """Names of the sealed files, of all or of those that are or are below `path`, that are not what they were. One that
    was dropped, or is not there, is none of them. The seal itself, where it lacks a file and names one that
    is not there. Of a run without a seal: those that should be JSON and are not.
    """
    note = folder / SEAL
    try:
        gone = set(dropped(folder))
    except Changed:
        return [DROPPED]
    try:
        sealed: dict[str, str] = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else {}
    except ValueError:
        return [SEAL]
    if not note.is_file():
        files = [folder / path] if path else sorted(folder.glob("*.json"))
        return [file.name for file in files if file.suffix == ".json" and file.is_file() and _value(file) is None]
    there = files_of(folder) - {DROPPED, SEAL}
    if there - sealed.keys() and sealed.keys() - there - gone:  # a name in it is not what it was
        return [SEAL]
    wanted = [name for name in sealed if not path or name == path or name.startswith(f"{path}/")]
    return [
        name
        for name in wanted
        if name not in gone and (folder / name).is_file() and not _is_sealed(folder / name, sealed[name])
    ]


def _is_sealed(file: Path, wanted: str) -> bool:
    stat = file.stat()
    key = (file, stat.st_size, stat.st_mtime_ns)
    if key not in _seen:
        if sha256(file) != wanted:
            return False
        _seen.add(key)
    return True


def sha256(file: Path) -> str:
    """Of the file as it is now."""
    with file.open("rb") as read:
        return hashlib.file_digest(read, "sha256").hexdigest()


def existing(folder: Path, path: str) -> Path:
    """The artifact `path`. Raises Dropped, MissingInput, or Changed where it is not what was written."""
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
    if broken := changed(folder, path):
        raise _changed(folder, broken[0])
    return local


def read_json(file: Path) -> Any:
    """The value of an artifact, whose path `existing` gave. Raises Changed where it is none."""
    if (value := _value(file)) is None:
        raise _changed(file.parent, file.name)
    return value


def _value(file: Path) -> Any:
    """None where the file holds no JSON; no artifact is null."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None


def _changed(folder: Path, name: str) -> Changed:
    stage, run_id = folder.parts[-3:-1]
    return Changed(
        f"artifact {name} of {stage} run {run_id} is not what was written: it was changed, or cut. "
        "Run: turnwise verify --mend, then the same command again"
    )


def dropped(folder: Path) -> list[str]:
    """Names of the files that gc dropped or was about to. Raises Changed where their list cannot be read."""
    note = folder / DROPPED
    found: list[str] = read_json(note) if note.is_file() else []
    return found


def weights(folder: Path) -> dict[str, int]:
    """Bytes of each file of weights that is there, by its name in the folder."""
    return {str(file.relative_to(folder)): file.stat().st_size for file in sorted(folder.rglob("*.safetensors"))}


def unlink(folder: Path, names: Collection[str]) -> None:
    """Delete files. One that is not there is none."""
    for name in names:
        (folder / name).unlink(missing_ok=True)


def drop(
    folder: Path,
    names: Collection[str],
    wanted: Callable[[], bool],
    send: Callable[[Path, str], None] = lambda folder, path: None,
    remove: Callable[[Path, Collection[str]], None] = unlink,
) -> bool:
    """Delete these files, unless the run is wanted after all; whether they are gone.

    wanted: is asked when readers can see that the files are dropped. Who began to read before is among the runs that it
    looks at; who begins later is told. send, remove: of a `Place`.
    """
    before = dropped(folder)
    write_json(folder, DROPPED, sorted({*before, *names}))
    send(folder, DROPPED)
    if wanted():
        if before:
            write_json(folder, DROPPED, before)
            send(folder, DROPPED)
        else:
            remove(folder, [DROPPED])
        return False
    remove(folder, names)
    return True
