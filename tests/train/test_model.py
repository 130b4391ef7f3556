"""A model that is opened for training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import models
import pytest
import torch

from stages.frame.contract import Config
from stages.frame.types import UsageError
from stages.train.model import trainable


def test_a_fresh_adapter_is_the_same_in_every_stage_of_a_run_and_another_in_another_run(
    base: Path, tmp_path: Path
) -> None:
    def first(run_seed: int, stage_seed: int) -> torch.Tensor:
        model = trainable(models.Bench(base, tmp_path, seed=run_seed).context(Config(), {}, seed=stage_seed), None)
        assert model.training
        found: torch.Tensor = next(p for p in model.parameters() if p.requires_grad).detach()
        return found

    assert torch.equal(first(0, 1), first(0, 2))
    assert not torch.equal(first(0, 1), first(1, 1))


def test_a_model_that_no_tree_can_be_run_on_is_refused_before_the_first_step_of_any_stage(
    base: Path, tmp_path: Path
) -> None:
    """Rotations that depend on the longest row of a pass: a tree would be silently wrong."""
    folder = Path(shutil.copytree(base, tmp_path / "base"))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"rope_parameters.rope_type = 'dynamic' in its config: the longest position"):
        trainable(models.Bench(folder, tmp_path).context(Config(), {}), None)
