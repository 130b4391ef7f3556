"""Plays the next iteration's episodes while this one trains (`collect.lag`), in a process of its own.

    python -m flows.ahead HOME FILE

It does the stage run that the pipeline will ask for next. Then the pipeline finds it finished, or waits for it, as for any
equal work. So nothing depends on it: if it dies, the pipeline does the work itself. Only with servers as the engine,
for others would share a device with the training.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from flows import presets
from flows.leash import Leashed
from flows.pipeline import Ahead, Call
from flows.registry import load_stage
from flows.workspace import make_engine, stores
from stages.store.execute import execute
from stages.store.workspace import Workspace


@contextmanager
def playing(workspace: Workspace, parent: str, of: str, *, on: bool) -> Iterator[Ahead]:
    """A function that begins a call in another process; within the block alone. It does nothing where it cannot help."""
    with ExitStack() as stack:

        def begin(call: Call) -> None:
            if not on or call.run.model.engine != "openai":
                return
            folder = workspace.home / "data" / "ahead"
            job = folder / f"{parent}-{call.iteration}.json"
            folder.mkdir(parents=True, exist_ok=True)
            run = call.run.model_dump(mode="json")
            told = {
                "run": run,
                "inputs": call.inputs,
                "iteration": call.iteration,
                "parent": parent,
                "name": f"{call.title} of {of}",
            }
            job.write_text(json.dumps(told))
            command = [sys.executable, "-m", "flows.ahead", str(workspace.home), str(job)]
            child = Leashed(command, log=job.with_suffix(".log"), env=os.environ, cwd=workspace.home)
            stack.callback(job.unlink, missing_ok=True)
            stack.callback(child.stop)

        yield begin


def main(home: Path, file: Path) -> None:
    """Its errors stay in its log: the pipeline meets them itself."""
    os.chdir(home)
    job = json.loads(file.read_text())
    run = presets.resolve(job["run"])
    # No device is held: the servers have theirs, and the pipeline has the one that trains.
    workspace = replace(stores(home), engine=make_engine)
    execute(
        load_stage("collect"), run=run, inputs=job["inputs"], iteration=job["iteration"], workspace=workspace,
        parent=job["parent"], name=job["name"], tags={"part": "iteration"},
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
