"""A pretended GPU: tensors that say they are on "cuda:0", are worked on by the CPU, and refuse to meet a tensor that
was left on the CPU.

What a machine without a GPU can tell of one: whether everything that a step needs is where the model is. As on a real
one, a tensor on the CPU may stand beside those on the GPU where it has no dimension, as an index, and where it is
copied; and nobody but PyTorch reads what a tensor on the GPU holds. Nothing else is pretended: neither a GPU's
arithmetic nor its kernels, memory or speed.

It also counts what a real one would be asked for (`Counts`): kernels, copies to it, and waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adam import _single_tensor_adam
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default}
_INDEXED = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index.Tensor,
}
_JOINED = {_aten.cat.default, _aten.stack.default}
_NOTHING = {"detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias", "set_", "resize_"}
"""Operators beside views and `empty` that start no kernel."""
_WAITS = {"nonzero", "masked_select", "equal", "bincount", "repeat_interleave", "_unique2", "unique_dim"}
"""Operators whose result has a size or a check that the host must know: it waits until the GPU has told it."""


@dataclass
class Counts:
    """What a GPU would have been asked for, by operator.

    launches: operators that start at least one kernel. A view, `empty` and what only changes metadata start none; a
    `_foreach` or `_fused` operator counts once. waits: the host waits for the GPU: a number or tensor is read back, a
    size depends on values (see `_WAITS`), an index is a mask, or a copy to the GPU is a blocking one.
    copies: tensors copied to the GPU, the blocking ones included.
    """

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)


_counts: list[Counts] = []


@contextmanager
def counting(counts: Counts) -> Iterator[Counts]:
    """Adds to `counts` what happens within, on a pretended GPU."""
    _counts.append(counts)
    try:
        yield counts
    finally:
        _counts.remove(counts)


def _note(kind: str, name: str) -> None:
    for counts in _counts:
        getattr(counts, kind)[name] += 1


def _note_operator(func: Any, args: Any) -> None:
    name = func.overloadpacket.__name__
    if name == "_local_scalar_dense":
        return _note("waits", "item")
    if func.is_view or name in _NOTHING or name.startswith(("empty", "new_empty")):
        return
    _note("launches", name)
    if name in _WAITS or (func in _INDEXED and any(x is not None and x.dtype == torch.bool for x in args[1])):
        _note("waits", name)
    if func in _INDEXED and any(isinstance(x, Tensor) and not isinstance(x, OnGpu) for x in args[1]):
        _note("copies", name)
        _note("waits", name)


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Within, there is a GPU, and what is put on it stays there."""
    autocast, is_on, dtype = torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.empty_cache"),
        mock.patch("flows.workspace.devices", return_value=[]),  # nobody else wants it
        # As on a GPU, where PyTorch takes all tensors of a list in one call.
        mock.patch("torch.optim.optimizer._foreach_supported_types", [Tensor, Parameter, OnGpu]),
        mock.patch("torch.nn.utils.clip_grad._has_foreach_support", lambda tensors, device: device.type == "cuda"),
        mock.patch("torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype", _grouped),
        mock.patch("torch.autocast", lambda device_type, *args, **options: autocast("cpu", *args, **options)),
        # by this name for layers that are worked out again
        mock.patch("torch.amp.autocast", lambda device_type, *args, **options: autocast("cpu", *args, **options)),
        mock.patch("torch.is_autocast_enabled", side_effect=lambda *_: is_on("cpu")),
        mock.patch("torch.get_autocast_dtype", side_effect=lambda _: dtype("cpu")),
        _Gpu(),
    ):
        yield


def _grouped(lists: Any, with_indices: bool = False) -> Any:
    """PyTorch's groups by device, which it reads past the Python side."""
    from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

    found = _group_tensors_by_device_and_dtype(lists, with_indices)
    there = any(isinstance(x, OnGpu) for x in lists[0])
    return {(GPU if there else device, dtype): group for (device, dtype), group in found.items()}


class OnGpu(Tensor):
    """A tensor whose Python side says that it is on the GPU. `held` is what it holds, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        found = Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, layout=held.layout,
            device=held.device, requires_grad=held.requires_grad,
        )  # fmt: skip
        found.held = held
        return found

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnGpu({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        _check_together(func, args, kwargs)
        if _counts:
            _note_operator(func, args)
        run = _adamw if func is _aten._fused_adamw_.default else func
        out = tree_map(_put, run(*tree_map(_hold, args), **tree_map(_hold, kwargs)))
        return return_and_correct_aliasing(func, args, kwargs, out)  # type: ignore[no-untyped-call]


def _adamw(params: Any, grads: Any, means: Any, squares: Any, _: Any, steps: Any, **options: Any) -> None:
    """AdamW as on the CPU to the last bit, in place of the fused kernel, which rounds otherwise."""
    names = ("lr", "beta1", "beta2", "weight_decay", "eps", "amsgrad", "maximize")
    before = [step - 1 for step in steps]  # here it counts the step itself
    _single_tensor_adam(
        params, grads, means, squares, [], before, None, None, has_complex=False, capturable=False,
        differentiable=False, decoupled_weight_decay=True, **{name: options[name] for name in names},
    )  # fmt: skip


def _hold(x: Any) -> Any:
    return x.held if isinstance(x, OnGpu) else x


def _put(x: Any) -> Any:
    return OnGpu(x) if isinstance(x, Tensor) and not isinstance(x, OnGpu) else x


def _check_together(func: Any, args: Any, kwargs: Any) -> None:
    """Raises RuntimeError, as PyTorch does, where tensors are not all on one device."""
    if func in _COPIES:
        return
    if func in _INDEXED and isinstance(args[0], OnGpu):
        args = (args[0], *args[2:])  # the indices may be on the CPU
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, Tensor) and not isinstance(x, OnGpu) and (x.dim() or func in _JOINED):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({func}, {tuple(x.shape)})"
            )


class _Move(torch.autograd.Function):
    """From the CPU to the GPU, or back; its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.held if isinstance(x, OnGpu) else OnGpu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Move.apply(gradients[0])  # type: ignore[no-untyped-call]


class _Gpu(TorchFunctionMode):
    """Reads `device` wherever it is named, before PyTorch looks for a real one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        name = getattr(func, "__name__", "")
        if name in ("to", "cpu", "cuda") and func is getattr(Tensor, name):
            return _moved(args, kwargs, name)
        if name in ("numpy", "__array__") and isinstance(args[0], OnGpu):
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
            )
        if name == "_has_compatible_shallow_copy_type":  # whether a module may put the moved parameter into the old one
            return isinstance(args[0], OnGpu) == isinstance(args[1], OnGpu)
        if name == "pin_memory":
            return args[0]
        if name == "tolist" and isinstance(args[0], OnGpu):
            _note("waits", name)
        if name in ("tolist", "storage", "untyped_storage", "data_ptr"):
            return getattr(_hold(args[0]), name)()
        if name == "new_tensor" and isinstance(args[0], OnGpu):
            return OnGpu(args[0].held.new_tensor(*args[1:], **kwargs))
        wanted = kwargs.get("device")
        if wanted is None or torch.device(wanted).type != "cuda" or name == "_parse_to":
            return func(*args, **kwargs)
        if name in ("tensor", "as_tensor"):  # their values come from the host, by a copy that blocks
            _note("copies", name)
            _note("waits", name)
        elif not name.startswith("empty"):
            _note("launches", name)
        out = func(*args, **{**kwargs, "device": "cpu"})
        return tree_map(_put, out)


def _moved(args: Any, kwargs: Any, name: str) -> Any:
    x = args[0]
    if name != "to":
        device, rest, later = torch.device(name), {}, False
    elif isinstance(other := args[1] if len(args) > 1 else kwargs.get("other"), Tensor):
        device, rest, later = other.device, {"dtype": other.dtype}, False
    else:
        device, dtype, later, _ = torch._C._nn._parse_to(*args[1:], **{k: v for k, v in kwargs.items() if k != "copy"})
        rest = {} if dtype is None else {"dtype": dtype}
    if device is not None and (device.type == "cuda") != isinstance(x, OnGpu):
        if not isinstance(x, OnGpu):
            _note("copies", name)
        if isinstance(x, OnGpu) or not later:
            _note("waits", name)
        x = _Move.apply(x)  # type: ignore[no-untyped-call]
    return x.to(**rest) if rest else x
