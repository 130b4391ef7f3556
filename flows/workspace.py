"""Opens the project folder: its stores, its engines, and clean-up after processes that died.

The project folder holds `data/` and `mlflow/`, and `turnwise.toml` where machines share a store. Relative paths of a config (`model.path = "data/base"`) count from it.
So configs and fingerprints hold no path of one machine.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from flows.locks import devices, hold_device
from flows.presets import RunConfig
from flows.processes import in_processes
from flows.shards import in_shards
from flows.shipped import bring
from stages.frame.types import Engine, UsageError
from stages.llm.roles import roles_of
from stages.llm.scripted import ScriptedEngine
from stages.store.kept_rows import KeptRows
from stages.store.machine import disk_full
from stages.store.replay import Replay
from stages.store.shards import forget
from stages.store.shared import shared_store
from stages.store.tracking import Tracking
from stages.store.upkeep import recover
from stages.store.workspace import Workspace

STORES = ("data", "mlflow")


def find_home(given: Path | None = None, *, to_write: bool = False) -> Path:
    """The given folder, else the nearest one at or above the working directory with data/ and mlflow/, else that
    directory.

    to_write: make the folders for the stores. Raises UsageError where the folder cannot be read or written.
    """
    home = _home(given)
    try:
        for folder in (home, *(home / name for name in STORES)):
            if to_write:
                folder.mkdir(exist_ok=True)
            if to_write and folder != home:
                tempfile.TemporaryFile(dir=folder).close()
            if folder.is_dir():
                os.listdir(f"{folder}/.")  # by the dot: to read it and to look into it are two permissions
    except OSError as error:
        how = "written" if to_write else "read"
        wanted = f"--home: wanted a project folder that can be {how}, but {error.filename or home} cannot be ({error.strerror})"
        raise disk_full(error, home) or UsageError(f"{wanted}. Check who owns it, or name another one.") from None
    return home


def _home(given: Path | None) -> Path:
    if given is not None:
        if not os.path.isdir(given):  # not Path's, which raises where a name is too long
            raise UsageError(
                f"--home: wanted a folder that holds {' and '.join(STORES)}, but {str(given)[:200]} is no folder."
            )
        return given.resolve()
    here = Path.cwd()
    return next(
        (folder for folder in (here, *here.parents) if all(os.path.isdir(folder / name) for name in STORES)), here
    )


def safe_name(text: str) -> str:
    """The text with "-" for characters that a deployment's name cannot have. "" if nothing is left."""
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII).strip("-.")


def project_name(home: Path) -> str:
    """Name of the project, for servers and pages: that of its folder, made safe."""
    return safe_name(home.resolve().name) or "project"


def open_workspace(home: Path) -> Workspace:
    """The stores of `home`, and engines that load on first use. The process works in `home` from here on."""
    os.chdir(home)
    workspace = stores(home)
    recover(workspace)
    return workspace


def stores(home: Path) -> Workspace:
    """The same, without the clean-up: for a process that works for another one."""
    tracking = Tracking(home / "mlflow", shared_store(home), cache=home / "data" / "artifacts-cache")
    workspace = Workspace(
        home=home,
        tracking=tracking,
        replay=Replay(home / "data" / "turnwise.duckdb", source=KeptRows(tracking)),
        engine=engine_cache(home),
        prompt_hashes=prompt_hashes,
        model_hash=model_hash,
        work=in_processes(home),
        forget=lambda fingerprint: forget(tracking, fingerprint),
    )
    return replace(workspace, work=in_shards(workspace))


def engine_cache(home: Path) -> Callable[[RunConfig], Engine]:
    """A function that makes the engine of a config. It keeps the last one, because loading a model is slow and takes
    memory.

    One run per GPU: the first engine waits until no other run uses it. A run that reuses all its stages needs no
    engine.
    """
    kept: dict[str, Engine] = {}

    def engine(run: RunConfig) -> Engine:
        key = run.model.model_dump_json() + run.train.model_dump_json() + run.run.model_dump_json()
        if key not in kept:
            kept.clear()
            # In one order everywhere, so that no two runs wait for each other.
            for gpu in (
                sorted(devices(max(run.train.processes, run.run.here))) if run.model.engine != "scripted" else ()
            ):
                hold_device(gpu, f"process {os.getpid()}, {run.preset} seed {run.seed} in {home}")
            kept[key] = make_engine(run)
        return kept[key]

    return engine


def make_engine(run: RunConfig) -> Engine:
    """The engine that `model.engine` names. Raises UsageError where the model is not there."""
    model = run.model
    bring(model.path)
    if model.engine == "hf":
        from stages.llm.hf import HfEngine

        return HfEngine(model.path, dtype=model.dtype, batch=model.gen_batch)
    if model.engine == "vllm":
        from stages.llm.vllm import VllmEngine

        return VllmEngine(model.path, dtype=model.dtype, lora_rank=model.lora_rank, gpu_memory=model.gpu_memory)
    if model.engine == "openai":
        from stages.llm.openai import OpenAIEngine

        return OpenAIEngine(model.path, url=model.url, timeout_s=model.timeout_s, concurrency=model.concurrency)
    return ScriptedEngine()


def prompt_hashes(run: RunConfig) -> dict[str, str]:
    return roles_of(run.roles).hashes()


def model_hash(run: RunConfig) -> str:
    """Hash of the base model's files, or of its name where there are no files here."""
    bring(run.model.path)
    if run.model.engine in ("hf", "vllm"):
        return _folder_hash(run.model.path)
    return f"{run.model.engine}:{run.model.path}"


@cache
def _folder_hash(path: str) -> str:
    from stages.llm.hf import model_hash

    return model_hash(path)
