"""Tiny stages for tests of the frame: source -> double -> total, over a few rows with token ids and log-probs."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.frame.contract import Config, Context, Outputs, Stage
from stages.frame.sections import ModelConfig, RolesConfig, TaskConfig
from stages.store.execute import execute
from stages.store.kept_rows import KeptRows
from stages.store.replay import Replay
from stages.store.shared import shared_store
from stages.store.tracking import Tracking
from stages.store.workspace import StageRun, Workspace

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
}
"""Of a Python process of its own, which is to find the project and the tests' helpers."""


class ToyConfig(Config):
    rows: int = 5
    scale: float = 1.0


class ToyRun(Config):
    """A RunConfig in miniature."""

    seed: int = 0
    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    roles: RolesConfig = RolesConfig()
    source: ToyConfig = ToyConfig()
    double: ToyConfig = ToyConfig()
    total: ToyConfig = ToyConfig()


def turn_row(
    index: int, prompt_ids: list[int], action_ids: list[int], log_probs: list[float], **changes: Any
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "episode_id": f"episode{index}", "turn": index, "state_len": 2, "prompt_ids": prompt_ids,
        "action_ids": action_ids, "log_probs": log_probs, "text": "Thought: look\nAction: look", "thought": "look",
        "action": "look", "observation": "a door", "reward": 0.0, "terminated": False, "truncated": False,
        "malformed": False, "seconds": 0.25,
    }  # fmt: skip
    return row | changes


def priority_row(turn: int, loss: float = 0.5) -> dict[str, Any]:
    return {"episode_id": f"e{turn}", "turn": turn, "loss": loss, "step": 0}


def episode_row(episode_id: str, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "episode_id": episode_id,
        "iteration": 0,
        "task": "toy",
        "split": "train",
        "scenario_id": "s1",
        "scenario": {"seed": 1},
        "adapter": None,
        "outcome": "scored",
        "total_reward": 1.0,
        "n_turns": 1,
        "n_malformed": 0,
        "attempts": 1,
        "seconds": 0.5,
        "n_tokens": 3,
        "error": "",
        "messages": [{"role": "user", "content": "hello"}],
    }
    return row | changes


def run_source(context: Context) -> Outputs:
    """Rows drawn from the context's seed, and a file."""
    rng = random.Random(context.seed)
    rows = []
    for index in range(context.config.rows):
        action = [rng.randrange(32000) for _ in range(4)]
        rows.append(turn_row(index, [rng.randrange(32000) for _ in range(3)], action, [-rng.random() for _ in action]))
    (context.workdir / "adapter").mkdir()
    (context.workdir / "adapter" / "weights.bin").write_bytes(rng.randbytes(100))
    metrics = {"source/rows": float(len(rows))}
    return Outputs(
        metrics,
        {"turns": rows},
        {"adapter": context.workdir / "adapter"},
        {"source/loss": [rng.random() for _ in range(3)]},
    )


def run_double(context: Context) -> Outputs:
    """One priority for each turn that was read."""
    turns = context.replay.read("turns", context.inputs["source"], ["episode_id", "turn", "log_probs"])
    rows = [
        {
            "episode_id": t["episode_id"],
            "turn": t["turn"],
            "loss": 2 * sum(t["log_probs"]) * context.config.scale,
            "step": 0,
        }
        for t in turns
    ]
    return Outputs({"double/rows": float(len(rows))}, {"priorities": rows})


def run_total(context: Context) -> Outputs:
    """Reads rows and a file of different stages, writes no rows."""
    losses = [row["loss"] for row in context.replay.read("priorities", context.inputs["double"], ["loss"])]
    source = context.latest("source")
    assert source is not None
    size = context.artifact(source, "adapter/weights.bin").stat().st_size
    return Outputs({"total/loss": sum(losses), "total/size_bytes": float(size)})


SOURCE = Stage("source", 1, ToyConfig, inputs=(), roles=(), run=run_source)
DOUBLE = Stage("double", 1, ToyConfig, inputs=("source",), roles=(), run=run_double)
TOTAL = Stage("total", 1, ToyConfig, inputs=("source", "double"), roles=(), run=run_total)


def toy_workspace(home: Path) -> Workspace:
    def no_engine(run: Any) -> Any:
        return None

    def no_prompts(run: Any) -> Mapping[str, str]:
        return {}

    tracking = Tracking(home / "mlflow", shared_store(home), cache=home / "data" / "artifacts-cache")
    replay = Replay(home / "data" / "replay.duckdb", source=KeptRows(tracking))
    return Workspace(home, tracking, replay, no_engine, no_prompts, lambda run: "base")


def run_chain(workspace: Workspace, run: ToyRun | None = None, **options: Any) -> list[StageRun]:
    """All three stages, as a pipeline would run them."""
    run = run or ToyRun()
    source = execute(SOURCE, run=run, inputs={}, iteration=0, workspace=workspace, **options)
    double = execute(DOUBLE, run=run, inputs={"source": [source.run_id]}, iteration=0, workspace=workspace, **options)
    inputs = {"source": [source.run_id], "double": [double.run_id]}
    return [source, double, execute(TOTAL, run=run, inputs=inputs, iteration=0, workspace=workspace, **options)]


def visible(workspace: Workspace, runs: list[StageRun]) -> str:
    """Everything that a reader of these runs sees, apart from run ids and times, as one comparable text."""
    seen: dict[str, Any] = {"metrics": [dict(each.metrics) for each in runs]}
    for table in ("turns", "priorities"):
        rows = workspace.replay.rows(table, [each.run_id for each in runs])
        seen[table] = [{name: value for name, value in row.items() if name != "run_id"} for row in rows]
    seen["weights"] = workspace.tracking.artifact(runs[0].run_id, "adapter/weights.bin").read_bytes().hex()
    return json.dumps(seen, sort_keys=True)
