"""LoRA adapters on disk and in training: make, load, save, average. peft does the work; safetensors only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "adapter_model.safetensors"


def new_adapter(base: Any, *, rank: int, alpha: float, seed: int) -> Any:
    """The base model with a fresh LoRA adapter on every linear layer (B = 0, so it starts as the base). The base is frozen."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)  # peft draws the A matrices from the global generator
    return get_peft_model(base, LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", bias="none", task_type="CAUSAL_LM"))


def open_adapter(base: Any, path: Path) -> Any:
    """The base model with the adapter of the folder `path`, trainable."""
    from peft import PeftModel

    return PeftModel.from_pretrained(base, path, is_trainable=True)


def base_of(model: Any) -> Any:
    """The transformers model inside a peft model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def save_adapter(model: Any, path: Path, model_hash: str) -> None:
    """Write adapter_config.json, adapter_model.safetensors and base.json, which names the base model it belongs to."""
    model.save_pretrained(path, safe_serialization=True)
    (path / "README.md").unlink(missing_ok=True)  # peft's empty model card
    (path / "base.json").write_text(json.dumps({"model_hash": model_hash}) + "\n")


def trainable_state(model: Any) -> dict[str, torch.Tensor]:
    """Copies of the adapter's tensors by parameter name."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def load_state(model: Any, state: dict[str, torch.Tensor]) -> None:
    """Put tensors of `trainable_state` back into the model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(state[name])


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(path / WEIGHTS)
    return tensors


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path / WEIGHTS)
