"""Rows of finished runs as their artifacts keep them: Parquet files with hashes.

A Replay that lacks the rows of a run reads them here, and so does `turnwise verify --rebuild`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stages.frame.types import Changed, MissingInput
from stages.store import search
from stages.store.commits import Commit
from stages.store.tables import read_batch
from stages.store.tracking import Tracking


@dataclass(frozen=True)
class KeptRows:
    """A `Source`: the runs of a tracking store."""

    tracking: Tracking

    def finished(self) -> Sequence[str]:
        """Finished stage runs, oldest first."""
        return search.stage_runs(self.tracking.db)

    def commit_of(self, run_id: str) -> Commit | None:
        """What the run committed; the end of the run stands for the time. None for a run that is not finished, or is no
        stage's. Raises MissingInput, or Changed, where a file is gone or is not what was written.
        """
        try:
            info = self.tracking.info(run_id)
        except MissingInput:  # of no store
            return None
        if info.status != "FINISHED" or "stage" not in info.tags:
            return None
        outputs = self.tracking.artifact(run_id, "outputs.json")
        stage, batches = info.tags["stage"], {}
        for name in self.tracking.rows_of(run_id):
            file = outputs.parent / name
            try:
                batches[file.stem] = _checked(self.tracking.artifact(run_id, name), run_id)
            except ValueError as error:
                raise _unlike(file, stage, run_id, str(error)) from error
            except Changed:
                raise
            except MissingInput as error:
                raise _unlike(file, stage, run_id, "it is gone") from error
        n_rows = {table: batch.num_rows for table, batch in batches.items()}
        # Runs of before 2026-11-28 do not say how many rows they wrote; their seal names the files.
        told = self.tracking.read_json(run_id, outputs.name).get("rows", n_rows)
        if not isinstance(told, dict) or {table: n for table, n in told.items() if n != 0} != n_rows:
            raise _unlike(outputs, stage, run_id, f"it tells of {told}, and beside it are {n_rows}")
        ended = datetime.fromtimestamp(info.ended or info.started, UTC)
        return Commit(stage, ended.isoformat(), told, batches)


def _checked(file: Path, run_id: str) -> Any:
    """The Arrow table of a file that holds rows of this run and of no other."""
    batch = read_batch(file, file.stem)
    if others := set(batch.column("run_id").unique().to_pylist()) - {run_id}:
        raise ValueError(f"it holds rows of run {others.pop()}")
    return batch


def _unlike(file: Path, stage: str, run_id: str, found: str) -> Changed:
    wanted = f"rows of {stage} run {run_id} were wanted from {file}, but {found}"
    return Changed(f"{wanted}. Run: turnwise verify --mend, then the same command again")
