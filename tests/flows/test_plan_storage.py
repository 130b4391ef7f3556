"""What `turnwise plan` says of disk and memory, by hand and against a run's own files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import SMALL, Commands, Ended
from safetensors import safe_open

from benchmarks.checks.plan_check import means
from flows import presets
from flows.cost import storage
from flows.cost.estimate import estimate
from flows.cost.lengths import assumed
from flows.cost.shapes import GIB, shape_of
from flows.cost.workload import workload
from flows.keep.garbage import KEEP
from flows.workspace import open_workspace
from turnwise import cli
from turnwise.commands.plan import lines

ROOT = Path(__file__).parents[2]
LORA = 80_740_352  # Qwen2.5-7B at rank 32


def test_weights_at_the_paper_s_size_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter of 4 bytes a parameter: NLAC leaves four an iteration, of which gc keeps three iterations' and two."""
    monkeypatch.chdir(ROOT)
    found = estimate(presets.load("tau_retail+qwen7b"), "h100", 1)
    adapter = 4 * LORA / GIB
    assert found["disk_gib"]["weights"] == pytest.approx(60 * 4 * adapter)
    assert found["disk_gib"]["weights after gc"] == pytest.approx((3 * 4 + 2) * adapter)
    assert (
        found["host_gib"]["base weights"]
        == found["host_gib"]["engine asleep"]
        == pytest.approx(2 * 7_615_616_512 / GIB)
    )
    said = lines(found)
    assert any(line.startswith("disk") and "weights 72.2 after 60 iterations" in line for line in said)
    assert any(line.startswith("with gc") and "weights 4.2 (turnwise gc --yes)" in line for line in said)
    few = estimate(presets.load("tau_retail+qwen7b", ["iterations=2"]), "h100", 1)["disk_gib"]
    assert few["weights"] == few["weights after gc"]
    of = {
        stage: storage.weights_bytes(presets.load("desk+self_ac"), 10, stage) for stage in ("self_ac", "rft", "collect")
    }
    assert of == {"self_ac": 120, "rft": 40, "collect": 0}
    assert cli.build_parser().parse_args(["gc"]).keep == KEEP


@pytest.mark.slow
def test_weights_and_ids_are_those_of_a_run(
    finished: Ended, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors to the byte; ids with the run's own means, which leaves rounding. gc leaves no more than is said."""
    home, sets = finished.home, [f"{key}={value}" for key, value in SMALL.items()]
    monkeypatch.chdir(home)
    run = presets.load("tiny", sets)
    lora = shape_of(run.model.path).lora(run.model.lora_rank)
    summary = finished.done.json
    runs: dict[str, Any] = {
        stage: [
            SimpleNamespace(run_id=row["runs"][stage], metrics={"refine/yes_rate": 0.5})
            for row in summary["iterations"]
            if stage in row["runs"]
        ]
        for stage in ("collect", "targets", "refine", "evaluate")
    }
    workspace = open_workspace(home)
    turns = workspace.replay.rows("turns", [one.run_id for one in runs["collect"]])
    sizes = [len(turn["prompt_ids"]) + len(turn["action_ids"]) for turn in turns]
    told = 4 * sum(sizes) + 8 * sum(len(turn["log_probs"]) for turn in turns)
    lengths = replace(assumed(run), thought=0.0)
    works = [work for work in workload(run, lengths) if work.stage == "collect"]
    said = [
        name
        for name in means(run, workspace, runs)
        if name.split("=")[0] in ("turns", "system", "first", "observation", "action")
    ]
    measured = replace(assumed(run, said), thought=0.0)
    assert sum(storage.ids_bytes(work, measured) for work in works) == pytest.approx(told, rel=0.1)

    def bytes_of_weights() -> int:
        total = 0
        for file in home.glob("mlflow/artifacts/*/*/artifacts/**/*.safetensors"):
            with safe_open(file, framework="pt") as tensors:
                total += sum(tensors.get_tensor(name).numel() * 4 for name in tensors.keys())  # noqa: SIM118
        return total

    found = storage.disk(run, lora, works, lengths)
    assert bytes_of_weights() == pytest.approx(found["weights"] * GIB)
    command(home, "gc", "--yes", "--quiet")
    assert bytes_of_weights() <= found["weights after gc"] * GIB + 1
