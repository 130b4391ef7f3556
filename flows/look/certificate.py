"""Shows the token certificates of an episode: one line at its end if all is well, else the difference at the broken
turn.

turnwise show EPISODE
"""

from __future__ import annotations

from collections.abc import Sequence

from stages.frame.types import Row
from stages.learn.certificate import shown


def difference(rows: Sequence[Row], turn: int) -> str:
    """The turn's tokens and what the next state holds instead; empty if it has the same ones. All runs agree."""
    broken = [row for row in rows if row["turn"] == turn and row["extended"] is False]
    if not broken:
        return ""
    row = broken[0]
    return f"at token {row['position']}, produced {shown(row['produced'])}, rendered {shown(row['rendered'])}"


def all_clear(rows: Sequence[Row]) -> list[str]:
    """A line for each run that trained on the episode."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        runs.setdefault(row["run_id"], []).append(row)
    return [f"certificate of run {run_id[:8]}: {_line(mine)}" for run_id, mine in runs.items()]


def _line(rows: Sequence[Row]) -> str:
    judged = [row for row in rows if row["extended"] is not None]
    gaps = [row["gap_max"] for row in rows if row["gap_max"] is not None]
    extended = [f"{sum(row['extended'] for row in judged)} of {len(judged)} turns extend"] if judged else []
    gap = f"gap up to {max(gaps):.2g} nats" if gaps else "gap not measured (not in the first step)"
    return ", ".join([*extended, gap])
