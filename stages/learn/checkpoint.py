"""The state of a training in one safetensors file: weights, AdamW's moments, and the metrics of its steps.

A file is complete or absent, so a kill at any moment leaves the last one. Training from it takes the same steps as
without the break, bit by bit on a CPU. Moments kept from one iteration to the next spare Adam its blind first steps.
[ours]
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stages.frame.types import TurnwiseError
from stages.learn import ranks

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def save_checkpoint(
    path: Path,
    model: Any,
    optimiser: torch.optim.Optimizer,
    history: Sequence[dict[str, float]] = (),
    *,
    weights: bool = True,
) -> None:
    """Write the trainable parameters (with weights=True), their moments, and the history. Of several ranks the first
    writes.
    """
    found = [(f"{kind}/{name}", t) for kind, name, t in _moments(model, optimiser)]
    if weights:
        found += [(f"weight/{name}", p) for name, p in model.named_parameters() if p.requires_grad]
    tensors = {name: ranks.whole(t.detach()).cpu().contiguous() for name, t in found}
    if ranks.own():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.{os.getpid()}")
    save_file(tensors, half, metadata={"history": json.dumps(list(history))})
    os.replace(half, path)


def load_checkpoint(path: Path, model: Any, optimiser: torch.optim.Optimizer) -> list[dict[str, float]]:
    """Put into model and optimiser what the file has of them; returns the history.

    Raises TurnwiseError for a file that cannot be read, or that is of another model."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping, it has `keys` alone
            history: list[dict[str, float]] = json.loads(file.metadata()["history"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise TurnwiseError(
            f"the checkpoint {path.name} cannot be read ({error}); delete {path} and run again"
        ) from error
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        if name not in parameters or (kind != "step" and parameters[name].shape != tensor.shape):
            raise TurnwiseError(
                f"the checkpoint {path.name} is of another model: {name} does not fit; delete {path} and run again"
            )
        if kind == "weight":
            ranks.put(parameters[name], tensor)
            continue
        if kind != "step" and ranks.sharded(parameters[name]):
            optimiser.state[parameters[name]][kind] = torch.zeros_like(parameters[name])
            ranks.put(optimiser.state[parameters[name]][kind], tensor)
            continue
        # torch keeps the count of steps on the CPU, whatever the parameter's device, but for its fused step.
        stays = kind == "step" and not optimiser.defaults.get("fused")
        optimiser.state[parameters[name]][kind] = tensor if stays else tensor.to(parameters[name].device)
    return history


def _moments(model: Any, optimiser: torch.optim.Optimizer) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, parameter's name, tensor); nothing for a parameter that has not been stepped yet."""
    for name, parameter in model.named_parameters():
        for kind in MOMENTS if parameter.requires_grad and parameter in optimiser.state else ():
            yield kind, name, optimiser.state[parameter][kind]
