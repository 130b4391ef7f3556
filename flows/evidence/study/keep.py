"""A study's own run in MLflow's experiment `study`, with its report as artifacts. The cells are separate runs. Ours.

A fingerprint finds a report of the same rows again, as for a stage.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.evidence.study.cells import Setting
from flows.evidence.study.design import Study
from flows.evidence.study.figures import stratified_mean
from flows.evidence.study.page import Report, draw, drawings, html, markdown
from flows.evidence.study.rows import Row
from flows.evidence.study.tables import arms, tables
from stages.frame.types import TurnwiseError, UsageError
from stages.store.notes import code, code_version
from stages.store.runs import NOTE
from stages.store.tracking import Status
from stages.store.workspace import Workspace

EXPERIMENT = "study"
VERSION = 2  # of the report: the same rows give another one
FILES = ("report.html", "table.md", "cells.jsonl", "study.toml")
CURVES = "curves"  # a folder


@dataclass(frozen=True)
class Kept:
    """A study's run, and its files by name; the curves are a folder."""

    run_id: str
    reused: bool
    files: Mapping[str, Path]


class Book:
    """The run of one study, which is opened when there is work to do."""

    def __init__(self, workspace: Workspace, study: Study, file: Path, command: str) -> None:
        self._tracking, self._study, self._file, self._command = workspace.tracking, study, file, command
        self.run_id = ""

    def start(self) -> None:
        """Open the run, unless it is open."""
        if not self.run_id:
            note = f"{self._study.title}.\n\nCommand: {code(self._command)}\n\nIts tables and curves are the artifacts {', '.join(FILES[:2])}."
            tags = {**code_version(), "file": self._file.name, NOTE: note}
            self.run_id = self._tracking.start(EXPERIMENT, self._study.title, tags)

    def keep(self, rows: Sequence[Row], chosen: Mapping[str, Setting], missing: Sequence[str], failed: int) -> Kept:
        """Write the report and end the run. If nothing ran and the report is the same, return the earlier run's.

        failed: how many runs ended without a result.
        """
        said = [VERSION, self._study.model_dump(mode="json"), list(rows), list(missing)]
        fingerprint = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
        if not self.run_id and not failed and (old := self._tracking.finished(fingerprint, EXPERIMENT)):
            return Kept(old, True, self._files(old))
        self.start()
        report = self._report(rows, chosen, missing)
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        texts = (html(report), markdown(report), lines, self._file.read_text(encoding="utf-8"))
        for name, text in zip(FILES, texts, strict=True):
            self._tracking.write_text(self.run_id, name, text)
        with tempfile.TemporaryDirectory() as folder:
            for name, text in drawings(report).items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            self._tracking.save(self.run_id, Path(folder), CURVES)
        self._tracking.log(self.run_id, _metrics(self._study, rows))
        self._tracking.tag(self.run_id, "fingerprint", fingerprint)
        self._tracking.finish(self.run_id, *(("FAILED", f"{failed} runs failed") if failed else ()))
        return Kept(self.run_id, False, self._files(self.run_id))

    def _report(self, rows: Sequence[Row], chosen: Mapping[str, Setting], missing: Sequence[str]) -> Report:
        version = code_version()
        local = " with local changes" if version["git_dirty"] == "true" else ""
        curves = {task: draw(self._study, task, rows) for task in self._study.tasks}
        found = tables(self._study, rows, chosen, missing)
        return Report(self._study.title, self._command, f"{version['git_commit'][:7]}{local}", found, curves)

    def _files(self, run_id: str) -> dict[str, Path]:
        return {name: self._tracking.artifact(run_id, name) for name in (*FILES, CURVES)}


@contextmanager
def open_study(workspace: Workspace, study: Study, file: Path, command: str) -> Iterator[Book]:
    """The book of a study; its run is marked KILLED or FAILED where the study ends before its report."""
    book = Book(workspace, study, file, command)
    try:
        yield book
    except BaseException as error:
        status: Status = "FAILED" if isinstance(error, Exception) else "KILLED"
        with suppress(TurnwiseError, OSError):  # as a pipeline's: once its process is gone, the next command marks it
            if book.run_id:
                workspace.tracking.finish(book.run_id, status, f"{type(error).__name__}: {error}")
        raise


def copied(files: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    """A study's files in a folder, which is made where it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return {name: _copy(path, folder / name) for name, path in files.items()}
    except OSError as error:
        raise UsageError(
            f"--out: {folder} cannot be used ({error.strerror}). Name a folder that can be written."
        ) from None


def _copy(source: Path, target: Path) -> Path:
    """A file, or a folder in place of an older one."""
    if not source.is_dir():
        return Path(shutil.copyfile(source, target))
    if target.exists():
        shutil.rmtree(target)
    return Path(shutil.copytree(source, target, copy_function=shutil.copyfile))


def read_study(workspace: Workspace, run_id: str) -> dict[str, Any]:
    """The tables of a finished study as Markdown, and its rows. Raises MissingInput where it has none."""
    lines = workspace.tracking.artifact(run_id, "cells.jsonl").read_text(encoding="utf-8").splitlines()
    text = workspace.tracking.artifact(run_id, "table.md").read_text(encoding="utf-8")
    return {"tables": text, "rows": [json.loads(line) for line in lines]}


def _metrics(study: Study, rows: Sequence[Row]) -> dict[str, float]:
    """Mean win rate on test by task and method."""
    table = [row for row in rows if row["part"] == "table"]
    means = {
        f"{task}/{method}": stratified_mean([[row["final"] for row in mine]]).value
        for task in study.tasks
        for method, mine in arms(study, task, table).items()
    }
    return {re.sub(r"[^\w./ -]", "_", name): value for name, value in means.items()}
