"""Reads a bundle back, and checks every file's hash and every value's type before use. Each error is one sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from flows.book import EXPERIMENT
from flows.keep.bundle import layout
from flows.keep.bundle.layout import Bundle, Manifest
from flows.registry import STAGES
from stages.frame.own import is_own
from stages.frame.types import Row, UsageError
from stages.store.artifacts import sha256
from stages.store.mlflow_run import Record
from stages.store.tables import SCHEMA_VERSION, read_parquet

M = TypeVar("M", bound=BaseModel)
OWN = (("task", "env"), ("pretrain", "corpus"))
"""Where a config may name a module of one's own."""
NEVER = ("flows", "stages", "turnwise", "mlflow")
"""Folders of a project where no bundle puts a file: what lies there is found by its name (presets, prompts) or is a store."""
AGAIN = "Write it again: turnwise export RUN FOLDER --what bundle"


def read(folder: Path) -> Bundle:
    """The bundle in a folder. Raises UsageError if it is no bundle, is damaged, or is of a newer turnwise."""
    if not (folder / layout.MANIFEST).is_file():
        raise UsageError(
            f"bundle: wanted a folder with {layout.MANIFEST}, but {str(folder)[:200]} has none. Make one: turnwise export RUN FOLDER --what bundle"
        )
    stored = _json(folder / layout.MANIFEST)
    version = stored.get("schema_version") if isinstance(stored, dict) else None
    if isinstance(version, int) and version > layout.SCHEMA:
        raise UsageError(
            f"bundle: {folder} has schema {version}, but this turnwise reads only up to {layout.SCHEMA}. Update turnwise"
        )
    _check_files(folder)
    manifest = _model(Manifest, folder / layout.MANIFEST)
    if manifest.schema_version < 1 or not 1 <= manifest.replay_schema <= SCHEMA_VERSION:
        raise UsageError(
            f"bundle: {folder} has rows of schema {manifest.replay_schema}, but this turnwise reads only up to {SCHEMA_VERSION}. Update turnwise"
        )
    records = tuple(_record(folder, run_id) for run_id in manifest.runs)
    last = records[-1]
    if last.run_id != manifest.run or [r.experiment for r in records].count(EXPERIMENT) != 1:
        _refuse(folder / layout.MANIFEST, "its pipeline run is not the last one of its runs")
    if last.experiment != EXPERIMENT or len({r.run_id for r in records}) != len(records):
        _refuse(folder / layout.MANIFEST, "its runs are not one pipeline run and its stages")
    bundle = Bundle(folder, manifest, records)
    _check_named(bundle)
    return bundle


def rows(bundle: Bundle, run_id: str) -> dict[str, list[Row]]:
    """Table -> the rows that the run left. Raises UsageError for a table that this turnwise does not know."""
    found = {}
    for file in sorted((bundle.artifacts(run_id) / "rows").glob("*.parquet")):
        try:
            found[file.stem] = read_parquet(file, file.stem)
        except ValueError as error:
            _refuse(file, str(error))
    return found


def own_modules(bundle: Bundle) -> list[str]:
    """Modules of a user's own code that the configs name. No bundle holds them (stages/frame/own.py)."""
    found = set()
    for config in _configs(bundle):
        for section, key in OWN:
            values = config.get(section)
            name = values.get(key) if isinstance(values, dict) else None
            found |= {name} if isinstance(name, str) and is_own(name) else set()
    return sorted(found)


def _check_files(folder: Path) -> None:
    """Every file is there, is data, and is what was written; and there is no other one."""
    named = _json(folder / layout.HASHES)
    if not isinstance(named, dict) or not all(isinstance(one, str) for one in named.values()):
        _refuse(folder / layout.HASHES, "it is no list of hashes")
    for path, wanted in named.items():
        if not layout.stays_inside(path):
            raise UsageError(
                f"bundle: {folder / layout.HASHES} names {path[:200]!r}, which leaves the folder. Do not use it"
            )
        if not layout.is_data(path):
            raise UsageError(f"bundle: {folder} holds {path[:200]!r}, which is no data file. Do not use it")
        file = folder / path
        if not file.is_file() or file.is_symlink():
            _refuse(file, "it is missing")
        if sha256(file) != wanted:
            _refuse(file, "its sha256 is not the one that was written")
    for start, folders, files in os.walk(folder):
        for name in [*(one for one in folders if (Path(start) / one).is_symlink()), *files]:
            path = (Path(start) / name).relative_to(folder).as_posix()
            if path not in named and path != layout.HASHES:
                raise UsageError(f"bundle: {folder} holds {path!r}, which {layout.HASHES} does not name. Take it away")
    for path in named:
        if path.split("/")[0] not in (layout.MANIFEST, layout.RUNS, layout.FILES, layout.PROMPTS):
            raise UsageError(f"bundle: {folder} holds {path!r}, which has no place in a bundle. Take it away")


def _check_named(bundle: Bundle) -> None:
    """Every file for the project is one that a config of its runs names, or lies in such a folder."""
    named = {one for config in _configs(bundle) for one in _texts(config)}
    for path in bundle.files:
        above = {path, *map(str, PurePosixPath(path).parents)} - {"."}
        if path.split("/")[0] in NEVER or not named & above:
            raise UsageError(
                f"bundle: {bundle.folder} holds {path!r}, which no config of its runs may name or names. Do not use it"
            )


def _configs(bundle: Bundle) -> Iterator[dict[str, Any]]:
    """Of the stage runs and of the pipeline run, as they stand in the bundle."""
    for record in bundle.records:
        stored = _json(bundle.artifacts(record.run_id) / "config.json")
        config = stored.get("config", stored) if isinstance(stored, dict) else {}
        yield config if isinstance(config, dict) else {}


def _texts(value: Any) -> Iterator[str]:
    """All that is text in a JSON value, paths in their plainest form."""
    if isinstance(value, str):
        yield os.path.normpath(value)
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


def _record(folder: Path, run_id: str) -> Record:
    if not (run_id.isalnum() and len(run_id) == 32):
        _refuse(folder / layout.MANIFEST, f"{run_id[:80]!r} is no run id")
    place = folder / layout.RUNS / run_id
    record = _model(Record, place / layout.RECORD)
    if record.run_id != run_id or record.experiment not in (*STAGES, EXPERIMENT):
        _refuse(place / layout.RECORD, "it is of another run, or of no stage")
    if record.experiment != EXPERIMENT:
        if record.status != "FINISHED":
            _refuse(place / layout.RECORD, "a stage's run has to be finished")
        for name in ("config.json", "inputs.json", "outputs.json"):
            if not isinstance(_json(place / layout.ARTIFACTS / name), dict):
                _refuse(place / layout.ARTIFACTS / name, "it is no object")
    return record


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        _refuse(file, "it is missing, or no JSON")


def _model(kind: type[M], file: Path) -> M:
    try:
        return kind.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        told = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else "it is missing"
        _refuse(file, told[:200])


def _refuse(file: Path, why: str) -> NoReturn:
    raise UsageError(f"bundle: {file} is damaged: {why}. {AGAIN}")
