"""How scenarios are dealt to splits, and the order in which a split is played.

A split is decided by a hash of what the scenario is, so adding scenarios moves none from one split to another. Ours.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

from stages.frame.types import UsageError

SPLITS = ("train", "validation", "test")

T = TypeVar("T")


def check_split(task: str, split: str) -> None:
    """Raises UsageError for a split that there is not."""
    if split not in SPLITS:
        raise UsageError(f"there is no split {split!r} of {task}. Splits: {', '.join(SPLITS)}.")


def digest(text: str) -> str:
    """A short name for a text, the same in every process."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def place(key: str, seed: int) -> float:
    """Where the hash of a key lies in [0, 1)."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{key}".encode()).digest()[:8]) / 2**64


def deal(key: str, seed: int, *, test: float, validation: float) -> str:
    """The split of a key, for shares of the test and of the validation split."""
    at = place(key, seed)
    return "test" if at < test else "validation" if at < test + validation else "train"


def draw(items: Sequence[T], split: str, n: int | None, seed: int, *, again: bool = False) -> list[T]:
    """The first n items in an order fixed by split and seed; None = all, once.

    Of train, n larger than the split begins anew in another order; of the held-out splits nothing comes twice, except
    with `again`.
    """
    order = random.Random(f"{split}/{seed}")
    drawn: list[T] = []
    while items and len(drawn) < (len(items) if n is None else n):
        drawn += order.sample(items, len(items))
        if split != "train" and not again:
            break
    return drawn[:n]
