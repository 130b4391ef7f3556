"""A pipeline run becomes a bundle: its stage runs with all that they read, directly or not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from flows.book import EXPERIMENT
from flows.keep.bundle import layout
from flows.keep.bundle.layout import LeftOut, Manifest
from flows.registry import load_stage
from flows.rerun import stored_config, stored_summary
from stages.frame.types import UsageError
from stages.llm.roles import prompts_folder
from stages.store import artifacts
from stages.store.contents import named_paths, path_hash
from stages.store.execute import lineage_inputs
from stages.store.notes import code_version
from stages.store.tables import SCHEMA_VERSION
from stages.store.workspace import Workspace


def write(workspace: Workspace, run_id: str, folder: Path) -> list[Path]:
    """Write the bundle of an ended pipeline run to an empty folder. The manifest comes last: a killed write is no
    bundle. Raises UsageError for another run, Changed where an artifact is not what was written.
    """
    tracking = workspace.tracking
    if (found := tracking.experiment(run_id)) != EXPERIMENT:
        raise UsageError(
            f"export --what bundle: wanted a pipeline run, found a run of {found}, {run_id[:8]}. See: turnwise runs"
        )
    last = tracking.record_of(run_id)
    runs = [*in_order(workspace, stage_runs(workspace, run_id)), run_id]
    for one in runs:
        record = last if one == run_id else tracking.record_of(one)
        place = folder / layout.RUNS / one
        stored = tracking.artifact(one, "")
        _copy(_files(stored), stored, place / layout.ARTIFACTS)
        (place / layout.RECORD).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
    left_out = list(_copy_named(workspace, runs[:-1], folder / layout.FILES))
    _copy_prompts(workspace, runs[:-1], folder / layout.PROMPTS)
    manifest = Manifest(
        format="turnwise bundle",
        schema_version=layout.SCHEMA,
        replay_schema=SCHEMA_VERSION,
        git_commit=code_version()["git_commit"],
        run=run_id,
        runs=runs,
        left_out=left_out,
    )
    artifacts.write_json(folder, layout.MANIFEST, manifest.model_dump())
    artifacts.write_json(folder, layout.HASHES, hashes(folder))
    return _files(folder)


def hashes(folder: Path) -> dict[str, str]:
    """Path -> sha256, of every file but the one that keeps them."""
    files = [file for file in _files(folder) if file != folder / layout.HASHES]
    return {file.relative_to(folder).as_posix(): artifacts.sha256(file) for file in files}


def stage_runs(workspace: Workspace, run_id: str) -> list[str]:
    """All stage runs of a pipeline run, each once, in the order in which they are made."""
    summary = stored_summary(workspace, run_id)
    ids = [one for row in summary["iterations"] for one in row["runs"].values()]
    parts = [summary[part]["run_id"] for part in ("base", "final") if summary[part]]
    return list(dict.fromkeys([*parts[:1], *ids, *parts[1:]]))


def in_order(workspace: Workspace, runs: Sequence[str]) -> list[str]:
    """The runs and all that they read, directly or not, each after what it reads."""
    found: dict[str, None] = {}

    def add(run_id: str) -> None:
        if run_id not in found:
            for one in (one for ids in lineage_inputs(workspace, run_id).values() for one in ids):
                add(one)
            found[run_id] = None

    for run_id in runs:
        add(run_id)
    return list(found)


def _files(folder: Path) -> list[Path]:
    return sorted(one for one in folder.rglob("*") if one.is_file())


def _copy(files: Iterable[Path], source: Path, target: Path) -> None:
    """Copy files of the folder `source` to the same places below `target`."""
    for file in files:
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)


def _copy_named(workspace: Workspace, runs: Sequence[str], target: Path) -> Iterator[LeftOut]:
    """Copy what the configs name, and yield what is too large for it or lies elsewhere."""
    configs = [(load_stage(workspace.tracking.experiment(one)), stored_config(one, workspace)) for one in runs]
    paths = {path for stage, config in configs for path in named_paths(stage, config)}
    for path in sorted({os.path.normpath(path) for path in paths} | {config.model.path for _, config in configs}):
        start = workspace.home / path
        files = [start] if start.is_file() else _files(start)
        size = sum(file.stat().st_size for file in files)
        if not layout.stays_inside(path) or size > layout.LARGEST or not files:
            yield LeftOut(path=path, sha256=path_hash(path), size_bytes=size)
            continue
        _copy((file for file in files if layout.is_data(file.name)), workspace.home, target)


def _copy_prompts(workspace: Workspace, runs: Sequence[str], target: Path) -> None:
    """Of prompts that ship with turnwise; one's own are a path that a config names."""
    for name in sorted({stored_config(one, workspace).roles.prompts for one in runs}):
        if "/" not in name:
            _copy(_files(prompts_folder(name)), prompts_folder(name), target / name)
