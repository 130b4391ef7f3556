"""turnwise doctor: a line for each thing that is installed or missing, and what mends it. It changes nothing."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sqlite3
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flows import presets, shipped
from flows.datasets import check_splits, general_rows
from flows.orchestration.server import is_free
from flows.presets import RunConfig
from flows.report import answer
from flows.workspace import find_home, stores
from stages.frame.types import TurnwiseError, UsageError, printable
from stages.llm.folder import FETCHED
from stages.store.replay import Replay
from stages.store.shared import FILE

PACKAGES = ("torch", "transformers", "peft", "prefect", "mlflow", "duckdb")
EXTRAS = {"vllm": "vllm", "openai": "openai", "math-verify": "math"}
"""Package -> the extra that installs it."""
PORT = 5000  # of MLflow's page
DEMO = "desk"
ROOM_GB = 2.0  # free disk below which a night's runs may fill it
SHOWN = 4  # presets of a line


@dataclass(frozen=True)
class Line:
    """One checked thing. ok: False if something has to be mended; None if the line only informs."""

    what: str
    ok: bool | None
    said: str


def doctor(args: Namespace) -> int:
    """turnwise doctor; exit status 1 where the demo cannot run."""
    if args.model or args.task:
        from turnwise.commands.roles import roles

        return roles(args)
    home = find_home(args.home)
    os.chdir(home)
    lacking = presets_lacking()
    lines = [*_installed(), *_stores(home), _gpu(), _disk(home), _port(), *_presets(lacking)]
    ready = os.access(home, os.W_OK) and not any(DEMO in names for names in lacking.values())
    marks = {True: "ok", False: "--", None: ""}
    told = [f"{marks[one.ok]:<3} {one.what:<14} {printable(one.said)}" for one in lines]
    last = "The demo can run: turnwise run demo" if ready else "The demo cannot run; see the lines that begin with --."
    answer(args, {"ready": ready, "lines": [asdict(one) for one in lines]}, [*told, last])
    return 0 if ready else 1


def _installed() -> Iterator[Line]:
    where = f"Python {platform.python_version()}, {platform.system()}, {os.cpu_count()} cores"
    yield Line("turnwise", True, f"{_version('turnwise') or '(not installed)'}, {where}")
    yield Line("packages", True, ", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    for name, extra in EXTRAS.items():
        there = _version(name)
        lacks = f"not installed; some presets need it: pip install 'turnwise[{extra}]'"
        yield Line(name, True if there else None, there or lacks)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _stores(home: Path) -> Iterator[Line]:
    writable = os.access(home, os.W_OK)
    yield Line(
        "project folder", writable, f"{home}{'' if writable else ' cannot be written; name another one by --home'}"
    )
    yield _shared_runs(home) if (home / FILE).is_file() else _runs(home)
    rows = home / "data" / "turnwise.duckdb"
    if not rows.is_file():
        yield Line("rows", None, "no file yet; the first run makes it")
        return
    try:
        Replay(rows, wait_s=1.0).check()
        yield Line("rows", True, f"{rows.relative_to(home)}, {_size(rows)}")
    except TurnwiseError as error:
        yield Line("rows", False, str(error))


def _runs(home: Path) -> Line:
    store = home / "mlflow" / "mlflow.db"
    if not store.is_file():
        return Line("runs", None, "no store yet; the first run makes it, or: turnwise init")
    try:
        with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as open_store:
            ((n,),) = open_store.execute("select count(*) from runs").fetchall()
        return Line("runs", True, f"{n} in {store.relative_to(home)}, {_size(store)}")
    except sqlite3.Error as error:
        return Line("runs", False, f"{store.relative_to(home)} cannot be read ({error})")


def _shared_runs(home: Path) -> Line:
    """Of a store that machines share: whether both of its parts answer."""
    try:
        tracking = stores(home).tracking
        tracking.check()
        return Line("runs", True, f"{len(tracking.finished_runs())} finished in {tracking.db}, shared by {FILE}")
    except TurnwiseError as error:
        return Line("runs", False, str(error))


def _size(file: Path) -> str:
    return f"{file.stat().st_size / 1e6:.1f} MB"


def _gpu() -> Line:
    import torch

    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"
        return Line("GPU", None, f"none that torch sees (torch is {built}); runs use the CPU")
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return Line("GPU", True, ", ".join(f"{one.name}, {one.total_memory / 2**30:.0f} GiB" for one in cards))


def _disk(home: Path) -> Line:
    free = shutil.disk_usage(home).free / 1e9
    return Line("free disk", free > ROOM_GB, f"{free:.1f} GB{'' if free > ROOM_GB else '; make room: turnwise gc'}")


def _port() -> Line:
    if is_free(PORT):
        return Line("port", True, f"{PORT} is free: turnwise ui")
    return Line("port", None, f"{PORT} is taken; give another one: turnwise ui --port 0")


def _presets(lacking: dict[str, list[str]]) -> Iterator[Line]:
    n = len(presets.names()) - len({name for names in lacking.values() for name in names})
    yield Line("presets", True, f"{n} of {len(presets.names())} have all that they need here")
    for said, names in lacking.items():
        some = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        yield Line("", DEMO not in names and None, f"{some}: {said}")


def presets_lacking() -> dict[str, list[str]]:
    """What presets lack here, in a sentence -> their names."""
    found: dict[str, list[str]] = {}
    for name in presets.names():
        for said in lacking(presets.load(name)):
            found.setdefault(said, []).append(name)
    return found


def lacking(run: RunConfig) -> Iterator[str]:
    """One sentence for each missing thing that a run needs."""
    path = run.model.path
    if run.model.engine in ("hf", "vllm") and not (shipped.there(path) or _in_hub_cache(path)):
        hub, fetched = _is_hub_name(path), Path(path).parent.name == FETCHED
        make = f"make it: turnwise data fetch {Path(path).name}" if fetched else "make it: turnwise pretrain"
        yield f"there is no model {path!r} here; {'it is fetched from the hub by the first run' if hub else make}"
    if run.model.engine in EXTRAS and not _version(run.model.engine):
        yield f"pip install 'turnwise[{EXTRAS[run.model.engine]}]'"
    if run.task.env == "math" and importlib.util.find_spec("math_verify") is None:
        yield "pip install 'turnwise[math]'"
    try:
        check_splits(run)
    except UsageError as error:
        yield str(error)
    without = {stage: path for stage, path in general_rows(run).items() if not shipped.there(path)}
    if without:
        none = " ".join(f"--set {stage}.general_rows=0" for stage in without)
        yield f"there are no general rows at {next(iter(without.values()))!r}; put some there, or mix none: {none}"


def _is_hub_name(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "data/"))


def _in_hub_cache(path: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return _is_hub_name(path) and isinstance(try_to_load_from_cache(path, "config.json"), str)
