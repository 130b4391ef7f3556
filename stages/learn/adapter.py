"""LoRA adapters on disk and in training: make, load, save, average. peft does the work; safetensors only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from stages.learn import ranks

WEIGHTS = "adapter_model.safetensors"


def new_adapter(base: Any, *, rank: int, alpha: float, seed: int) -> Any:
    """The base model, frozen, with a fresh LoRA adapter on every linear layer (B = 0: it starts as the base)."""
    from peft import get_peft_model

    torch.manual_seed(seed)  # peft draws the A matrices from the global generator
    return get_peft_model(base, _lora(rank, alpha))


def _lora(rank: int, alpha: float) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", bias="none", task_type="CAUSAL_LM")


def add_adapter(model: Any, name: str, path: Path | None, *, rank: int, alpha: float, seed: int) -> None:
    """Put an adapter beside the model's own: of the folder `path`, or fresh. Both are trainable, its own is active."""
    if path is None:
        torch.manual_seed(seed)
        model.add_adapter(name, _lora(rank, alpha))
    else:
        model.load_adapter(str(path), adapter_name=name, is_trainable=True)
    _train_all(model)


@contextmanager
def acting_as(model: Any, name: str) -> Iterator[None]:
    """Passes go through another adapter of the model. Each gets the gradients of its own passes."""
    before = model.active_adapter
    model.set_adapter(name)
    try:
        yield
    finally:
        model.set_adapter(before)
        _train_all(model)


@contextmanager
def as_base(model: Any) -> Iterator[None]:
    """Passes go through the base model, as if there were no adapter."""
    with model.disable_adapter():
        yield
    _train_all(model)


def _train_all(model: Any) -> None:
    """peft freezes all adapters but the active one; a frozen one would get no gradient of passes done before."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.requires_grad_(True)


def open_adapter(base: Any, path: Path) -> Any:
    """The base model with the adapter of the folder `path`, trainable."""
    from peft import PeftModel

    return PeftModel.from_pretrained(base, path, is_trainable=True)


def base_of(model: Any) -> Any:
    """The transformers model inside a peft model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def save_adapter(model: Any, path: Path, model_hash: str, *, name: str = "default") -> None:
    """Write adapter_config.json, adapter_model.safetensors and base.json, which names the base model it belongs to."""
    # Of dealt-out weights the whole; the base's are not asked for.
    state = {n: ranks.whole(p.detach()) for n, p in model.named_parameters() if ranks.sharded(p) and "lora_" in n}
    model.save_pretrained(path, safe_serialization=True, selected_adapters=[name], state_dict=state or None)
    if name != "default":  # which peft puts into a folder of its own
        for file in (path / name).iterdir():
            file.rename(path / file.name)
        (path / name).rmdir()
    (path / "README.md").unlink(missing_ok=True)  # peft's empty model card
    (path / "base.json").write_text(json.dumps({"model_hash": model_hash}) + "\n")


def trainable_state(model: Any) -> dict[str, torch.Tensor]:
    """Copies of the adapter's tensors by parameter name."""
    return {name: ranks.whole(p.detach()).clone() for name, p in model.named_parameters() if p.requires_grad}


def load_state(model: Any, state: dict[str, torch.Tensor]) -> None:
    """Put tensors of `trainable_state` back into the model."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            ranks.put(parameter, state[name])


@contextmanager
def with_state(model: Any, state: dict[str, torch.Tensor]) -> Iterator[None]:
    """Passes go through these weights, and then the model has its own back, to the bit. For passes without a gradient:
    weights that a backward pass still needs must not change.
    """
    before = trainable_state(model)
    load_state(model, state)
    try:
        yield
    finally:
        load_state(model, before)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(path / WEIGHTS)
    return tensors


def tensors_of(model: Any, path: Path) -> dict[str, torch.Tensor]:
    """The tensors of the adapter in `path`, named as `trainable_state(model)` names them. The model stays as it is."""
    from peft import set_peft_model_state_dict

    before = trainable_state(model)
    set_peft_model_state_dict(model, read_tensors(path))
    found = trainable_state(model)
    load_state(model, before)
    return found
