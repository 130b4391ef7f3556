"""Project folders, undisturbed runs, and how a disturbed one is compared with them."""

from __future__ import annotations

import json
import random
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from commands import RUN, Commands, Done, Ended, make_home, seen, stage_runs
from models import save_lettered

from flows.registry import STAGES
from stages.store.artifacts import DROPPED
from stages.store.runs import STANDS_FOR
from stages.store.tracking import Tracking

# The scripted engine's log-probs are no model's.
SETS: dict[str, Sequence[str]] = {
    "nlac": (),
    "hindsight": ("refine.futures_of=episode",),
    "nlql": (),
    "nlrl": ("pick.futures_of=rollouts", "pick.states=6"),
    "sac": ("pick.by=value",),
    "rft": (),
    "grpo": (
        "collect.group=4",
        "collect.episodes=12",
        "collect.first_episodes=12",
        "grpo.batch=4",
        "grpo.max_gap=1000",
    ),
    "self_ac": ("self_ac.batch=4", "self_ac.max_gap=1000"),
}
"""Method -> what the small command needs beside `--set method=...`."""


def command_of(method: str = "nlac", *sets: str) -> tuple[str, ...]:
    """`turnwise run` of a method in its smallest form."""
    return (*RUN, *(part for one in (f"method={method}", *SETS[method], *sets) for part in ("--set", one)))


@dataclass
class Count:
    """What became of some tries. faults: how often something was done to them; unclear: commands that ended otherwise
    than done, by the signal they were sent, or with one sentence.
    """

    tries: int = 0
    faults: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    unclear: int = 0
    notes: list[str] = field(default_factory=list)
    where: Counter[str] = field(default_factory=Counter)  # where a kill fell

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.doubled or self.wrong or self.unclear)

    def add(self, other: Count) -> None:
        for name in ("tries", "faults", "lost", "doubled", "wrong", "unclear"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.notes += other.notes
        self.where += other.where

    def note(self, what: str, text: str, n: int = 1) -> None:
        setattr(self, what, getattr(self, what) + n)
        self.notes.append(f"{what}: {text}")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@dataclass
class Bench:
    """Where tries are made. run: the commands that are disturbed; whole: a process of its own for those that are not, so
    that nothing that differs between two processes (the order of a set, say) can be part of a result; prefect: as run,
    with a server.
    """

    folder: Path
    store: Path
    base: Path
    run: Commands
    whole: Commands
    prefect: Commands | None = None
    methods: Sequence[str] = tuple(SETS)  # that are tried
    port: int = field(default_factory=free_port)  # of the engine; it stands in configs, so it stays the same
    known: dict[tuple[str, ...], Ended] = field(default_factory=dict)
    made: int = 0

    @cached_property
    def lettered(self) -> Path:
        """A tiny model whose tokenizer gives every text back, as an engine's has to."""
        return save_lettered(self.folder / "lettered")

    def home(self, base: Path | None = None) -> Path:
        """A new project folder, with that base model."""
        self.made += 1
        return make_home(self.folder / f"home{self.made}", self.store, base or self.base)

    def expected(self, argv: tuple[str, ...], base: Path | None = None) -> Ended:
        """What the command comes to when nothing disturbs it, and its folder."""
        if argv not in self.known:
            home = self.home(base)
            done = self.whole(home, *argv)
            assert done.status == 0, (argv, done.err)
            self.known[argv] = Ended(home, done, seen(home, done.json))
        return self.known[argv]

    def finished(self, argv: tuple[str, ...]) -> Path:
        """A copy of the folder in which the command ended undisturbed."""
        whole = self.expected(argv).home
        self.made += 1
        return Path(shutil.copytree(whole, self.folder / f"home{self.made}"))


Kind = Callable[[Bench, random.Random], Count]
"""One try."""


def disturbed(count: Count, done: Done, sent: int = 0) -> None:
    """Count a command that something was done to: it is done, ended by the signal, or says one sentence."""
    lines = [line for line in done.told if ": waiting for " not in line]
    if done.status in (0, -sent):
        return
    if (
        done.status not in (1, 2)
        or "Traceback" in done.err
        or not lines
        or not lines[-1].startswith("turnwise: ")
        or len(lines) > 1
    ):
        count.note("unclear", f"status {done.status}: {done.err[-1500:]}")


def ends_whole(count: Count, home: Path, done: Done, expected: Ended, *, unread: Path | None = None) -> None:
    """Count what differs between the run that `done` tells of and the undisturbed one. unread: an artifact that is known
    to be damaged, and that the run had no need of.
    """
    if done.status != 0:
        count.note("lost", f"the same command ended with status {done.status}: {done.err[-1500:]}")
        return
    found = seen(home, done.json)
    for title in sorted(expected.seen.keys() | found.keys()):
        if title not in found or title not in expected.seen:
            count.note("lost" if title not in found else "doubled", f"{title} as a whole")
            continue
        compare(
            count,
            title,
            found[title],
            expected.seen[title],
            dropped(home, done, title) | _name(home, done, title, unread),
        )
    for twice in finished_twice(home):
        count.note("doubled", f"{twice} is finished twice")


def compare(count: Count, title: str, found: Mapping[str, Any], expected: Mapping[str, Any], gone: set[str]) -> None:
    """Count what differs in one run: rows and files that are missing or too many, and what is there and not the same.
    gone: files that were dropped because they were damaged, and were wanted by nobody since.
    """
    for table, rows in expected.get("rows", {}).items():
        missing = Counter(map(json.dumps, rows)) - Counter(map(json.dumps, found["rows"][table]))
        more = Counter(map(json.dumps, found["rows"][table])) - Counter(map(json.dumps, rows))
        other = min(missing.total(), more.total())
        for what, n in (("wrong", other), ("lost", missing.total() - other), ("doubled", more.total() - other)):
            if n:
                count.note(what, f"{n} rows of {table} in {title}", n)
    for part in (expected.keys() | found.keys()) - {"rows"}:
        one, two = found.get(part, {}), expected.get(part, {})
        for key in sorted(one.keys() | two.keys()):
            if one.get(key) == two.get(key) or (part == "files" and (key in gone or key == DROPPED)):
                continue
            what = "lost" if key not in one else "doubled" if key not in two else "wrong"
            count.note(what, f"{part} {key} of {title}: {str(one.get(key))[:200]} for {str(two.get(key))[:200]}")


def dropped(home: Path, done: Done, title: str) -> set[str]:
    tracking = Tracking(home / "mlflow")
    run_id = stage_runs(done.json).get(title)
    file = tracking._folder(run_id) / DROPPED if run_id else None
    return set(json.loads(file.read_text())) if file and file.exists() else set()


def _name(home: Path, done: Done, title: str, file: Path | None) -> set[str]:
    """The file's name among the artifacts of the run, if it is one of them."""
    run_id = stage_runs(done.json).get(title)
    folder = Tracking(home / "mlflow")._folder(run_id) if file and run_id else None
    return {str(file.relative_to(folder))} if file and folder and file.is_relative_to(folder) else set()


def finished_twice(home: Path) -> list[str]:
    """Stages that have several finished runs with one fingerprint, those that stand in for dropped weights apart."""
    tracking = Tracking(home / "mlflow")
    found = [info for name in STAGES for info in tracking.runs(name, 1000) if info.status == "FINISHED"]
    prints = Counter(info.name for info in found if STANDS_FOR not in info.tags)
    keys = Counter(info.tags["fingerprint"] for info in found if STANDS_FOR not in info.tags)
    return sorted(info.name for info in found if keys[info.tags["fingerprint"]] > 1 and prints[info.name])
