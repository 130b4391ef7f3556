"""`autocast` of the stages whose rows are a prompt and a completion; that of self_ac is in test_self_ac.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import unwrap
from pathlib import Path
from typing import Any

import models
import pytest
import test_critic
import test_distill
import test_rft
import test_sdpo
import torch
from safetensors.torch import load_file
from test_grpo import group_rows

from stages import critic, distill, grpo, rft, sdpo
from stages.frame.contract import Config, Outputs, Stage
from stages.train.model import OptimConfig, trainable
from stages.train.passes import half, pass_log_probs, step_passes
from stages.train.rows import TrainRow

Filled = Callable[[Path, Path], models.Bench]


def of_groups(base: Path, tmp_path: Path) -> models.Bench:
    bench = models.Bench(base, tmp_path)
    bench.memory.keep("collect0", Outputs({}, group_rows({"a": [1.0, 0.0, 0.0], "b": [0.0, 1.0]})))
    return bench


# Each stage with rows to learn from, and a metric of its first step, worked out at the weights that came in.
STAGES: dict[str, tuple[Stage, Filled, dict[str, list[str]], dict[str, Any], str]] = {
    "critic": (critic.STAGE, unwrap(test_critic.bench), test_critic.LATER, {}, "critic/nll/successor_first"),
    "distill": (
        distill.STAGE,
        unwrap(test_distill.bench),
        test_distill.INPUTS,
        {"kl_coef": 0.5, "held_out": 0.2, "epochs": 2},
        "distill/kl_first",
    ),
    "rft": (rft.STAGE, unwrap(test_rft.bench), test_rft.INPUTS, {}, "rft/loss_first"),
    "sdpo": (sdpo.STAGE, unwrap(test_sdpo.bench), test_sdpo.INPUTS, {}, "sdpo/divergence_first"),
    "grpo": (grpo.STAGE, of_groups, {"collect": ["collect0"]}, {"max_gap": 1e9}, "grpo/gap_mean_first"),
}


@pytest.mark.parametrize("name", list(STAGES))
def test_a_stage_computes_in_16_bits_only_when_told_and_leaves_the_weights_in_32(
    base: Path, tmp_path: Path, name: str
) -> None:
    stage, filled, inputs, options, metric = STAGES[name]
    bench = filled(base, tmp_path)

    def metrics(run: str, **changes: Any) -> dict[str, float]:
        return dict(bench.run(stage, stage.config(**options, **changes), inputs, name=run).metrics)

    default, exact, rounded = metrics("default"), metrics("exact", autocast=False), metrics("rounded", autocast=True)
    assert default == exact
    assert all(math.isfinite(value) for value in rounded.values())
    assert rounded[metric] != exact[metric]
    assert rounded[metric] == pytest.approx(exact[metric], rel=0.02)
    if name == "distill":
        assert rounded["distill/held_out_nll"] != exact["distill/held_out_nll"]
        assert rounded["distill/held_out_nll"] == pytest.approx(exact["distill/held_out_nll"], rel=0.02)
    saved = {
        run: load_file(bench.memory.files[run, "adapter"] / "adapter_model.safetensors") for run in ("exact", "rounded")
    }
    assert {value.dtype for value in saved["rounded"].values()} == {torch.float32}
    assert any(not torch.equal(saved["exact"][key], value) for key, value in saved["rounded"].items())


def test_log_probs_leave_a_pass_in_fp32_and_gradients_reach_the_adapter(base: Path, tmp_path: Path) -> None:
    model = models.shake(trainable(models.Bench(base, tmp_path).context(Config(), {}), None), 3, 0.1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    (rows,) = step_passes({"a": [TrainRow((7, 8, 9), tuple(range(20, 20 + n))) for n in (9, 5)]}, 0, "cpu")
    found = {}
    for on in (False, True):
        with half("cpu", on):
            log_probs_K = pass_log_probs(model, rows)
        assert log_probs_K.dtype == torch.float32
        found[on] = torch.cat([g.flatten() for g in torch.autograd.grad(log_probs_K.sum(), parameters)])
    assert torch.nn.functional.cosine_similarity(found[True], found[False], dim=0) > 0.99
    assert not torch.equal(found[True], found[False])


def test_the_key_is_off_by_default_and_has_one_home() -> None:
    homes = [
        kind
        for kind in (*(stage.config for stage, *_ in STAGES.values()), OptimConfig)
        if "autocast" in kind.__annotations__
    ]
    assert homes == [OptimConfig]
    assert not OptimConfig().autocast
