"""What a step is made of, counted and not timed, so that a busy machine changes nothing: floating-point operations, and
bytes read and written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from stages.learn.episode_row import PackedRow
from stages.learn.tree_layout import layout_of


def matmul_flops(step: Callable[[], object]) -> float:
    """Floating-point operations of all matrix products of a step, as PyTorch counts them. Its attention kernel for CPUs
    is not among them.
    """
    with FlopCounterMode(display=False) as counter:
        step()
    return float(counter.get_total_flops())


def attention_flops(pairs: float, width: int, layers: int) -> float:
    """Of so many pairs of a query and a key it may see: 2 products forward, and 5 backward, where the scores are worked
    out again.
    """
    return 7 * 2 * pairs * width * layers


def causal_pairs(lengths: Sequence[int]) -> float:
    return sum(n * (n + 1) / 2 for n in lengths)


def shadow_pairs(row: PackedRow) -> tuple[float, float]:
    """(pairs that the shadows may see, pairs that the kernel is handed: groups of states share the keys of the last
    one).
    """
    layout = layout_of(row.tree)
    return float(sum(int(g.mask.sum()) for g in layout.groups)), float(sum(g.mask.numel() for g in layout.groups))


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all tensors that operations take and give, by operation; views move nothing, nor does memory that is
    only set aside.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith("empty"):
            self.bytes[name] += sum(
                size_bytes(x) for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)
            )
        return out


def size_bytes(x: torch.Tensor) -> int:
    """What lies in memory of it: an expanded tensor is as small as what it was expanded from."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def traffic(step: Callable[[], object]) -> Counter[str]:
    """Bytes moved by a step, by operation."""
    counter = Traffic()
    with counter:
        step()
    return counter.bytes
