"""Runs the toy chain in processes that are killed at a named point; driven by test_kill.py over stdin and stdout.

Each line in is a job `{"home", "stage", "point"}`, each line out what became of it: `{"signal", "result"}`. The imports
are paid once: each job runs in a fork of this process, which has opened nothing yet.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb  # noqa: F401, paid before the forks
import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
import pyarrow.parquet  # noqa: F401
import toys

from stages.store import duckdb_file
from stages.store.replay import Replay
from stages.store.tracking import Tracking
from stages.store.upkeep import orphans, recover

RUN_IDS: dict[str, str] = {}  # run id -> stage, of the runs this process started


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_around(owner: Any, name: str, stage: str, *, before: bool) -> None:
    """Replace a method, called with a run id, by one that dies before or after its work for a run of `stage`."""
    original: Callable[..., Any] = getattr(owner, name)

    def deadly(self: Any, run_id: str, *args: Any, **options: Any) -> Any:
        mine = RUN_IDS.get(run_id) == stage
        if mine and before:
            die()
        result = original(self, run_id, *args, **options)
        if mine:
            die()
        return result

    setattr(owner, name, deadly)


def kill_in_run(stage: str) -> None:
    """Die inside the stage's own function, its work done and nothing returned."""
    whole = getattr(toys, stage.upper())

    def deadly(context: Any) -> Any:
        whole.run(context)
        die()

    setattr(toys, stage.upper(), replace(whole, run=deadly))


def kill_in_transaction(stage: str, statement: str) -> None:
    """Die inside DuckDB's transaction, before `statement`, with the rows inserted and not committed."""
    commit, attach = Replay.commit, duckdb_file.attach
    writing: list[str] = []

    class Deadly:
        def __init__(self, connection: Any) -> None:
            self.connection = connection

        def __getattr__(self, name: str) -> Any:
            return getattr(self.connection, name)

        def execute(self, query: str, *parameters: Any) -> Any:
            if writing and query.startswith(statement):
                die()
            return self.connection.execute(query, *parameters)

    def deadly_commit(self: Replay, run_id: str, name: str, tables: Any) -> None:
        if name == stage:
            writing.append(run_id)
        commit(self, run_id, name, tables)

    def deadly_attach(path: Path, write: bool, wait_s: float) -> Any:
        return Deadly(attach(path, write, wait_s))

    Replay.commit = deadly_commit  # type: ignore[method-assign,assignment]
    duckdb_file.attach = deadly_attach


POINTS: dict[str, Callable[[str], None]] = {
    "start": lambda stage: kill_around(
        Tracking, "write_json", stage, before=True
    ),  # the run is open, the stage not begun
    "run": kill_in_run,
    "artifacts": lambda stage: kill_around(Tracking, "record", stage, before=True),
    "metrics": lambda stage: kill_around(Tracking, "record", stage, before=False),
    "rows": lambda stage: kill_in_transaction(stage, "insert into commits"),
    "commit": lambda stage: kill_in_transaction(stage, "commit"),
    "committed": lambda stage: kill_around(
        Tracking, "finish", stage, before=True
    ),  # between DuckDB's commit and MLflow's end
    "finished": lambda stage: kill_around(Tracking, "finish", stage, before=False),
}


def note_starts() -> None:
    original = Tracking.start

    def start(self: Tracking, experiment: str, *args: Any, **options: Any) -> str:
        run_id = original(self, experiment, *args, **options)
        RUN_IDS[run_id] = experiment
        return run_id

    Tracking.start = start  # type: ignore[method-assign]


def command(home: Path) -> dict[str, Any]:
    """What a user's command does: clean up, run the chain, and look at the result through readers."""
    workspace = toys.toy_workspace(home)
    recovered = recover(workspace)
    runs = toys.run_chain(workspace)
    stages = ("source", "double", "total")
    return {
        "recovered": recovered,
        "reused": [each.stage for each in runs if each.reused],
        "visible": toys.visible(workspace, runs),
        "statuses": {name: sorted(info.status for info in workspace.tracking.runs(name, 50)) for name in stages},
        "orphans": orphans(workspace),
        "scratch": sorted(path.name for path in (home / "data" / "tmp").iterdir()),
    }


def job(home: Path, stage: str, point: str, answer: Path) -> None:
    note_starts()
    if point:
        POINTS[point](stage)
    answer.write_text(json.dumps(command(home)))


def main() -> None:
    for line in sys.stdin:
        wanted = json.loads(line)
        answer = Path(wanted["home"]) / "answer.json"
        answer.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            job(Path(wanted["home"]), wanted["stage"], wanted["point"], answer)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        result = json.loads(answer.read_text()) if answer.exists() else None
        print(json.dumps({"signal": killed, "result": result}), flush=True)


if __name__ == "__main__":
    main()
