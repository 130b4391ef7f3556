"""Runs cells as child processes, some at a time. Each is one `turnwise run`, and ends with the study, however that ends. Ours."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from flows.evidence.study.cells import Cell
from flows.leash import Leashed
from flows.locks import devices

TURNWISE: tuple[str, ...] = (sys.executable, "-m", "turnwise")
POLL_S = 0.2
NAME = 150  # letters of the name of a file


def default_jobs(cells: Sequence[Cell]) -> int:
    """One run a physical core; one at all where a model would run on this machine's GPU."""
    if any(cell.run.model.engine in ("hf", "vllm") for cell in cells) and devices(1):
        return 1
    return psutil.cpu_count(logical=False) or 1


def run_cells(cells: Sequence[Cell], home: Path, jobs: int, *, plain: bool) -> Generator[tuple[Cell, str]]:
    """Each cell as it ends, with "", or with its run's output if it failed.

    At most `jobs` at a time, begun in order. If the caller stops early, by an error or Ctrl-C, running cells stop, too.
    Their runs are KILLED, and the next study goes on from their last finished stage.
    """
    waiting, working = list(cells), dict[int, Leashed]()
    try:
        while waiting or working:
            while waiting and len(working) < jobs:
                cell = waiting.pop(0)
                working[cells.index(cell)] = _start(cell, home, plain=plain)
            for number in [number for number, child in working.items() if not child.running()]:
                yield cells[number], _ended(working.pop(number))
            time.sleep(POLL_S)
    finally:
        with ThreadPoolExecutor(max_workers=max(len(working), 1)) as pool:  # each is given its time to end well
            list(pool.map(Leashed.stop, working.values()))


def command(cell: Cell) -> list[str]:
    """What makes the cell's run, without `turnwise`."""
    sets = (*cell.sets, f"seed={cell.seed}")
    return ["run", cell.preset, *(part for item in sets for part in ("--set", item))]


def _start(cell: Cell, home: Path, *, plain: bool) -> Leashed:
    name = re.sub(r"[^\w.=-]+", "-", f"{cell.part} {cell.title}")[:NAME]
    log = home / "data" / "study" / f"{name}.{os.getpid()}.log"  # another study may run the same cell
    how = ["--home", str(home), "--quiet", "--json", *(["--plain"] if plain else [])]
    # One thread a run: the cores are shared by the runs.
    return Leashed([*TURNWISE, *command(cell), *how], log=log, env={"OMP_NUM_THREADS": "1", **os.environ})


def _ended(child: Leashed) -> str:
    """ "" where the run ended well; else its last words, and where all of them are."""
    said = child.tail(1) or "nothing"
    child.stop()
    if child.status == 0:
        child.log.unlink(missing_ok=True)
        return ""
    return f"{said.removeprefix('turnwise: ')} (exit status {child.status}; all that it said: {child.log})"
