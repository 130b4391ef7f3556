"""Real commands over the real stages on the scripted engine and a tiny model, and what readers then see.

For tests of what a run leaves, however it was disturbed: see `command_child.py` for the disturbances.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flows.registry import STAGES
from stages.store import sqlite
from stages.store.artifacts import SEAL
from stages.store.execute import INGREDIENTS
from stages.store.replay import Replay
from stages.store.tables import TABLES
from stages.store.tracking import Tracking

HERE = Path(__file__).parent
ITERATIONS = 2
SMALL = {
    "iterations": ITERATIONS, "model.engine": "scripted", "model.path": "data/base", "model.lora_rank": 2, "roles.max_action_tokens": 400,
    "roles.max_future_tokens": 400, "task.options.requests": 2, "task.options.tiers": 2, "collect.episodes": 6, "collect.first_episodes": 6,
    "targets.transitions": 8, "refine.states": 16, "critic.batch": 4, "critic.policy_rows": 2, "distill.batch": 4, "distill.successor_rows": 2,
    "distill.held_out": 0.3, "distill.epochs": 2, "roles.judge_temperature": 1.0, "evaluate.episodes": 4, "evaluate.audit_turns": 4,
}  # fmt: skip
RUN = (
    "run",
    "tiny",
    "--plain",
    "--json",
    *(part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")),
)
NAMING_RUNS = ("inputs.json", INGREDIENTS, "outputs.json", "adapter_config.json", SEAL)
NLAC = ("collect", "targets", "critic", "refine", "distill", "evaluate")
TITLES = (
    "evaluate base",
    "evaluate start",
    *(f"{name} {i}" for i in range(ITERATIONS) for name in NLAC),
    "evaluate final",
)
"""All stage runs of that command, in order."""


@dataclass(frozen=True)
class Done:
    """How a command ended. status: its exit status, or minus the signal that ended it."""

    status: int
    out: str
    err: str
    cpu_s: float = 0.0  # processor time of its process

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def told(self) -> list[str]:
        """The lines on stderr that are neither progress nor the table of iterations."""
        return [
            line for line in self.err.splitlines() if ", run " not in line and not line.startswith((" ", "iteration "))
        ]

    @property
    def reused(self) -> list[str]:
        """Titles of the stages that this command says it reused, in order."""
        return [title for title, _, how in self._progress() if how == "reused"]

    @property
    def ran(self) -> list[str]:
        return [title for title, _, how in self._progress() if how != "reused"]

    def _progress(self) -> list[tuple[str, str, str]]:
        parts = [line.partition(": ") for line in self.err.splitlines() if ", run " in line]
        return [(title, run.partition(", run ")[2], run.partition(", run ")[0]) for title, _, run in parts]


@dataclass(frozen=True)
class Ended:
    """A run that ended: its folder, its command, and what readers see of it."""

    home: Path
    done: Done
    seen: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A command, and what is done to it: `act` at `moment` of the stage run `title`; `signal` once it has had `after_s` of
    processor time, which a busy machine does not move; `clock_s`: how far its clock is ahead; `closed`: of its stdout and
    stderr, those that nobody reads.
    """

    argv: Sequence[str]
    title: str = ""
    moment: str = ""
    act: str = ""
    signal: int = 0
    after_s: float = 0.0
    clock_s: float = 0.0
    closed: Sequence[int] = ()


class Commands:
    """Runs `turnwise` commands, each in a process of its own; with an act, disturbed by it."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child

    def __call__(self, home: Path, *argv: str, title: str = "", moment: str = "", act: str = "") -> Done:
        return self.at_once(home, Job(argv, title, moment, act))[0]

    def at_once(self, home: Path, *jobs: Job) -> list[Done]:
        """Commands in one folder that begin together; how each of them ended."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps([{**asdict(job), "home": str(home)} for job in jobs]) + "\n")
        self._child.stdin.flush()
        return [Done(**one) for one in json.loads(self._child.stdout.readline())]


@contextmanager
def commands(env: Mapping[str, str] = {}) -> Iterator[Commands]:
    """env: beside this process's own; where PREFECT_API_URL is in it, Prefect is imported before the commands."""
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **env}
    script = [sys.executable, str(HERE / "command_child.py")]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        yield Commands(child)
        assert child.stdin is not None
        child.stdin.close()


def started(home: Path, *argv: str) -> subprocess.Popen[str]:
    """A command with an interpreter of its own, which can be killed and gets Ctrl-C."""
    env = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "turnwise", *argv, "--home", str(home)]
    # Ctrl-C is ignored where the tests themselves run in the background.
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def ended(child: subprocess.Popen[str], timeout_s: float) -> tuple[int, str, str]:
    """Its exit status, stdout and stderr."""
    out, err = child.communicate(timeout=timeout_s)
    return child.returncode, out, err


def make_home(home: Path, empty_store: Path, base: Path) -> Path:
    """A project folder with an empty store and the tiny model."""
    (home / "mlflow").mkdir(parents=True)
    sqlite.copy(empty_store, home / "mlflow" / "mlflow.db")
    shutil.copytree(base, home / "data" / "base")
    return home


def stage_runs(summary: Mapping[str, Any]) -> dict[str, str]:
    """Title -> run id of all stage runs of a pipeline run."""
    start, *rows = summary["iterations"]
    found = {"evaluate base": summary["base"]["run_id"], "evaluate start": start["runs"]["evaluate"]}
    found |= {f"{name} {row['iteration']}": run_id for row in rows for name, run_id in row["runs"].items()}
    return found | {"evaluate final": summary["final"]["run_id"]}


def seen(home: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """As `seen_in`, of a project folder with stores of its own."""
    return seen_in(Tracking(home / "mlflow"), Replay(home / "data" / "turnwise.duckdb"), summary)


def seen_in(tracking: Tracking, replay: Replay, summary: Mapping[str, Any]) -> dict[str, Any]:
    """All that readers see of a pipeline run, with titles for run ids and without times; JSON only."""
    runs = stage_runs(summary)
    found: dict[str, Any] = {
        "pipeline": {"summary": _timeless(summary), "metrics": _metrics(tracking, summary["run_id"], curves="")}
    }
    tables = {table: replay.rows(table, list(runs.values())) for table in TABLES}
    for title, run_id in runs.items():
        folder = tracking.artifact(run_id, ".")
        found[title] = {
            "rows": {
                name: [_timeless(row) for row in rows if row["run_id"] == run_id] for name, rows in tables.items()
            },
            "metrics": _metrics(tracking, run_id, curves="/step_"),
            "files": _files(folder),
            "inputs": json.loads((folder / "inputs.json").read_text()),
            "made_of": json.loads((folder / INGREDIENTS).read_text()),
        }
    text = json.dumps(found, sort_keys=True)
    for title, run_id in {"pipeline": summary["run_id"], **runs}.items():
        text = text.replace(run_id, title)
    return dict(json.loads(text))


def assert_same_result(home: Path, done: Done, expected: Ended) -> None:
    """Whoever reads the run that `done` summarises sees what they see of `expected`."""
    found = seen(home, done.json)
    assert found.keys() == expected.seen.keys()
    for title in found:
        assert found[title] == expected.seen[title], title


def titles_by_status(home: Path) -> dict[str, Counter[str]]:
    """Status -> how many stage runs of each title ended so; pipeline runs count as "pipeline"."""
    found: dict[str, Counter[str]] = {}
    tracking = Tracking(home / "mlflow")
    for name in ("pipeline", *STAGES):
        for info in tracking.runs(name, 1000):
            found.setdefault(info.status, Counter())[title_of(info.tags) if name in STAGES else name] += 1
    return found


def title_of(tags: Mapping[str, str]) -> str:
    """As the command shows it: "critic 0", "evaluate final"."""
    part = tags.get("part", "")
    return f"{tags['stage']} {part if part in ('base', 'start', 'final') else tags['iteration']}"


def _metrics(tracking: Tracking, run_id: str, *, curves: str) -> dict[str, Any]:
    """The last value of each metric, and all steps of those whose name holds `curves`."""
    last = {name: value for name, value in tracking.metrics(run_id).items() if not name.endswith("_s")}
    every = {
        name: [(point.step, point.value) for point in tracking._client.get_metric_history(run_id, name)]
        for name in last
        if curves in name
    }
    return last | every


def _files(folder: Path) -> dict[str, str]:
    """Artifact -> hash of its bytes; the name alone where run ids or times stand in it, or what peft lists in no order."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        told = path.suffix == ".parquet" or path.name in NAMING_RUNS
        found[str(path.relative_to(folder))] = "" if told else hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, Mapping):
        dropped = ("run_id", "seconds", "committed_at", "reused")
        return {key: _timeless(one) for key, one in value.items() if key not in dropped and not key.endswith("_s")}
    return [_timeless(one) for one in value] if isinstance(value, list) else value
