"""LoRA of a linear layer as one autograd function, for training: the low-rank product goes into the base product.

    y = x W^T + b + s (x A^T) B^T
    dx = g W + s (g B) A,   dA = s (g B)^T x,   dB = s g^T (x A^T)

peft's own path makes the low-rank product, scales it and adds it, each over the whole output; and under autocast it
casts x twice. Here `addmm_` adds the low-rank product in place. A and B stay as they are, and are cast once a pass. [ours]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from stages.frame.types import UsageError


class FusedLora(torch.autograd.Function):
    """x (..., I), W (O, I), b (O,) or None, A (r, I), B (O, r) -> y (..., O) in `dtype`. No gradient for W and b."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype
    ) -> Tensor:
        ctx.scale, ctx.shape, ctx.dtypes = scale, x.shape, (x.dtype, a.dtype, b.dtype)
        x, a, b = x.reshape(-1, x.shape[-1]).to(dtype), a.to(dtype), b.to(dtype)
        out = linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))
        low = linear(x, a)
        out.addmm_(low, b.T, alpha=scale)
        # W as it is, and not its cast: that would be kept for every layer.
        ctx.save_for_backward(x, weight, a, b, low)
        return out.view(*ctx.shape[:-1], out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, low = ctx.saved_tensors
        of_x, of_a, of_b = ctx.dtypes
        grad = grad.reshape(-1, grad.shape[-1])
        grad_low = (grad @ b).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight.to(grad.dtype)).addmm_(grad_low, a).view(ctx.shape).to(of_x)
        return grad_x, None, None, (grad_low.T @ x).to(of_a), (grad.T @ low).to(of_b).mul_(ctx.scale), None, None


@contextmanager
def fused_lora(model: Any, *, strict: bool = False) -> Iterator[None]:
    """Within, the model's LoRA layers run by `FusedLora`; forward and backward may leave it apart. Put back afterwards.

    Merged or disabled layers, several active adapters, and what `obstacle` names stay with peft's own path.
    strict: raise UsageError where the model has no LoRA layer, or one with an obstacle.
    """
    layers = _lora_layers(model)
    if strict:
        found = [reason for layer in layers for name in layer.lora_A if (reason := obstacle(layer, name))]
        if not layers or found:
            reason = found[0] if found else "it has no LoRA layer"
            raise UsageError(f"model.kernels: fused does not run this model, since {reason}; set it to auto or torch")
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            if own is None:
                del layer.forward
            else:
                layer.forward = own


def obstacle(layer: Any, name: str) -> str:
    """Why an adapter of a LoRA layer has to stay with peft's own path, as the end of a sentence; "" if it need not."""
    base = layer.base_layer
    if type(base) is not nn.Linear:
        return f"a LoRA layer stands over {type(base).__name__}, not Linear"
    if base.weight.requires_grad:
        return "the weights below its LoRA are trained, too"
    if not isinstance(layer.lora_dropout[name], nn.Identity):
        return "its LoRA has dropout"
    if name in layer.lora_variant or layer.lora_B[name].bias is not None:
        return "its LoRA is a variant"
    return ""


def _lora_layers(model: Any) -> list[Any]:
    from peft.tuners.lora import Linear

    return [module for module in model.modules() if type(module) is Linear]


def _forward(layer: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    alone = len(active) == 1 and not (layer.disable_adapters or layer.merged or args or options)
    if not alone or obstacle(layer, active[0]):
        own: Tensor = type(layer).forward(layer, x, *args, **options)
        return own
    [name], base = active, layer.base_layer
    found: Tensor = FusedLora.apply(  # type: ignore[no-untyped-call]
        x, base.weight, base.bias, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name], _dtype(x)
    )
    return found


def _dtype(x: Tensor) -> torch.dtype:
    """What a product with x is worked out in: autocast leaves fp64 alone."""
    kind = x.device.type
    autocast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if autocast else x.dtype
