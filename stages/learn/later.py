"""Metrics whose numbers are still on the device. A step's are read together, so that the host waits for it once. [ours]

Each read of a number waits until the device has done all that it was asked for. On a GPU with a small model such waits
cost more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor


class Later(Mapping[str, Any]):
    """Metrics by name, made of numbers that were not read yet. The first look at one reads all that they need.

    tensors: of any shape, detached here. told: takes each as Python has it (a number, or lists of numbers in 64 bits),
    and returns the metrics. `read` reads those of many at once. `a | b` has the metrics of both, and reads nothing.
    """

    def __init__(self, tensors: Sequence[Tensor], told: Callable[..., Mapping[str, Any]]) -> None:
        self.tensors, self.told = [x.detach() for x in tensors], told
        self._found: Mapping[str, Any] | None = None

    def set(self, values: Sequence[Any]) -> None:
        """Makes the metrics. What `told` raises is raised here."""
        self._found = self.told(*values)

    @property
    def waiting(self) -> bool:
        return self._found is None

    @property
    def found(self) -> Mapping[str, Any]:
        if self._found is None:
            self.set(numbers(self.tensors))
            assert self._found is not None
        return self._found

    def __getitem__(self, name: str) -> Any:
        return self.found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __or__(self, other: Mapping[str, Any]) -> Later:
        n, mine = len(self.tensors), self.told
        if not isinstance(other, Later):
            return Later(self.tensors, lambda *values: {**mine(*values), **other})
        return Later([*self.tensors, *other.tensors], lambda *values: {**mine(*values[:n]), **other.told(*values[n:])})


def named(tensors: Mapping[str, Tensor]) -> Later:
    """Metrics that are numbers of the device as they stand, each a tensor of no dimension."""
    return Later([*tensors.values()], lambda *values: dict(zip(tensors, values, strict=True)))


def read(metrics: Sequence[Mapping[str, Any]], tensors: Sequence[Tensor] = ()) -> list[Any]:
    """The numbers of the tensors. Those that the metrics still wait for are read with them, in one copy."""
    waiting = [each for each in metrics if isinstance(each, Later) and each.waiting]
    values = iter(numbers([*tensors, *(x for each in waiting for x in each.tensors)]))
    found = [next(values) for _ in tensors]
    for each in waiting:
        each.set([next(values) for _ in each.tensors])
    return found


def numbers(tensors: Sequence[Tensor]) -> list[Any]:
    """Each tensor as Python has it, a number or lists of them, all by one copy from their device. 64-bit floats hold
    every number of 32 bits and whole numbers below 2^53 exactly.
    """
    found: list[Any] = [x.double().tolist() if x.device.type == "cpu" else None for x in tensors]
    # By type, so that each is joined and widened by one kernel.
    order = sorted((i for i, x in enumerate(tensors) if x.device.type != "cpu"), key=lambda i: str(tensors[i].dtype))
    parts = [
        torch.cat([tensors[i].detach().reshape(-1) for i in same]).double()
        for _, same in groupby(order, key=lambda i: tensors[i].dtype)
    ]
    values = torch.cat(parts).cpu() if parts else torch.empty(0)
    at = 0
    for i in order:
        size = tensors[i].numel()
        found[i] = values[at : at + size].view(tensors[i].shape).tolist()
        at += size
    return found
