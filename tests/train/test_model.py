"""A model that is opened for training."""

from __future__ import annotations

from pathlib import Path

import models
import torch

from stages.frame.contract import Config
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
