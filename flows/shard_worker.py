"""A process that makes shards for the run that joins them, one after the other, and keeps its engine in between.

    python -m flows.shard_worker HOME FOLDER

It finds its jobs in FOLDER and leaves its answers there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows import presets
from flows.presets import RunConfig
from flows.processes import told_of, write
from flows.registry import load_stage
from flows.shards import ANSWER, JOB, POLL_S
from flows.workspace import make_engine, stores
from stages.frame.types import Engine, TurnwiseError
from stages.store.shards import Shard, part_of, run_shard

_kept: dict[str, Engine] = {}  # the last one: loading a model is slow, and takes memory


def make(home: Path, job: Mapping[str, Any]) -> dict[str, str]:
    """Make a shard. {} where it is made, else the error's kind and text: it may be told in another process."""
    os.chdir(home)
    shard = Shard(**job)
    run = presets.resolve(shard.run)
    try:
        run_shard(shard, load_stage(shard.stage), run, stores(home), lambda: _engine(run, shard))
    except (TurnwiseError, ValueError) as error:
        return told_of(error)
    return {}


def _engine(run: RunConfig, shard: Shard) -> Engine:
    """Of these servers the shard has some to itself, if there are enough. No device is held: the run that joins does."""
    urls = run.model.url
    if not isinstance(urls, str) and len(urls) >= shard.count:
        mine = part_of(urls, shard.number, shard.count)
        run = run.model_copy(update={"model": run.model.model_copy(update={"url": tuple(mine)})})
    key = run.model.model_dump_json()
    if key not in _kept:
        _kept.clear()
        _kept[key] = make_engine(run)
    return _kept[key]


def main(home: Path, folder: Path) -> None:
    """Until it is stopped."""
    while True:
        for file in sorted(folder.glob(f"*{JOB}")):
            job = json.loads(file.read_text())
            file.unlink()
            write(folder / f"{job['key']}{ANSWER}", make(home, job))
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
