"""The weights of the last base model stay in memory, so that the stages of a process read them from disk once.

Each stage gets its own model (modules, buffers, config, flags and hooks are copies of a fresh load) over the same
weights. Nobody may write to the weights: training changes adapters beside them. So a stage's adapters, gradient
checkpointing or hooks never reach the next one's model. The kept weights stay on the CPU. A model on a GPU has copies,
which are freed with it. [ours]
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Kept:
    """A model that nobody works with, and how often each of its weights had been written to when it was read."""

    key: tuple[Any, ...]
    model: Any
    versions: tuple[int, ...]

    @property
    def untouched(self) -> bool:
        return self.versions == _versions(self.model)


_kept: list[Kept] = []  # at most one


def lend(path: str, dtype: str, load: Callable[[], Any]) -> Any:
    """A model over the kept weights of this folder, on the CPU. If the folder or the weights changed, `load` reads a
    model in evaluation mode on the CPU.
    """
    key = (str(Path(path).absolute()), dtype, _files(path))
    if not (_kept and _kept[0].key == key and _kept[0].untouched):
        forget()  # first: there is not always room for two
        model = load()
        _kept.append(Kept(key, model, _versions(model)))
    return _twin(_kept[0].model)


def forget() -> None:
    """Let go of the weights; models that were lent keep theirs."""
    _kept.clear()


def _twin(model: Any) -> Any:
    # detach: another parameter with a `requires_grad` of its own over the same memory, and the same count of writes.
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def _versions(model: Any) -> tuple[int, ...]:
    return tuple(p._version for p in model.parameters())


def _files(path: str) -> tuple[tuple[str, int, int], ...]:
    """What tells a folder from what stood there before; nothing of a hub's name."""
    folder = Path(path)
    found = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()] if folder.is_dir() else []
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)
