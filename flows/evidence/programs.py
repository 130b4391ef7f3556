"""Programs of the repository that give evidence for a claim. Each runs once; its output is stored as a run of its own.
Ours.

It is found again by its command and the code of stages and benchmarks.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.leash import Leashed
from flows.report import Display
from stages.store.notes import code_version
from stages.store.workspace import Workspace

EXPERIMENT = "claims"
SAID = "said.txt"  # artifact: standard output and error
POLL_S = 0.2
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


@dataclass(frozen=True)
class Program:
    """A module to be run with `python -m`. of: method of whose first run the id stands for RUN among the arguments."""

    module: str
    arguments: tuple[str, ...] = ()
    of: str = ""

    def argv(self, run_id: str = "") -> list[str]:
        return [self.module, *(run_id if one == "RUN" else one for one in self.arguments)]

    @property
    def title(self) -> str:
        """As it is typed."""
        return " ".join(("python -m", *self.argv("RUN")))


@dataclass(frozen=True)
class Said:
    """What a program printed and how it ended."""

    text: str
    status: int

    def cell(self, column: str, *holding: str) -> str:
        """The column's cell in the first row of any Markdown table that holds these cells. Raises LookupError."""
        for row in _rows(self.text):
            if column in row and set(holding) <= set(row.values()):
                return row[column]
        raise LookupError(f"no row with a column {column!r} and the cells {holding}")


def number(text: str) -> float:
    """The first number in a cell: 1.05 of "1.050 ± 0.014"."""
    return float(_numbers(text)[0])


def half_width(text: str) -> float:
    """What stands behind the ±; 0 without one."""
    found = _numbers(text.partition("±")[2])
    return float(found[0]) if found else 0.0


def root() -> Path | None:
    """The folder of the repository, which holds the benchmarks; None where turnwise is installed without it."""
    spec = importlib.util.find_spec("benchmarks")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]).parent if places and (Path(places[0]) / "speed" / "packed_pass.py").is_file() else None


def said_by(program: Program, run_id: str, workspace: Workspace, display: Display, folder: Path) -> Said:
    """The program's output with today's code. It runs now if it has not yet, and is kept as a run in the experiment
    `claims`, FAILED where the program was.
    """
    tracking, fingerprint = workspace.tracking, fingerprint_of(program, run_id, folder)
    if known := tracking.finished(fingerprint, EXPERIMENT):
        return Said(tracking.artifact(known, SAID).read_text(encoding="utf-8"), 0)
    display.say(program.title)
    text, status = _run(program, run_id, workspace.home, folder)
    if status:
        display.say(f"{program.title}: exit status {status}; it said last: {text.strip().splitlines()[-1:]}")
    kept = tracking.start(EXPERIMENT, program.title, {**code_version(), "fingerprint": fingerprint})
    tracking.write_text(kept, SAID, text)
    tracking.finish(kept, *(("FAILED", f"exit status {status}") if status else ()))
    return Said(text, status)


def _run(program: Program, run_id: str, home: Path, folder: Path) -> tuple[str, int]:
    """Its output and exit status. It runs on a leash: it ends with its owner."""
    log = home / "data" / "study" / f"{program.module}-{os.getpid()}.log"
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", *program.argv(run_id)]
    child = Leashed(command, log=log, env=env, cwd=home if program.of else folder)
    try:
        while child.running():
            time.sleep(POLL_S)
        return child.log.read_text(errors="replace"), child.status or 0
    finally:
        child.stop()
        log.unlink(missing_ok=True)


def fingerprint_of(program: Program, run_id: str, folder: Path) -> str:
    """sha256 over its command and the code that it stands on, as it is now."""
    found = hashlib.sha256("\0".join(program.argv(run_id)).encode())
    for part in ("stages", "benchmarks", "tests/theory"):
        for file in sorted((folder / part).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()


def _rows(text: str) -> Iterator[Mapping[str, str]]:
    """The rows of all Markdown tables in a text."""
    head: Sequence[str] = ()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            head = ()
        elif not head:
            head = cells
        elif not set("".join(cells)) <= set("-: "):
            yield dict(zip(head, cells, strict=False))


def _numbers(text: str) -> list[str]:
    return NUMBER.findall(text)
