"""By which kernels the layers of a model in training run: as transformers and peft have them, or fused.

Fused is LoRA in one function (`fused_lora`), and on a GPU Liger's RMSNorm, SwiGLU and rotary embedding, if the extra
`liger` is installed. They change a result by rounding alone. Source of the times: docs/explanation/measurements.md. [ours]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from stages.frame.sections import Kernels
from stages.frame.types import UsageError
from stages.learn.adapter import base_of
from stages.learn.fused_lora import fused_lora


@contextmanager
def training_kernels(model: Any, kernels: Kernels, *, autocast: bool) -> Iterator[None]:
    """The model with these kernels (`model.kernels`), put back afterwards. Forward and backward belong inside.

    auto: fused on a GPU or under autocast. On a CPU in fp32 the sums then keep their order to the last bit.
    Raises UsageError where "fused" is asked for, and a LoRA layer of the model cannot be fused.
    """
    device = base_of(model).device
    with ExitStack() as stack:
        if kernels == "fused" or (kernels == "auto" and (device.type != "cpu" or autocast)):
            stack.enter_context(fused_lora(model, strict=kernels == "fused"))
            if not no_liger(device):
                stack.enter_context(liger(model))
        yield


def no_liger(device: torch.device | str) -> str:
    """Why Liger's kernels do not run on a device, in one sentence; "" where they do."""
    if torch.device(device).type != "cuda":
        return f"Liger's kernels want a CUDA device, found {device}; leave them out there."
    if find_spec("liger_kernel") is None:
        return "Liger's kernels want the package liger-kernel, which is not installed; install the extra liger."
    return ""


@contextmanager
def liger(model: Any) -> Iterator[None]:
    """A loaded model with Liger's RMSNorm, SwiGLU and rotary embedding, put back afterwards.

    Liger binds methods to the model's modules, and replaces names in transformers' module of the architecture. An
    architecture that it does not know stays as it is. Raises UsageError with `no_liger`'s sentence.
    """
    base = base_of(model)
    if reason := no_liger(base.device):
        raise UsageError(reason)
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # the one way for a model that is loaded

    architecture = sys.modules[type(base).__module__]
    named, own = dict(vars(architecture)), [(module, set(vars(module))) for module in base.modules()]
    try:
        _apply_liger_kernel_to_instance(
            base, rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
        )
        yield
    finally:
        vars(architecture).update(named)
        for module, names in own:
            for name in set(vars(module)) - names:
                del vars(module)[name]
