"""What a run commits to the DuckDB file, and where a file that lacks it can have it from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Commit:
    """What a run leaves here: its row in `commits`, and its rows, an Arrow table for each table that has any."""

    stage: str
    committed_at: str
    n_rows: Mapping[str, int]
    batches: Mapping[str, Any]


class Source(Protocol):
    """Where the rows of finished runs are kept beside this file."""

    def finished(self) -> Sequence[str]:
        """Finished stage runs, oldest first."""

    def commit_of(self, run_id: str) -> Commit | None:
        """None for a run that is not finished, or is no stage's. Raises MissingInput where its rows are damaged or gone."""
