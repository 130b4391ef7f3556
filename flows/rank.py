"""One of the processes that train together (`flows/processes.py`): it runs the stage as it is.

    python -m flows.rank FOLDER RANK

The ranks find each other by a file of FOLDER. The first one writes what the stage left.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flows import presets, registry
from flows.processes import ANSWERED, ASKED, DONE, ERROR, JOB, POLL_S, RESULT, told_of, write
from flows.workspace import stores
from stages.frame.contract import Context, Outputs, Progress
from stages.frame.types import Completion, Request, TurnwiseError
from stages.learn import ranks
from stages.llm.scripted import ScriptedEngine
from stages.llm.tokens import ChatTokenizer
from stages.store.stage_context import context_of
from stages.store.workspace import silent

WAIT_S = 24 * 3600.0
"""That ranks wait for each other. The owner sees who is gone, and stops the rest."""


class Asking(ChatTokenizer):
    """`Engine` of a rank. It reads and writes tokens itself; what is generated the first rank asks the owner for."""

    def __init__(self, path: str, job: Mapping[str, Any], folder: Path) -> None:
        super().__init__(path)
        self.model_hash: str = job["model_hash"]
        self.context: int | None = job["context"]
        self._folder, self._adapters = folder, dict[str, str]()

    def load_adapter(self, name: str, path: Path) -> None:
        self._adapters[name] = str(path)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        answered = self._folder / ANSWERED
        if ranks.own() == 0:
            write(self._folder / ASKED, {"adapters": self._adapters, "requests": [asdict(one) for one in requests]})
            while not answered.exists():
                time.sleep(POLL_S)
        ranks.gathered("wait for the answer")
        told = json.loads(answered.read_text())
        ranks.gathered("until all have read it")
        if ranks.own() == 0:
            answered.unlink()
        return [_completion(one) for one in told]


def _completion(told: Mapping[str, Any]) -> Completion:
    return Completion(**{**told, "token_ids": tuple(told["token_ids"]), "log_probs": tuple(told["log_probs"])})


class Told:
    """A bar that is a line of a file, for the owner to show."""

    def __init__(self, path: Path, bars: dict[str, list[int]], what: str) -> None:
        self._path, self._bars, self._what = path, bars, what

    def advance(self, n: int = 1) -> None:
        self._bars[self._what][1] += n
        write(self._path, self._bars)


def context_in(folder: Path, rank: int, job: Mapping[str, Any]) -> Context:
    """What the stage's function sees. Scratch files of other ranks than the first have a folder of their own."""
    run = presets.resolve(job["run"])
    bars: dict[str, list[int]] = {}
    own = Path(job["workdir"]) if rank == 0 else folder / f"rank{rank}"
    own.mkdir(exist_ok=True)

    # What is scripted says the same everywhere.
    engine = ScriptedEngine() if run.model.engine == "scripted" else Asking(run.model.path, job, folder)

    def bar(what: str, total: int) -> Progress:
        bars.setdefault(what, [total, 0])
        return Told(folder / DONE, bars, what)

    return context_of(
        registry.load_stage(job["stage"]), run=run, inputs=job["inputs"], iteration=job["iteration"],
        workspace=stores(Path(job["home"])), engine=engine, workdir=own,
        checkpoints=Path(job["checkpoints"]), progress=silent if rank else bar,
    )  # fmt: skip


def work(folder: Path, rank: int) -> Outputs:
    """The stage's outputs, the same on every rank but for the place of its files."""
    job = json.loads((folder / JOB).read_text())
    os.chdir(job["home"])
    cards = torch.cuda.is_available()
    if cards:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cards else "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank,
        world_size=job["ranks"], timeout=timedelta(seconds=WAIT_S),
    )  # fmt: skip
    return registry.load_stage(job["stage"]).run(context_in(folder, rank, job))


def main(folder: Path, rank: int) -> int:
    """An error of ours goes into a file, with its kind, for the owner to raise. Others end up in the log."""
    try:
        outputs = work(folder, rank)
    except (TurnwiseError, ValueError) as error:
        write(folder / f"{ERROR}{rank}.json", told_of(error))
        return 1
    if rank == 0:
        files = {path: str(local) for path, local in outputs.files.items()}
        rows = {table: list(held) for table, held in outputs.rows.items()}
        told = {"metrics": outputs.metrics, "rows": rows, "files": files, "curves": outputs.curves}
        write(folder / RESULT, told)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
