"""Several processes train one model: who does which pass of a step, and what they tell each other.

    gradient of the step = sum over the ranks of the gradients of their passes

Every rank runs the same stage and draws the same rows, so all know all passes of a step. Each does its own, and the
gradients are summed. A pass already divides by the count of the whole step. So the step is that of one process, to
rounding, and all ranks keep the same weights. Without a process group there is one rank, and nothing here costs
anything. Source of the sharding: FSDP2 of torch, `fully_shard`. [ours]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stages.frame.types import TurnwiseError, UsageError


def count() -> int:
    """Processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own() -> int:
    """The number of this process among them, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def dealt(sizes: Sequence[float], n: int) -> list[int]:
    """Whose each pass of a step is: the longest first, each to the rank with the least so far."""
    load, owners = [0.0] * n, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[i] = min(range(n), key=lambda rank: (load[rank], rank))
        load[owners[i]] += sizes[i]
    return owners


def gathered(mine: Any) -> list[Any]:
    """What every rank has, in the order of the ranks. It travels as JSON, which keeps each float to the last bit."""
    if count() == 1:
        return [mine]
    sent = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(count())]
    dist.all_gather(sizes, torch.tensor([len(sent)]))
    lengths = [int(size) for size in sizes]
    padded = torch.nn.functional.pad(sent, (0, max(lengths) - len(sent)))
    found = [torch.empty_like(padded) for _ in range(count())]
    dist.all_gather(found, padded)
    return [json.loads(bytes(one[:length].tolist())) for one, length in zip(found, lengths, strict=True)]


def each_of(parts: Sequence[Any], work: Callable[[Any], Any], model: Any) -> list[Any]:
    """work(part) of every part, in order. Each rank does its own; what comes of it is JSON. No gradient is summed.

    Where the model's layers are dealt out, all ranks do as many passes, for each gathers weights from the others.
    """
    if count() == 1:
        return list(map(work, parts))
    owners = dealt([part.n_tokens for part in parts], count())
    mine = [work(part) for part, owner in zip(parts, owners, strict=True) if owner == own()]
    for _ in range(idle_passes(owners) if any_sharded(model.parameters()) else 0):
        work(parts[0])
    found = list(map(iter, gathered(mine)))
    return [next(found[owner]) for owner in owners]


def idle_passes(owners: Sequence[int]) -> int:
    """By how many passes this rank has fewer than the one with the most."""
    return max(map(owners.count, owners)) - owners.count(own())


def not_alike() -> TurnwiseError:
    """What to raise where the ranks do not have the same passes: they would train on different steps."""
    return TurnwiseError(
        "train.processes: the processes drew different rows for a step. Check that all run the same code, or set it to 1"
    )


def sharded(tensor: Tensor) -> bool:
    """Whether each rank holds a part of it (`train.shard`)."""
    return hasattr(tensor, "full_tensor")


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Whether some of them are. One rank does not look."""
    return count() > 1 and any(map(sharded, tensors))


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which each rank holds a part. All ranks must ask at once."""
    found: Tensor = tensor.full_tensor() if sharded(tensor) else tensor  # type: ignore[attr-defined]
    return found


@torch.no_grad()
def put(into: Tensor, value: Tensor) -> None:
    """Write a whole tensor into a parameter, of which each rank may hold a part."""
    if sharded(into):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(into.device), into.device_mesh, into.placements)  # type: ignore[attr-defined]
    into.copy_(value)


@torch.no_grad()
def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Sum over the ranks, in place. Parameters that are dealt out by layers have summed theirs in the backward pass.

    A rank without a pass has no gradient yet, and gets one of zeros first. By type, so that one message does for all.
    """
    if count() == 1:
        return
    by_type: dict[tuple[Any, Any], list[Tensor]] = {}
    for parameter in parameters:
        if not sharded(parameter):
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            by_type.setdefault((parameter.dtype, parameter.device), []).append(parameter.grad)
    for grads in by_type.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat)
        for grad, summed in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
            grad.copy_(summed.view_as(grad))


def clip_norm(parameters: Sequence[Tensor], largest: float) -> Tensor:
    """torch's clip_grad_norm_, over parameters of which some are dealt out: the norm of the whole gradient."""
    if not any_sharded(parameters):
        return torch.nn.utils.clip_grad_norm_(parameters, largest)
    parts = [p for p in parameters if sharded(p)]
    rest = [p for p in parameters if not sharded(p)]
    norms = [
        whole(torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])) for group in (parts, rest)
    ]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([each.to(norms[0]) for each in norms]))
    for group in (parts, rest):
        torch.nn.utils.clip_grads_with_norm_(group, largest, norm)
    return norm


def shard_layers(base: Any) -> None:
    """Deal out the weights of every decoder layer. Embeddings, final norm and head stay whole on every rank.

    base: a model of transformers whose body is `base.model`, with its adapters. FSDP2 gathers a layer's weights for its
    pass, and averages gradients over the ranks; with the factor 1 it sums them. Raises UsageError for another shape.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers = getattr(getattr(base, "model", None), "layers", None)
    if layers is None:
        raise UsageError(
            f"train.shard: {type(base).__name__} has no model.layers that could be dealt out; set it to none"
        )
    mesh, inside = init_device_mesh(base.device.type, (count(),)), {id(p) for p in layers.parameters()}
    rest = {p for p in base.model.parameters() if id(p) not in inside}
    for module in layers:
        made = fully_shard(module, mesh=mesh)
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)  # gloo has no other
    fully_shard(base.model, mesh=mesh, ignored_params=rest)
