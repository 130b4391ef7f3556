"""Bring a task's published data into a folder: download or copy, check, convert, and write a manifest.

    data/tasks/game24/24.csv, manifest.json

The folder appears complete or not at all. The manifest has the task, and for each file its rows and sha256. It names
the origin (source, commit, licence, sha256 of the published bytes) and the check that passed. "sha256": equal to the
published file or its conversion. "rows": no known checksum, but the right number of rows. "read": neither, but the
environment reads it. Ours.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages import envs
from stages.frame.types import MissingInput, TurnwiseError, UsageError
from stages.sources.catalogue import TASKS, Made, Published, TaskData
from stages.sources.convert import unchanged
from stages.sources.folders import MANIFEST, finish, scratch_beside

Get = Callable[[str], bytes]
"""A file's bytes by its address. Raises TurnwiseError."""


def task_data(name: str) -> TaskData:
    """Raises UsageError with the nearest name."""
    if name in TASKS:
        return TASKS[name]
    raise UsageError(
        f"data: there is no published data for {name!r}{envs.nearest(name, list(TASKS))} Tasks: {', '.join(TASKS)}."
    )


def fetch(task: TaskData, into: Path, get: Get, *, source: Path | None = None) -> dict[str, Any]:
    """Returns the manifest of `into / task.name`, and makes the folder unless it is there with all its files.

    source: a folder with the files, in our form or as they are published, instead of the network.
    Raises UsageError for a folder with other content, MissingInput for a file that `source` lacks. Raises TurnwiseError
    for a failed download or a file that is not the published one.
    """
    folder = into / task.name
    if folder.exists():
        return _found(task, folder)
    if source is not None and not os.path.isdir(source):  # not Path's, which raises where a name is too long
        raise UsageError(f"--from: wanted a folder with the files of {task.name}, but {source} is none.")
    with scratch_beside(folder) as scratch:
        published: dict[str, bytes] = {}
        entries = {made.name: _made(made, scratch, get, source, published) for made in task.files}
        _read_by_environment(task, scratch)
        manifest = {"task": task.name, "files": entries}
        finish(scratch, folder, manifest)
    return manifest


def state(task: TaskData, into: Path) -> str:
    """What is in `into / task.name`: "absent", "present", or "changed" against its manifest."""
    folder = into / task.name
    return "absent" if not folder.exists() else "present" if _is_whole(folder) else "changed"


def _found(task: TaskData, folder: Path) -> dict[str, Any]:
    if not _is_whole(folder):
        raise UsageError(
            f"data: {folder} is there and is not what was fetched for {task.name}. Remove it, or name another folder with --into."
        )
    return _manifest(folder)


def _manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text("utf-8"))
    return manifest


def _is_whole(folder: Path) -> bool:
    """Every file of the manifest is there with its bytes."""
    try:
        return all(
            _sha256((folder / name).read_bytes()) == entry["sha256"]
            for name, entry in _manifest(folder)["files"].items()
        )
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False  # a manifest that cannot be read vouches for nothing


def _made(made: Made, folder: Path, get: Get, source: Path | None, published: dict[str, bytes]) -> dict[str, Any]:
    """Write one file; its entry in the manifest. `published` keeps what was fetched, by address."""
    ready = source / made.name if source is not None else None
    raws: list[bytes] = []
    if ready is not None and ready.is_file():
        data = ready.read_bytes()
        if made.convert is unchanged:
            _check_published(made.of[0], data, str(ready))
    else:
        for of in made.of:
            if of.url not in published:
                published[of.url] = _published(made, of, get, source)
        raws = [published[of.url] for of in made.of]
        data = _converted(made, raws)
    rows = _rows(made, data)
    if source is None and rows != made.rows:
        raise TurnwiseError(
            f"{made.of[0].url} gives {rows} rows of {made.name}, wanted {made.rows}; it is not the file that was meant."
        )
    (folder / made.name).parent.mkdir(exist_ok=True)
    (folder / made.name).write_bytes(data)
    known = _sha256(data) == made.sha256 or (bool(raws) and all(of.sha256 for of in made.of))
    check = "sha256" if known else "rows" if rows == made.rows else "read"
    sources = [{"url": of.url, **({"sha256": _sha256(published[of.url])} if raws else {})} for of in made.of]
    return {
        "rows": rows, "sha256": _sha256(data), "check": check, "licence": made.of[0].licence, "commit": made.of[0].commit, "sources": sources,
    }  # fmt: skip


def _published(made: Made, of: Published, get: Get, source: Path | None) -> bytes:
    """The published bytes: from their address, or from a folder, by their path or by their name alone."""
    if source is None:
        raw, where = get(of.url), of.url
    else:
        # Of a task in several folders a name alone may stand for several files.
        names = (of.name, of.path) if "/" not in made.name else (of.path,)
        path = next((source / name for name in names if (source / name).is_file()), None)
        if path is None:
            raise MissingInput(f"data: wanted {made.name} or {names[0]} in {source}, found neither. Source: {of.url}")
        raw, where = path.read_bytes(), str(path)
    _check_published(of, raw, where)
    return raw


def _check_published(of: Published, raw: bytes, where: str) -> None:
    if of.sha256 and _sha256(raw) != of.sha256:
        raise TurnwiseError(
            f"{where} has the sha256 {_sha256(raw)[:12]}..., the published file has {of.sha256[:12]}...; it is cut off or another one."
        )


def _converted(made: Made, raws: list[bytes]) -> bytes:
    try:
        return made.convert(*raws)
    # what a parser says of content that it does not know
    except (ValueError, KeyError, TypeError, AttributeError, SyntaxError, csv.Error) as error:
        raise TurnwiseError(
            f"{made.of[0].url} is not in the form that turnwise knows ({type(error).__name__}: {error})."
        ) from error


def _rows(made: Made, data: bytes) -> int:
    """Rows of a file by its name: entries of JSON, rows of CSV below the first, else lines with something in them."""
    text = data.decode("utf-8", errors="replace")
    if made.name.endswith(".json"):
        try:
            return len(json.loads(text))
        except (ValueError, TypeError) as error:
            raise TurnwiseError(
                f"{made.name} is not JSON with entries ({error}); it is not the file that was meant."
            ) from error
    if made.name.endswith(".csv"):
        return max(0, sum(1 for _ in csv.reader(io.StringIO(text))) - 1)
    return sum(1 for line in text.split("\n") if line.strip())


def _read_by_environment(task: TaskData, folder: Path) -> None:
    """The environment reads every row. Raises UsageError for one that it cannot use."""
    for options, splits in task.readings(str(folder)):
        for split in splits:
            envs.scenarios(task.name, options, split, None, 0)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
