"""LoRA adapters: on disk and back, on the right base, and their average."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file

from stages.frame.contract import Config
from stages.frame.types import UsageError
from stages.learn.adapter import (
    load_state,
    new_adapter,
    open_adapter,
    read_tensors,
    save_adapter,
    tensors_of,
    trainable_state,
    with_state,
)
from stages.learn.ema import ema_update
from stages.llm.hf import check_adapter
from stages.train.model import trainable

IDS = torch.tensor([[5, 9, 3, 8, 1]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.parametrize("make", [models.tiny_llama, models.tiny_qwen2])
def test_a_fresh_adapter_is_the_base(make: Any) -> None:
    assert torch.equal(logits(new_adapter(make(), rank=2, alpha=4.0, seed=0).eval()), logits(make()))


def test_a_fresh_adapter_depends_on_its_seed_alone() -> None:
    torch.manual_seed(1)
    one = trainable_state(new_adapter(models.tiny_llama(), rank=2, alpha=4.0, seed=5))
    torch.manual_seed(2)
    same = trainable_state(new_adapter(models.tiny_llama(), rank=2, alpha=4.0, seed=5))
    other = trainable_state(new_adapter(models.tiny_llama(), rank=2, alpha=4.0, seed=6))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_only_the_adapter_is_trained_and_it_covers_every_linear_layer_but_the_head() -> None:
    model = new_adapter(models.tiny_llama(), rank=2, alpha=4.0, seed=0)
    state = trainable_state(model)
    assert len(state) == 2 * 7 * 2  # A and B of q, k, v, o, gate, up, down, in two layers
    assert all("lora_" in name for name in state)
    assert not any("lm_head" in name or "embed" in name for name in state)


@pytest.mark.parametrize("make", [models.tiny_llama, models.tiny_qwen2])
def test_saved_and_opened_again_it_is_the_same_to_the_bit(make: Any, tmp_path: Path) -> None:
    model = models.shake(new_adapter(make(), rank=2, alpha=4.0, seed=0)).eval()
    save_adapter(model, tmp_path, "abc")
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "base.json",
    ]
    again = open_adapter(make(), tmp_path).eval()
    assert torch.equal(logits(again), logits(model))
    assert not torch.allclose(logits(again), logits(make()), atol=1e-2)
    one, other = trainable_state(model), trainable_state(again)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_state_goes_out_and_back_and_is_a_copy() -> None:
    model = models.shake(new_adapter(models.tiny_llama(), rank=2, alpha=4.0, seed=0))
    before = trainable_state(model)
    models.shake(model, seed=1)
    assert any(not torch.equal(before[name], value) for name, value in trainable_state(model).items())
    load_state(model, before)
    assert all(torch.equal(before[name], value) for name, value in trainable_state(model).items())


def test_ema_of_saved_adapters_equals_the_formula_by_hand(base: Path, tmp_path: Path) -> None:
    """Target and source come from files; the average goes through the model to a file, the formula does not."""
    context = models.Bench(base, tmp_path).context(Config(), {})
    for seed, name in enumerate(("target", "source")):
        save_adapter(models.shake(trainable(context, None), seed), tmp_path / name, context.engine.model_hash)
    model = trainable(context, tmp_path / "source")
    target = tensors_of(model, tmp_path / "target")
    for _ in range(3):
        target = ema_update(target, trainable_state(model), 0.1)
    load_state(model, target)
    save_adapter(model, tmp_path / "average", context.engine.model_hash)
    old, new, found = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("target", "source", "average")
    )
    assert old.keys() == new.keys() == found.keys()
    for name in found:
        assert torch.allclose(found[name], 0.9**3 * old[name] + (1 - 0.9**3) * new[name], atol=1e-6)


def test_reading_a_target_leaves_the_model_as_it_was(base: Path, tmp_path: Path) -> None:
    context = models.Bench(base, tmp_path).context(Config(), {})
    model = models.shake(trainable(context, None), 0)
    save_adapter(model, tmp_path / "target", "x")
    models.shake(model, 1)
    before = trainable_state(model)
    found = tensors_of(model, tmp_path / "target")
    assert all(torch.equal(before[name], value) for name, value in trainable_state(model).items())
    assert any(not torch.equal(before[name], found[name]) for name in before)
    assert len(found) == len(read_tensors(tmp_path / "target"))


def test_an_adapter_of_another_base_is_refused_with_one_sentence(base: Path, tmp_path: Path) -> None:
    bench = models.Bench(base, tmp_path)
    context = bench.context(Config(), {})
    save_adapter(trainable(context, None), tmp_path / "other", "f" * 64)
    with pytest.raises(
        UsageError, match=f"belongs to base model {'f' * 12}, the run uses {context.engine.model_hash[:12]}"
    ) as caught:
        trainable(context, tmp_path / "other")
    assert "\n" not in str(caught.value)


def test_a_folder_without_an_adapter_is_refused_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text(json.dumps({"model_hash": "x"}))
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UsageError, match=f"found none in the folder '{folder.name}'"):
            check_adapter(folder, "x")


def test_other_weights_act_within_a_block_and_the_model_has_its_own_back_to_the_bit() -> None:
    model = models.shake(new_adapter(models.tiny_llama(), rank=2, alpha=4.0, seed=0).eval())
    own, before = trainable_state(model), logits(model)
    other = {name: value + 0.1 for name, value in own.items()}
    with with_state(model, other):
        within = logits(model)
    assert torch.equal(logits(model), before) and not torch.equal(within, before)
    load_state(model, other)
    assert torch.equal(logits(model), within)
