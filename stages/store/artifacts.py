"""Artifacts of runs as plain files under `<root>/<experiment>/<run id>/artifacts`, where MLflow's page finds them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from stages.frame.types import MissingInput
from stages.store.machine import disk_told


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
    """The artifact `path`. Raises MissingInput."""
    local = folder / path
    if not local.exists():
        stage, run_id = folder.parts[-3:-1]
        advice = f"turnwise rerun {stage} --of {run_id}"
        raise MissingInput(
            f"artifact {path} of {stage} run {run_id} was wanted, but {local} does not exist. Run: {advice}"
        )
    return local
