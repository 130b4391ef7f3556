"""Find runs in MLflow's tables, without MLflow. A store without these tables has no runs.

MLflow's own search of 10,000 runs takes seconds, and so does its import. A command that only reads should not pay for
that (`benchmarks/speed/store.py`; docs/explanation/measurements.md, "The store at 10,000 stage runs").
tests/store/test_store_search.py compares the answers with MLflow's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stages.store.database import Ask, Database
from stages.store.runs import RunInfo, shown

Found = tuple[RunInfo, str]
"""A run, and where MLflow says that its artifacts are."""

# A clock may be set back, so runs are numbered as they start; runs of an older turnwise have no number and come last,
# by their clock.
_NEWEST_FIRST = "order by number.value is null, number.value desc, runs.start_time desc, runs.run_uuid"
_INPUTS = " left join tags inputs on inputs.run_uuid = runs.run_uuid and inputs.key = 'inputs'"


def search(
    db: Database,
    *,
    experiment: str = "",
    status: str = "",
    tags: Mapping[str, str] = {},
    prefix: str = "",
    limit: int = -1,
) -> list[Found]:
    """Runs that nobody deleted and that have all of this, newest first. prefix: the start of their id; limit: -1 = all."""
    if not db.exists():
        return []
    query, values = _query("runs.run_uuid", experiment, status, tags, prefix)
    with db.opened() as ask:
        bound, value = ("", []) if limit < 0 else (" limit ?", [limit])
        found = ask(f"{query} {_NEWEST_FIRST}{bound}", [*values, *value])
        return _load(ask, db, [run_id for (run_id,) in found])


def run_ids(db: Database, *, status: str) -> list[str]:
    """Ids of all runs with that status, newest first."""
    if not db.exists():
        return []
    query, values = _query("runs.run_uuid", "", status, {}, "")
    with db.opened() as ask:
        return [run_id for (run_id,) in ask(f"{query} {_NEWEST_FIRST}", values)]


def stage_runs(db: Database) -> list[str]:
    """Ids of all finished runs of stages, oldest first."""
    if not db.exists():
        return []
    joins = " join tags stage on stage.run_uuid = runs.run_uuid and stage.key = 'stage'"
    query, values = _query("runs.run_uuid", "", "FINISHED", {}, "", joins)
    with db.opened() as ask:
        return [run_id for (run_id,) in ask(f"{query} {_NEWEST_FIRST}", values)][::-1]


def last_number(db: Database) -> int:
    """The highest number that a run was given as it started; 0 where there is none."""
    with db.opened() as ask:
        ((number,),) = ask("select max(value) from tags where key = 'sequence'")
    return int(number or 0)


def reading(db: Database, run_id: str, experiment: str) -> list[tuple[str, bool | None]]:
    """Finished runs of the experiment, newest first; whether `inputs` names the run, None where the tag cannot tell."""
    if not db.exists():
        return []
    query, values = _query("runs.run_uuid, inputs.value", experiment, "FINISHED", {}, "", _INPUTS)
    with db.opened() as ask:
        rows = ask(f"{query} {_NEWEST_FIRST}", values)
    return [(found, f'"{run_id}"' in text if text and text.endswith("}") else None) for found, text in rows]


def load(db: Database, ids: Sequence[str]) -> list[Found]:
    """These runs, deleted ones too, in this order; an id that there is not is left out."""
    if not db.exists():
        return []
    with db.opened() as ask:
        return _load(ask, db, ids)


def _load(ask: Ask, db: Database, ids: Sequence[str]) -> list[Found]:
    listed = [db.ids(ids)]
    what = "run_uuid, name, status, start_time, end_time, artifact_uri"
    query = f"{db.listed} select {what} from listed {db.join} runs using (run_uuid)"
    rows = {row[0]: row for row in ask(query, listed)}

    def by_run(table: str, value: str = "value") -> dict[str, dict[str, Any]]:
        query = f"{db.listed} select run_uuid, key, {value} from listed {db.join} {table} using (run_uuid)"
        found: dict[str, dict[str, Any]] = {}
        for run_id, key, one in ask(query, listed):
            found.setdefault(run_id, {})[key] = one
        return found

    tags, params = by_run("tags"), by_run("params")
    metrics = by_run("latest_metrics", "case when is_nan then null else value end")
    found = []
    for run_id in (one for one in ids if one in rows):
        _, name, status, started, ended, uri = rows[run_id]
        own = tags.get(run_id, {})
        numbers = {key: math.nan if value is None else value for key, value in metrics.get(run_id, {}).items()}
        info = RunInfo(
            run_id=run_id, name=name or own.get("mlflow.runName", ""), status=status, started=started / 1000,
            ended=None if ended is None else ended / 1000, tags=shown(own), metrics=numbers,
            params=params.get(run_id, {}),
        )  # fmt: skip
        found.append((info, uri))
    return found


def _query(
    what: str, experiment: str, status: str, tags: Mapping[str, str], prefix: str, joins: str = ""
) -> tuple[str, list[Any]]:
    values = list[Any]()
    for at, (key, value) in enumerate(tags.items()):
        joins += f" join tags t{at} on t{at}.run_uuid = runs.run_uuid and t{at}.key = ? and t{at}.value = ?"
        values += [key, value]
    joins += " left join tags number on number.run_uuid = runs.run_uuid and number.key = 'sequence'"
    where = "runs.lifecycle_stage = 'active'"
    for condition, value in (
        ("runs.experiment_id = (select experiment_id from experiments where name = ?)", experiment),
        ("runs.status = ?", status),
        ("substr(runs.run_uuid, 1, length(?)) = ?", prefix),
    ):
        if value:
            where += f" and {condition}"
            values += [value] * condition.count("?")
    return f"select {what} from runs{joins} where {where}", values
