"""Runs one toy stage in several processes at once; driven by test_equal_work.py over stdin and stdout.

Each line in is a job `{"home", "name", "force"}`, each line out the process id of the fork that does it. The imports
are paid once.
The stage keeps a checkpoint, as self_ac does: it writes it, says so by a file NAME.working, goes on when there is a
file NAME.go, and reads it.
What came of it is in NAME.json; what was said in NAME.said.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb  # noqa: F401, paid before the forks
import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
import pyarrow.parquet  # noqa: F401
import toys

from stages.frame.contract import Context, Outputs
from stages.store.execute import execute


def job(home: Path, name: str, force: bool) -> None:
    def run(context: Context) -> Outputs:
        state = context.checkpoints / "step"
        went_on = state.exists()
        state.parent.mkdir(parents=True, exist_ok=True)
        state.write_text(name)
        (home / f"{name}.working").touch()
        while not (home / f"{name}.go").exists():
            time.sleep(0.02)
        return Outputs({"source/went_on": float(went_on), "source/mine": float(state.read_text() == name)})

    def said(text: str) -> None:
        (home / f"{name}.part").write_text(text)
        (home / f"{name}.part").rename(home / f"{name}.said")

    answer: dict[str, Any]
    try:
        stage = replace(toys.SOURCE, run=run)
        done = execute(
            stage, run=toys.ToyRun(), inputs={}, iteration=0, workspace=toys.toy_workspace(home), force=force, say=said
        )
        answer = {"run_id": done.run_id, "reused": done.reused, "metrics": dict(done.metrics)}
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    (home / f"{name}.part").write_text(json.dumps(answer))
    (home / f"{name}.part").rename(home / f"{name}.json")


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever ends is gone at once
    for line in sys.stdin:
        wanted = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            job(Path(wanted["home"]), wanted["name"], wanted["force"])
            os._exit(0)
        print(child, flush=True)


if __name__ == "__main__":
    main()
