"""The network that critic and policy share: the model with its adapter, a head for a scalar critic, and the target
network's copies. And the loss of rows that a head reads, next to rows of text.

    L = mean nll of the policy rows + weight mean_j w_j (Q(s_j, a_j) - y_j)^2

Source: arXiv 2512.04601 (target network; the baseline SAC, without a loss). [ours]
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from stages.frame.contract import Context
from stages.frame.types import Row
from stages.learn import ranks
from stages.learn.adapter import base_of, load_state, save_adapter, tensors_of, trainable_state
from stages.learn.ema import ema_update
from stages.learn.fit import Lists, Loss, adamw, fit
from stages.learn.later import Later, named
from stages.learn.losses import chunked_log_probs
from stages.learn.moving import moved
from stages.learn.tree_attention import body_pass
from stages.learn.value_head import ValueHead, load_head, new_head, save_head
from stages.llm.roles import mix
from stages.train.history import of_step
from stages.train.model import deal_out, in_training, trainable
from stages.train.passes import Pass, half, mixed_batches, nll_of
from stages.train.rows import TrainRow

VALUE = "value"
"""Kind of the rows that a head reads, and their role in table `targets`."""

Wanted = Mapping[tuple[Any, ...], tuple[float, float]]
"""Key of a row -> the number that Q should be, and the weight of its error."""


def open_net(context: Context, run_id: str | None, *, head: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """What a run left, to be trained, and its target network; or fresh ones. With a head: the list [model, head]."""

    def folder(name: str) -> Any:
        return context.artifact(str(run_id), name)

    model = trainable(context, folder("adapter") if run_id else None)
    # At the start the target is the fresh adapter, which does nothing yet: it equals the base model.
    target = tensors_of(model, folder("target")) if run_id else trainable_state(model)
    deal_out(context, model)
    if not head:
        return model, target
    if run_id:
        width = base_of(model).config.hidden_size
        own, slow = (load_head(folder(name), width=width).to(model.device) for name in ("head", "target_head"))
    else:
        own = slow = new_head(model, seed=mix("head", context.run.seed) % 2**31)
    named = {f"0.{name}": value for name, value in target.items()}
    return nn.ModuleList([model, own]), named | {f"1.{name}": v for name, v in trainable_state(slow).items()}


def model_of(net: Any) -> Any:
    return net[0] if isinstance(net, nn.ModuleList) else net


def batches_of(
    context: Context, net: Any, kinds: Mapping[str, tuple[Sequence[TrainRow], int]], *, main: str, rng: random.Random
) -> Iterator[list[Pass]]:
    """`mixed_batches` as the stage's config says."""
    config = context.config
    return mixed_batches(
        kinds, main=main, epochs=config.epochs, rng=rng, device=model_of(net).device, pass_tokens=config.pass_tokens,
        draw=getattr(config, "draw", "turn"),
    )  # fmt: skip


def trained(
    context: Context, net: Any, batches: Iterable[Any], loss: Loss[Any],
    after_step: Callable[[list[dict[str, float]]], None], each: Callable[[Lists], None] = lambda lists: None,
) -> list[dict[str, float]]:  # fmt: skip
    """`fit` as the stage's config says: the metrics of every step."""
    config = context.config
    optimiser = adamw(net, lr=config.rate(context.iteration))
    with in_training(context, model_of(net)):
        return fit(net, batches, loss, optimiser, clip=config.clip, after_step=after_step, each=each, merge=of_step)


def followed(target: Mapping[str, Tensor], net: Any, rate: float) -> dict[str, Tensor]:
    """The target network after a step of the network that it follows."""
    now = {name: ranks.whole(p.detach()) for name, p in net.named_parameters() if p.requires_grad}
    return ema_update(target, now, rate)


def save_net(context: Context, net: Any, target: Mapping[str, Tensor]) -> dict[str, Any]:
    """Artifacts `adapter` and `target`, with a head also `head` and `target_head`. The network is the target's then."""
    files = {}
    for adapter, head in (("adapter", "head"), ("target", "target_head")):
        files[adapter] = context.workdir / adapter
        save_adapter(model_of(net), files[adapter], context.engine.model_hash)
        if isinstance(net, nn.ModuleList):
            files[head] = context.workdir / head
            save_head(cast(ValueHead, net[1]), files[head])
        load_state(net, dict(target))
    return files


def value_rows(stored: Sequence[Row]) -> tuple[list[TrainRow], dict[tuple[Any, ...], tuple[float, float]]]:
    """Rows of `targets` with role "value", whose last prompt token stands for the completion; and what is wanted."""
    keys = [(row["episode_id"], row["turn"]) for row in stored]
    rows = [
        TrainRow(row["student_ids"][:-1], row["student_ids"][-1:], 0.0, key)
        for row, key in zip(stored, keys, strict=True)
    ]
    return rows, {key: (row["info"]["q"], row["weight"]) for row, key in zip(stored, keys, strict=True)}


def mixed_q_loss(
    net: Any, step: Pass, wanted: Wanted, *, weight: float, autocast: bool = False
) -> tuple[Tensor, Later, Tensor]:
    """The loss above, of this pass: (loss, metrics, Q - y of each value row, detached). Into adapter and head."""
    model, head = net
    device = step.tree.ids.device
    with half(device, autocast):
        states_TD = body_pass(model, step.tree)
        log_probs_K = chunked_log_probs(
            states_TD.index_select(0, step.source_K),
            base_of(model).get_output_embeddings(),
            step.tree.ids[step.target_K],
        )
    loss, of_nll, _ = nll_of(log_probs_K, step)
    metrics = Later(of_nll.tensors, lambda nll_R: without_values(of_nll.told(nll_R)))
    told = [wanted[row.key] for row, kind in zip(step.rows, step.kinds, strict=True) if kind == VALUE]
    if not told:
        return loss, metrics, states_TD.new_zeros(0)
    y, w = moved(torch.tensor(told, dtype=torch.float32), device).unbind(1)
    error = head(states_TD.index_select(0, step.target_K.index_select(0, step.places[VALUE]))) - y
    total, n = (w * error.square()).sum(), float(len(told))
    loss = loss + weight * total / step.totals[VALUE]
    metrics |= Later([total], lambda found: {"q_loss": found / n, "count/q_loss": n, "count/q": n})
    return loss, metrics | named({"q": (error.detach() + y).mean()}), error.detach()


def without_values(metrics: Mapping[str, float]) -> dict[str, float]:
    """But for the likelihood of the tokens that a head reads, whose weight is 0."""
    return {name: value for name, value in metrics.items() if not name.endswith(f"nll/{VALUE}")}
