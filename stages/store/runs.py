"""One run as the tracking store knows it, and values as the store can hold them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_VALUE = 5000  # characters of a tag or param; MLflow cuts longer ones without a word


@dataclass(frozen=True)
class RunInfo:
    """A run with its tags and the last value of each metric. started, ended: seconds since the epoch; ended is None
    while it runs.
    """

    run_id: str
    name: str
    status: str
    started: float
    ended: float | None
    tags: Mapping[str, str]
    metrics: Mapping[str, float]


def run_info(run: Any) -> RunInfo:
    """From MLflow's own run, whose times are in milliseconds."""
    info, data = run.info, run.data
    return RunInfo(
        run_id=str(info.run_id),
        name=str(info.run_name),
        status=str(info.status),
        started=info.start_time / 1000,
        ended=None if info.end_time is None else info.end_time / 1000,
        tags=dict(data.tags),
        metrics=dict(data.metrics),
    )


def clipped(values: Mapping[str, Any]) -> dict[str, str]:
    """As text; what is too long keeps its start, and a hash to tell it by."""
    return {key: clip(str(value)) for key, value in values.items()}


def clip(text: str) -> str:
    return text if len(text) <= MAX_VALUE else f"{text[:200]}... sha256:{hashlib.sha256(text.encode()).hexdigest()}"
