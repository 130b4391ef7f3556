"""`model.kernels` of the stages with a gradient: fused steps are plain ones up to rounding, auto is plain in fp32."""

from __future__ import annotations

from inspect import unwrap
from pathlib import Path
from typing import Any

import models
import pytest
import self_ac_play
import test_q_critic
import torch
from safetensors.torch import load_file
from test_autocast import STAGES

from stages import q_critic
from stages.frame.contract import Outputs
from stages.learn.fused_lora import FusedLora

Q_CRITIC = (q_critic.STAGE, unwrap(test_q_critic.bench), test_q_critic.LATER, {"batch": 8}, "")
ALL = {**STAGES, "q_critic": Q_CRITIC}


def self_ac(base: Path, tmp_path: Path) -> models.Bench:
    bench = models.Bench(base, tmp_path)
    self_ac_play.keep_episodes(bench)
    return bench


def run(name: str, base: Path, folder: Path, shape: dict[str, Any]) -> tuple[Outputs, dict[str, torch.Tensor]]:
    """The stage's first run, and the tensors of its adapter."""
    if name.startswith("self_ac"):
        bench = self_ac(base, folder)
        bench.shape = shape
        changes: dict[str, Any] = {"separate": True, "kl_coef": 0.1} if name == "self_ac, separate" else {}
        outputs = self_ac_play.run(bench, epochs=3, **changes)
    else:
        stage, filled, inputs, options, _ = ALL[name]
        bench = filled(base, folder)
        bench.shape = shape
        outputs = bench.run(stage, stage.config(**options), inputs, name="it")
    return outputs, load_file(outputs.files["adapter"] / "adapter_model.safetensors")


@pytest.mark.parametrize("name", [*ALL, "self_ac", "self_ac, separate"])
def test_a_stage_with_fused_kernels_takes_the_steps_of_one_without(
    base: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics to 1e-5. Weights to 1e-4 of a tensor, since Adam divides small gradients by their own size."""
    calls, real = list[int](), FusedLora.apply
    monkeypatch.setattr(FusedLora, "apply", lambda *args: calls.append(1) or real(*args))  # type: ignore[func-returns-value,no-untyped-call]
    found = {}
    for kernels in ("torch", "auto", "fused"):
        found[kernels] = run(name, base, tmp_path / kernels, {"kernels": kernels})
        assert bool(calls) == (kernels == "fused")
    (plain, weights), (auto, auto_weights), (fused, fused_weights) = found.values()
    assert dict(auto.metrics) == dict(plain.metrics)
    for key, value in plain.metrics.items():
        assert fused.metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    for key, tensor in weights.items():
        assert torch.equal(auto_weights[key], tensor)
        assert float((fused_weights[key] - tensor).norm() / tensor.norm()) < 1e-4, key
