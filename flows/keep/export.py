"""Exports results: rows as Parquet, an adapter, a merged model with or without its value head, a bundle. Also puts a
pretrained base model in place.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows import presets
from flows.book import EXPERIMENT
from flows.keep.bundle.write import stage_runs, write
from flows.presets import RunConfig
from flows.registry import load_stage
from flows.rerun import stored_summary
from stages.frame.types import MissingInput, UsageError
from stages.llm.roles import roles_of
from stages.store.artifacts import sha256
from stages.store.execute import execute, stage_fingerprint
from stages.store.workspace import Bar, StageRun, Workspace

CRITIC_STAGE = "self_ac"
HEAD = "head"  # its artifact, and the folder beside the merged model


def export_run(workspace: Workspace, run: str, folder: Path, what: str) -> list[Path]:
    """Write part or all of a run to a new folder: rows, adapter, merged model, critic or bundle. Returns the files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"export: wanted a new or empty folder, but {folder} has something in it. Name another one.")
    run_id = workspace.tracking.find(run)
    if what == "bundle":
        return write(workspace, run_id, folder)
    if what == "rows":
        is_pipeline = workspace.tracking.experiment(run_id) == EXPERIMENT
        written = workspace.replay.export(stage_runs(workspace, run_id) if is_pipeline else [run_id], folder)
        if not written:
            raise UsageError(f"run {run_id[:8]} has no rows: only stages that write tables have. See: turnwise stages")
        return written
    source = _adapter_run(workspace, run_id)
    if what == "critic" and (found := workspace.tracking.experiment(source)) != CRITIC_STAGE:
        raise UsageError(
            f"--what critic: wanted a run with a value head, one of {CRITIC_STAGE}, found one of {found}. See: turnwise runs --stage {CRITIC_STAGE}"
        )
    stored = workspace.tracking.read_json(source, "config.json")
    name = _critic_adapter(source, stored) if what == "critic" else "adapter"
    adapter = workspace.tracking.artifact(source, name)
    if what == "adapter":
        shutil.copytree(adapter, folder, dirs_exist_ok=True)
    else:
        from stages.llm.hf import merge_adapter

        merge_adapter(stored["config"]["model"]["path"], adapter, folder)
        if what == "critic":
            add_critic(workspace, source, stored, folder / HEAD)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def add_critic(workspace: Workspace, run_id: str, stored: Mapping[str, Any], folder: Path) -> None:
    """Write the value head and critic.json: V(s) = head(last state of the merged model on s + prompt_ids).

    The head has its own folder: some servers load every *.safetensors beside the model, and would fail on it.
    """
    from stages.judge.values import prompt_ids

    shutil.copytree(workspace.tracking.artifact(run_id, HEAD), folder)
    run = presets.resolve({**stored["config"], "seed": stored["seed"], "preset": f"export of {run_id[:8]}"})
    roles, trained = roles_of(run.roles), stored["config"][CRITIC_STAGE]
    # A soft prompt replaces the text's ids. It is among the head's tensors.
    ids = [] if trained["soft_prompt"] else list(prompt_ids(workspace.engine(run), roles))
    told = {
        "run_id": run_id,
        "gamma": trained["gamma"],
        "prompt_ids": ids,
        "prompt": roles.templates["value"].strip() if ids else "",
    }
    (folder / "critic.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def pretrain_to(config: RunConfig, workspace: Workspace, out: Path, bar: Bar, *, force: bool) -> StageRun:
    """Run the stage `pretrain` and copy its model to `out`. Raises UsageError before training if `out` cannot be a
    folder, or if it has another model. `force` overwrites that.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {str(out)[-200:]}: {error.strerror}. Name a folder that can be written.") from None

    # It makes the base model, so it cannot depend on one.
    alone = replace(workspace, engine=_no_engine, model_hash=lambda run: "")
    stage = load_stage("pretrain")
    call: dict[str, Any] = {"run": config, "inputs": {}, "iteration": 0, "workspace": alone}
    made = workspace.tracking.finished(stage_fingerprint(stage, **call), stage.name)
    if not force and _has_another(out, workspace.tracking.artifact(made, "model") if made else None):
        raise UsageError(
            f"--out {str(out)[-200:]}: a model lies there that may be another one. Name another folder, or overwrite it with --force."
        )
    done = execute(stage, **call, force=force, progress=bar)
    shutil.copytree(workspace.tracking.artifact(done.run_id, "model"), out, dirs_exist_ok=True)
    return done


def _has_another(folder: Path, model: Path | None) -> bool:
    """Whether a folder has a model other than this one; None: any other."""
    if model is None:
        return any((folder / name).exists() for name in ("config.json", "model.safetensors"))
    pairs = [(folder / file.relative_to(model), file) for file in model.rglob("*") if file.is_file()]
    return any(there.is_file() and sha256(there) != sha256(file) for there, file in pairs)


def _no_engine(run: RunConfig) -> Any:
    return None


def _critic_adapter(run_id: str, stored: Mapping[str, Any]) -> str:
    """The artifact with the critic's adapter, own or the actor's. Raises UsageError where no critic was trained."""
    from stages.judge.values import critic_adapter

    if (name := critic_adapter(stored["config"][CRITIC_STAGE])) is None:
        raise UsageError(
            f"--what critic: run {run_id[:8]} trained no critic: its {CRITIC_STAGE}.alpha is 0. Train one with alpha above 0"
        )
    return name


def _adapter_run(workspace: Workspace, run_id: str) -> str:
    if workspace.tracking.experiment(run_id) != EXPERIMENT:
        return run_id
    final = stored_summary(workspace, run_id)["final"]
    if not final:
        told = "that run is not finished, or ends before an evaluation. Run the same command again, or export the run of a stage"
        raise MissingInput(
            f"the adapter of pipeline run {run_id[:8]} was wanted, but {told}. See: turnwise show {run_id[:8]}"
        )
    return str(final["adapter"])
