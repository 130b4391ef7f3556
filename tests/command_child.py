"""Runs `turnwise` commands in forks of one process, each with a mishap at a named moment; driven by
`commands.Commands`.

Each line in is a list of jobs (`commands.Job`, and "home"), which begin together; each line out says what became of each:
`{"status", "out", "err", "cpu_s"}`, the status being minus the signal where one ended it. The imports are paid once: each
command runs in a fork of this process, which has computed and opened nothing yet.
A mishap is an act at a moment of one stage run, which is named by its title ("critic 0", "evaluate final").
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb  # noqa: F401, paid before the forks
import matplotlib.figure  # noqa: F401
import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
import peft  # noqa: F401
import pyarrow.parquet  # noqa: F401
import torch
from commands import title_of
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401

import flows.rerun  # noqa: F401
import stages.store.replay
from flows import presets
from stages.envs.service_desk import ServiceDesk
from stages.frame.types import EngineUnavailable
from stages.llm.scripted import ScriptedEngine
from stages.store.replay import Replay
from stages.store.tracking import Tracking
from turnwise import cli

LIMIT_S = 300  # of a command: one that hangs is ended by the system
CALL = 2  # of the engine, or step of the optimiser, at which "inside" is: in the middle of the work
BREAKS = iter("12")  # a job is a process of its own, so every job has both
TICKS = os.sysconf("SC_CLK_TCK")
FULL_BYTES = 4096  # largest file on the full disk; every store is larger

torch.set_num_threads(1)


class Mishap:
    """`act` at `moment` of the stage run `title`.

    Moments: "started", its run is open; "inside", the second call of the engine or the second step of the optimiser;
    "environment", every step of an episode; "rows", before DuckDB's transaction; "committed", between it and MLflow's
    end.
    """

    def __init__(self, title: str, moment: str, act: str) -> None:
        self.place, self.act = (title, moment), ACTS[act]
        self.titles: dict[str, str] = {}  # run id -> title
        self.current = ""
        self.calls = 0

    def install(self) -> None:
        start, finish = Tracking.start, Tracking.finish

        def noted(tracking: Tracking, experiment: str, name: str, tags: Any, parent: str | None = None) -> str:
            run_id = start(tracking, experiment, name, tags, parent)
            self.current = self.titles[run_id] = title_of(tags) if "stage" in tags else experiment
            self._at("started")
            return run_id

        def finished(tracking: Tracking, run_id: str, status: Any = "FINISHED", error: str = "") -> None:
            if run_id in self.titles and status == "FINISHED":
                self._at("committed")
            finish(tracking, run_id, status, error)

        for name, replacement in (("start", noted), ("finish", finished)):
            setattr(Tracking, name, replacement)
        self._before(ScriptedEngine, "generate", self._count)
        self._before(torch.optim.AdamW, "step", self._count)
        self._before(ServiceDesk, "step", lambda: self._at("environment"))
        self._before(Replay, "commit", lambda: self._at("rows"))

    def _count(self) -> None:
        if self.current == self.place[0]:
            self.calls += 1
            if self.calls == CALL:
                self._at("inside")

    def _at(self, moment: str) -> None:
        if (self.current, moment) == self.place:
            self.act()

    def _before(self, owner: Any, name: str, first: Callable[[], None]) -> None:
        original = getattr(owner, name)

        def both(*arguments: Any, **options: Any) -> Any:
            first()
            return original(*arguments, **options)

        setattr(owner, name, both)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fill_the_disk() -> None:
    """From here on no file grows past a size that every store has: as on a full disk, with another number."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, FULL_BYTES))


def engine_down() -> None:
    raise EngineUnavailable("the engine at 127.0.0.1:8000 did not answer in 5 tries of 300 s.")


def talk_garbage() -> None:
    """Every reply from here on is unreadable."""
    reply = ScriptedEngine._completion

    def garbage(engine: ScriptedEngine, request: Any) -> Any:
        engine._garbage_on = frozenset({engine.calls})
        return reply(engine, request)

    ScriptedEngine._completion = garbage  # type: ignore[assignment, method-assign]


def break_desk() -> None:
    raise ZeroDivisionError("the desk has no such drawer")


def break_desk_twice() -> None:
    if next(BREAKS, None):
        break_desk()


ACTS = {
    each.__name__: each
    for each in (kill, interrupt, fill_the_disk, engine_down, talk_garbage, break_desk, break_desk_twice)
}


def close_pipe(number: int) -> None:
    """Put a pipe in place of this stream that nobody reads any more."""
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, number)


def set_clock(ahead_s: float) -> None:
    """For what asks Python's `time` and `datetime`, as MLflow and our own stores do."""
    true = time.time

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return super().now(tz) + datetime.timedelta(seconds=ahead_s)

    time.time = lambda: true() + ahead_s
    vars(stages.store.replay)["datetime"] = Shifted


def job(wanted: dict[str, Any], out: Path, err: Path) -> int:
    """What the shell would do: the working directory, the streams, the command, its exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests themselves run in the background
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # likewise, under nohup
    signal.alarm(LIMIT_S)
    os.chdir(wanted["home"])
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    for number in wanted["closed"]:
        close_pipe(number)
    if wanted["clock_s"]:
        set_clock(wanted["clock_s"])
    if wanted["act"]:
        Mishap(wanted["title"], wanted["moment"], wanted["act"]).install()
    try:
        status = cli.main(wanted["argv"])
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    return status


def cpu_s(pid: int) -> float:
    """Processor time that a process has had; 0 where it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS


def ended(pid: int, wanted: dict[str, Any]) -> tuple[int, float] | None:
    """Status and processor time of a child that has ended; one whose time has come is sent its signal."""
    gone, status, usage = os.wait4(pid, os.WNOHANG)
    if gone:
        return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
    if wanted["signal"] and cpu_s(pid) >= wanted["after_s"]:
        os.kill(pid, wanted["signal"])
        wanted["signal"] = 0
    return None


def at_once(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    files = [[Path(one["home"]) / f"{name}{i or ''}.txt" for name in ("out", "err")] for i, one in enumerate(jobs)]
    children = []
    for wanted, (out, err) in zip(jobs, files, strict=True):
        child = os.fork()
        if child == 0:
            os._exit(job(wanted, out, err))
        children.append(child)
    found: dict[int, tuple[int, float]] = {}
    while len(found) < len(jobs):
        for pid, wanted in zip(children, jobs, strict=True):
            if pid not in found and (end := ended(pid, wanted)):
                found[pid] = end
        time.sleep(0.005)
    return [
        {"status": found[pid][0], "cpu_s": found[pid][1], "out": out.read_text(), "err": err.read_text()}
        for pid, (out, err) in zip(children, files, strict=True)
    ]


def main() -> None:
    presets.run_config()  # imports the stages
    if "PREFECT_API_URL" in os.environ:
        importlib.import_module("flows.orchestration.flow")
    for line in sys.stdin:
        print(json.dumps(at_once(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
