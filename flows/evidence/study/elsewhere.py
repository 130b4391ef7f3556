"""Rows of runs that finished elsewhere: on another machine, or in a store that is gone. Ours.

    turnwise study FILE --rows cells.jsonl

A row replaces a cell if both have the same recipe. It covers every config key that can change a result, each stage's
version, its prompts, the base model, and the task's code and data. The figures are trusted as they stand in the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows import pipeline
from flows.evidence.study.design import Study
from flows.evidence.study.rows import Row
from flows.pipeline import Call
from flows.presets import RunConfig
from stages.frame.types import UsageError
from stages.store.workspace import StageRun, Workspace

RECIPE = "recipe"
NEEDED = {RECIPE: str, "commit": str, "base": float, "final": float, "curve": list}


def recipe(run: RunConfig, workspace: Workspace) -> str:
    """A hash of all that a run is made of: its stages' fingerprints, where each input's place in the run replaces its
    id. Raises UsageError as `stage_fingerprint` does.
    """
    made = [run.episodes_of, run.goes_on_from]

    def step(call: Call) -> StageRun:
        made.append(call.fingerprint(workspace))
        return StageRun(call.stage.name, call.title, call.iteration, {}, True, 0.0)

    pipeline.evaluate_base(run, step)
    for _ in pipeline.iterate(run, step):
        pass
    return hashlib.sha256("\n".join(made).encode()).hexdigest()


def read(files: Sequence[Path], study: Study) -> dict[str, Row]:
    """recipe -> its row, the first of several. Raises UsageError with file and line for an invalid row, and where all
    methods learn from one method's episodes.
    """
    if files and study.source:
        raise UsageError(
            f"--rows: every method learns from the episodes of {study.source}, and rows hold no episodes. Leave --rows out."
        )
    found: dict[str, Row] = {}
    for file in files:
        for number, line in enumerate(_lines(file), 1):
            row = _row(line, f"--rows: {file} line {number}")
            found.setdefault(row[RECIPE], row)
    return found


def options(files: Sequence[Path]) -> list[str]:
    """As a command line has them."""
    return [part for file in files for part in ("--rows", str(file))]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise UsageError(
            f"--rows: {file} cannot be read ({why}). Name a cells.jsonl that `turnwise study --out` wrote."
        ) from None


def _row(line: str, where: str) -> Row:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    bad = [key for key, kind in NEEDED.items() if not isinstance(row, Mapping) or not isinstance(row.get(key), kind)]
    if bad:
        raise UsageError(
            f"{where}: wanted a row of a finished run, found none with {bad[0]!r}. Name a cells.jsonl that `turnwise study --out` wrote."
        )
    return dict(row)
