"""Other processes: several pipelines at once in one folder, and stores that somebody else holds."""

from __future__ import annotations

import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import duckdb
from commands import Job

from injuries.bench import Bench, Count, command_of, disturbed, ends_whole

SHORT_S = (0.5, 2.0)  # a store is held so long, again and again, and the command waits
LONG_S = 45.0  # longer than anybody waits for a store
Hold = Callable[[Path, threading.Event, float], None]
"""Keep the store of a folder for so many seconds, or until it is over."""


def at_once(bench: Bench, rng: random.Random) -> Count:
    """Two to four pipelines begin together, with one seed or with several; in half of the tries one is killed."""
    count, home = Count(1), bench.home()
    method = rng.choice(bench.methods)
    seeds = rng.choice([(0, 0), (0, 0, 0), (0, 1), (0, 1, 0), (0, 1, 0, 1)])
    commands = [command_of(method, f"seed={seed}") for seed in seeds]
    expected = [bench.expected(argv) for argv in commands]
    victim = rng.choice([None, rng.randrange(len(seeds))])
    jobs = [
        Job(argv, signal=signal.SIGKILL, after_s=rng.uniform(0, one.done.cpu_s)) if i == victim else Job(argv)
        for i, (argv, one) in enumerate(zip(commands, expected, strict=True))
    ]
    ended = bench.run.at_once(home, *jobs)
    count.faults += len(seeds) - 1 + (victim is not None)
    for job, done in zip(jobs, ended, strict=True):
        disturbed(count, done, job.signal)
        if not job.signal and done.status != 0:
            count.note("unclear", f"one of {len(seeds)} at once ended with status {done.status}: {done.err[-800:]}")
    for argv, one in dict(zip(commands, expected, strict=True)).items():
        ends_whole(count, home, bench.run(home, *argv), one)
    return count


def duckdb_held(bench: Bench, rng: random.Random) -> Count:
    """Another process has the rows' file open, for moments again and again, or for good."""
    return held(bench, rng, hold_duckdb)


def sqlite_held(bench: Bench, rng: random.Random) -> Count:
    """Another process is in the middle of a write to MLflow's store, for moments again and again, or for good."""
    return held(bench, rng, hold_sqlite)


def held(bench: Bench, rng: random.Random, hold: Hold) -> Count:
    count, home, argv = Count(1, 1), bench.home(), command_of("rft")
    expected = bench.expected(argv)
    long = rng.random() < 0.25
    over = threading.Event()
    holder = threading.Thread(target=_again_and_again, args=(hold, home, over, long, random.Random(rng.random())))
    holder.start()
    done = bench.run(home, *argv)
    over.set()
    holder.join()
    disturbed(count, done)
    if done.status != 0 and not long:
        count.note("unclear", f"held for moments only, it ended with status {done.status}: {done.err[-800:]}")
    ends_whole(count, home, bench.run(home, *argv), expected)
    return count


def _again_and_again(hold: Hold, home: Path, over: threading.Event, long: bool, rng: random.Random) -> None:
    over.wait(rng.uniform(0.3, 3.0))
    while not over.is_set():
        hold(home, over, LONG_S if long else rng.uniform(*SHORT_S))
        over.wait(rng.uniform(0.2, 1.5))


def hold_duckdb(home: Path, over: threading.Event, seconds: float) -> None:
    file = home / "data" / "turnwise.duckdb"
    while file.exists() and not over.is_set():
        try:
            with closing(duckdb.connect(str(file))):
                over.wait(seconds)
                return
        except duckdb.Error:  # the command has it
            time.sleep(0.002)


def hold_sqlite(home: Path, over: threading.Event, seconds: float) -> None:
    with closing(sqlite3.connect(home / "mlflow" / "mlflow.db", timeout=5, isolation_level=None)) as store:
        try:
            store.execute("begin immediate")
        except sqlite3.OperationalError:  # the command has it
            return
        over.wait(seconds)
        store.execute("rollback")
