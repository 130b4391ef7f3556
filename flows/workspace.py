"""Opens the project folder: its stores, its engines, and clean-up after processes that died.

The project folder holds `data/` and `mlflow/`. Relative paths of a config (`model.path = "data/base"`) count from it,
so that configs, and with them fingerprints, hold no path of one machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from stages.frame.types import Engine, UsageError

if TYPE_CHECKING:
    from flows.presets import RunConfig
    from stages.store.execute import Workspace


def find_home(given: Path | None = None) -> Path:
    """The folder that was given; else the nearest one at or above the working directory with data/ and mlflow/; else
    that directory.
    """
    if given is not None:
        if not given.is_dir():
            raise UsageError(f"--home: wanted a folder that holds data/ and mlflow/, but {given} does not exist.")
        return given.resolve()
    here = Path.cwd()
    return next(
        (folder for folder in (here, *here.parents) if (folder / "data").is_dir() and (folder / "mlflow").is_dir()),
        here,
    )


def open_workspace(home: Path) -> Workspace:
    """The stores of `home`, and engines that load on first use. The process works in `home` from here on."""
    from stages.store.execute import Workspace, recover
    from stages.store.replay import Replay
    from stages.store.tracking import Tracking

    os.chdir(home)
    workspace = Workspace(
        home=home,
        tracking=Tracking(home / "mlflow"),
        replay=Replay(home / "data" / "turnwise.duckdb"),
        engine=engine_cache(),
        prompt_hashes=prompt_hashes,
        model_hash=model_hash,
    )
    recover(workspace)
    return workspace


def engine_cache() -> Callable[[RunConfig], Engine]:
    """A function that makes the engine of a config, and keeps the last one made: loading a model is slow and takes
    memory.
    """
    kept: dict[str, Engine] = {}

    def engine(run: RunConfig) -> Engine:
        key = run.model.model_dump_json()
        if key not in kept:
            kept.clear()
            kept[key] = make_engine(run)
        return kept[key]

    return engine


def make_engine(run: RunConfig) -> Engine:
    """The engine that `model.engine` names. Raises UsageError where the model is not there."""
    model = run.model
    if model.engine == "hf":
        from stages.llm.hf import HfEngine

        return HfEngine(model.path, dtype=model.dtype, batch=model.gen_batch)
    if model.engine == "vllm":
        from stages.llm.vllm import VllmEngine

        return VllmEngine(model.path, dtype=model.dtype, lora_rank=model.lora_rank, gpu_memory=model.gpu_memory)
    if model.engine == "openai":
        from stages.llm.openai import OpenAIEngine

        return OpenAIEngine(model.path, url=model.url)
    from stages.llm.scripted import ScriptedEngine

    return ScriptedEngine()


def prompt_hashes(run: RunConfig) -> dict[str, str]:
    from stages.llm.roles import load_roles

    return load_roles(run.roles.prompts).hashes()


def model_hash(run: RunConfig) -> str:
    """Hash of the base model's files, or of its name where there are no files here."""
    return (
        _folder_hash(run.model.path) if run.model.engine in ("hf", "vllm") else f"{run.model.engine}:{run.model.path}"
    )


@cache
def _folder_hash(path: str) -> str:
    from stages.llm.hf import model_hash

    return model_hash(path)
