"""One run as the tracking store knows it, and values in its form: flat, short, without a URL's password."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_VALUE = 5000  # characters of a tag or param; MLflow cuts longer ones without a word
NOTE = "mlflow.note.content"  # the tag that MLflow's page shows as the description of a run, in Markdown
STANDS_FOR = "stands_for"  # the tag that names the run whose dropped weights this run has
SET = "set."  # begins the name of a param that says what differs from the preset
_HIDDEN = "mlflow.process."  # MLflow's page shows no tag whose name begins with "mlflow."
_URL_USER = re.compile(r"(\w://)[^/\s@]+@")


@dataclass(frozen=True)
class RunInfo:
    """A run: tags, params as text, the last value of each metric, times in seconds (None: it has not ended)."""

    run_id: str
    name: str
    status: str
    started: float
    ended: float | None
    tags: Mapping[str, str]
    metrics: Mapping[str, float]
    params: Mapping[str, str]


@dataclass(frozen=True)
class ScenarioSet:
    """All scenarios of a split. role: what the run does with them, such as "train"; digest: hash of their content."""

    role: str
    name: str
    digest: str
    rows: int
    source: Mapping[str, str]


def run_info(run: Any) -> RunInfo:
    """From MLflow's own run, whose times are in milliseconds."""
    info, data = run.info, run.data
    return RunInfo(
        run_id=str(info.run_id),
        name=str(info.run_name),
        status=str(info.status),
        started=info.start_time / 1000,
        ended=None if info.end_time is None else info.end_time / 1000,
        tags=shown(data.tags),
        metrics=dict(data.metrics),
        params=dict(data.params),
    )


def hidden(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags under names that MLflow's page does not show; `shown` gives them back."""
    return {f"{_HIDDEN}{key}": value for key, value in tags.items()}


def shown(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags as they were before `hidden`; those of an older store were never hidden."""
    return {key.removeprefix(_HIDDEN): value for key, value in tags.items()}


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested config as `section.key` pairs, the names that `--set` takes."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The `section.key`s that differ, with the old and the new value (None: no such key). {} is no difference."""
    before, after = ({key: value for key, value in flat(values) if value != {}} for values in (old, new))
    return {key: (before.get(key), after.get(key)) for key in {**before, **after} if before.get(key) != after.get(key)}


def clipped(values: Mapping[str, Any]) -> dict[str, str]:
    """As text; what is too long keeps its start, and a hash to tell it by."""
    return {key: clip(str(value)) for key, value in values.items()}


def clip(text: str) -> str:
    text = without_password(text)
    return text if len(text) <= MAX_VALUE else f"{text[:200]}... sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def without_password(text: str) -> str:
    """The text with stars for the user and password of each URL in it."""
    return _URL_USER.sub(r"\1***@", text)
