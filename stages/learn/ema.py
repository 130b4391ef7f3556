"""The target network: an exponential moving average of the trained weights.

Source: NLAC (arXiv 2512.04601), language Bellman backup with target parameters. It gives no rate: 0.005 to 0.05 is
ours. With LoRA the average covers the adapter's weights only, so there is no second model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def ema_update(target: Mapping[str, Any], source: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """One step of the target towards the source, as new values.

        target' = target + rate (source - target) = (1 - rate) target + rate source

    Of a source that stands still the distance is (1 - rate)^n after n steps. rate = 1 copies, 0 keeps.
    target, source: name -> torch tensor or numpy array, the same names and shapes; the source may differ in precision
    and device. Returns values of the target's precision and device; neither argument is changed and no gradient flows.
    Raises ValueError on a rate outside [0, 1], on names or shapes that differ, and on a target below 32 bits.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must be in [0, 1], found {rate}")
    if target.keys() != source.keys():
        raise ValueError(f"target and source differ in names: {sorted(target.keys() ^ source.keys())[:5]}")
    for name in target:
        _check(name, target[name], source[name])
    if not all(hasattr(x, "detach") for x in target.values()):
        return {name: x + rate * (source[name].astype(x.dtype) - x) for name, x in target.items()}
    old = [x.detach() for x in target.values()]
    steps = [source[name].detach().to(x) for name, x in target.items()]
    return dict(zip(target, _moved(old, steps, rate), strict=True))


def _moved(old: list[Any], new: list[Any], rate: float) -> list[Any]:
    """target + rate (source - target) of all tensors, in three calls and not three a tensor."""
    import torch

    if not old:
        return []
    steps = torch._foreach_sub(new, old)
    torch._foreach_mul_(steps, rate)
    return list(torch._foreach_add(old, steps))


def _check(name: str, target: Any, source: Any) -> None:
    if tuple(target.shape) != tuple(source.shape):
        raise ValueError(f"{name}: target has shape {tuple(target.shape)}, source {tuple(source.shape)}")
    if target.dtype.itemsize < 4:
        # Steps below half a unit in the last place are rounded away: at rate 0.005 a bfloat16 target stops while it is
        # still up to 40-80 % off, and never says so.
        raise ValueError(f"{name}: the target must be float32 or wider, found {target.dtype}")
