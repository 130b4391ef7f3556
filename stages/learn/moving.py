"""Many small tensors to a device by one copy, which the host does not wait for. [ours]

Indices of a step are made by the host. One by one they would be dozens of copies, each of which waits until the device
has done all that it was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

X = TypeVar("X")
ALIGNED_BYTES = 16  # where a tensor may begin within the one that is copied


def moved(x: X, device: Any) -> X:
    """x with all of its tensors on the device: a tensor, a frozen dataclass, or a list, tuple or dict of such.

    A dataclass with a field `host` keeps there what it was before, so that the host can go on looking at it. What holds
    no tensor, or is on the device already, stays the same object. No gradient flows.
    """
    device = torch.device(device)
    found = [t for t in _tensors(x) if t.device.type != device.type]
    if not found:
        return x
    new = dict(zip(map(id, found), _copied(found, device), strict=True))
    rebuilt: X = _rebuilt(x, new)
    return rebuilt


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple | dict):
        inside = list(x.values()) if isinstance(x, dict) else x
        # Of ids and names, which are many, only the first is looked at.
        if inside and (is_dataclass(inside[0]) or isinstance(inside[0], Tensor | list | tuple | dict)):
            for each in inside:
                yield from _tensors(each)
    elif is_dataclass(x):
        for f in fields(x):
            if f.name != "host":
                yield from _tensors(getattr(x, f.name))


def _rebuilt(x: Any, new: Mapping[int, Tensor]) -> Any:
    """x with the new tensors in place of those of these ids."""
    if isinstance(x, Tensor):
        return new.get(id(x), x)
    if isinstance(x, type) or not any(id(t) in new for t in _tensors(x)):
        return x
    if isinstance(x, dict):
        return {name: _rebuilt(each, new) for name, each in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(_rebuilt(each, new) for each in x)
    names = {f.name for f in fields(x)}
    changed = {name: _rebuilt(getattr(x, name), new) for name in names if name != "host"}
    return replace(x, **changed, **({"host": x} if "host" in names else {}))


def _copied(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Each tensor on the device, as a view of one that holds them all."""
    if tensors[0].device.type != "cpu":
        return [x.to(device) for x in tensors]
    starts, size = [], 0
    for x in tensors:
        starts.append(size)
        size += -(-x.numel() * x.element_size() // ALIGNED_BYTES) * ALIGNED_BYTES
    whole = torch.empty(size, dtype=torch.uint8)
    for x, start in zip(tensors, starts, strict=True):
        whole[start : start + x.numel() * x.element_size()].view(x.dtype).copy_(x.reshape(-1))
    if device.type == "cuda":
        whole = whole.pin_memory()  # only from such memory the copy goes on by itself
    there = whole.to(device, non_blocking=True)
    return [
        there[start : start + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        for x, start in zip(tensors, starts, strict=True)
    ]
