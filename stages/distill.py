"""Distil the refined actions into the policy (L2).

    L2 = E_s [ -log pi_theta(a_r | s) ]

Source: arXiv 2512.04601, L2 and Algorithm 1. General rows and the peak rule are the paper's, their numbers ours. With
several epochs, the stage keeps the weights with the lowest NLL on a held-out tenth of the rows. Policy and successor
share the adapter, so L1's target network follows these steps, too.

    turnwise rerun distill --of RUN --set distill.epochs=3
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from stages.frame.contract import Context, FromPath, Outputs, Stage
from stages.learn import ranks
from stages.learn.adapter import load_state, trainable_state
from stages.learn.later import Later
from stages.train.history import curves, fit_metrics
from stages.train.model import MixedConfig
from stages.train.network import (
    VALUE,
    Wanted,
    batches_of,
    followed,
    mixed_q_loss,
    model_of,
    open_net,
    save_net,
    trained,
    value_rows,
)
from stages.train.passes import Pass, half, mean_nll, mixed_nll, pass_kl
from stages.train.rows import TrainRow, general_rows, read_targets, target_rows, weighed


class DistillConfig(MixedConfig):
    """L2."""

    epochs: int = Field(1, ge=1, description="Passes over the iteration's refinements. [ours]")
    batch: int = Field(32, ge=1, description="Refined actions a step. [ours]")
    successor_rows: int = Field(16, ge=0)
    """Critic rows in every step: futures of a successor or numbers of a q_critic. L1 and L2 share one adapter. [ours]"""
    value_weight: float = Field(1.0, gt=0)
    """Weight of the squared error of Q, as q_critic.value_weight. [ours]"""
    general_rows: int = Field(0, ge=0)
    """General rows in every step. [paper: general instruction data against forgetting]"""
    general_path: Annotated[str, FromPath(used_with="general_rows")] = "data/base/general.jsonl"
    """JSONL file of general rows. [ours]"""
    held_out: float = Field(0.1, ge=0, lt=1)
    """Share of the refinements held out for the peak rule, which chooses among several epochs. [ours]"""
    ema_rate: float = Field(0.01, ge=0, le=1)
    """EMA rate of the target network, a step; as critic.ema_rate. 0 = it stands still. [paper: an EMA; rate ours]"""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of KL(pi_theta || pi_base) on the trained tokens. [ours; paper: none]"""


def run(context: Context) -> Outputs:
    """Artifacts `adapter` and `target`. If refine left nothing to learn, both are the critic's, unchanged."""
    config: DistillConfig = context.config
    rng = random.Random(context.seed)
    improved = context.inputs.get("refine") or context.inputs["pick"]
    stored = read_targets(context.replay, improved, "policy")
    rows = weighed(target_rows(stored), config.weight)
    shares = {"distill/kept_share": kept_share(rows, [bool(r["info"].get("kept")) for r in stored])} if rows else {}
    rng.shuffle(rows)
    n_held_out = int(len(rows) * config.held_out) if config.epochs > 1 else 0
    held_out, rows = rows[:n_held_out], rows[n_held_out:]
    values = context.inputs.get("q_critic", ())
    last = context.latest("critic") or context.latest("q_critic") or context.latest("distill")
    net, target = open_net(context, last, head=bool(values))
    model = model_of(net)
    successors = read_targets(context.replay, context.inputs.get("targets", ()), "successor")
    numbers, wanted = value_rows(read_targets(context.replay, values, VALUE))
    kinds = {
        "policy": (rows, config.batch),
        "successor": (weighed(target_rows(successors), config.weight), config.successor_rows),
        VALUE: (numbers, config.successor_rows),
    }
    if config.general_rows:
        general = general_rows(context.run.model.path, config.general_path)
        kinds["general"] = (weighed(general, config.weight), config.general_rows)
    steps_an_epoch = -(-len(rows) // config.batch)
    bar = context.progress("distill policy", config.epochs * steps_an_epoch)
    best: tuple[float, dict[str, Any], dict[str, Any]] = (math.inf, {}, {})  # held-out NLL, adapter, target
    by_epoch: list[float] = []

    def after_step(done: list[dict[str, float]]) -> None:
        nonlocal best, target
        target = followed(target, net, config.ema_rate)
        bar.advance(1)
        if held_out and len(done) % steps_an_epoch == 0:
            by_epoch.append(mean_nll(model, held_out, pass_tokens=config.pass_tokens, autocast=config.autocast))
            if by_epoch[-1] < best[0]:
                best = by_epoch[-1], trainable_state(net), target

    batches = batches_of(context, net, kinds, main="policy", rng=rng)
    history = trained(context, net, batches, with_kl(config, wanted), after_step)
    if best[1]:
        load_state(net, best[1])
        target = best[2]
    counts = {"distill/rows": float(len(rows)), "distill/held_out_rows": float(len(held_out))}
    metrics = fit_metrics("distill", history) | counts | shares
    if best[1]:
        metrics |= {"distill/held_out_nll": best[0], "distill/best_epoch": float(by_epoch.index(best[0]) + 1)}
    steps = curves("distill", history, ("nll/successor", "q_loss", "nll/policy", "grad_norm"))
    return Outputs(metrics, {}, save_net(context, net, target), steps)


def kept_share(rows: Sequence[TrainRow], kept: Sequence[bool]) -> float:
    """Weighted share of L2's rows whose action the critic kept; the others hold rewritten actions."""
    counts = [r.weight * len(r.completion_ids) for r in rows]
    return sum(c for c, is_kept in zip(counts, kept, strict=True) if is_kept) / sum(counts)


def with_kl(config: DistillConfig, wanted: Wanted) -> Any:
    """L2 over the mixed rows, with those that a head reads, plus kl_coef x KL to the base model on policy rows."""

    def loss(net: Any, step: Pass) -> Any:
        if wanted:
            value, metrics, _ = mixed_q_loss(net, step, wanted, weight=config.value_weight, autocast=config.autocast)
        else:
            value, metrics, _ = mixed_nll(net, step, autocast=config.autocast)
        # Layers that are dealt out want as many passes of every rank, whatever rows it has.
        if config.kl_coef and ("policy" in step.kinds or ranks.any_sharded(net.parameters())):
            with half(step.tree.ids.device, config.autocast):
                kl = pass_kl(model_of(net), step, "policy")
            value = value + config.kl_coef * kl
            if "policy" in step.kinds:
                metrics |= of_kl(kl, len(step.places["policy"]) / step.totals["policy"])
        return value, metrics

    return loss


def of_kl(kl: Tensor, share: float) -> Later:
    """A pass's metric of its divergence, which has this share of the step's tokens."""
    return Later([kl], lambda found: {"kl": found / share, "count/kl": share})


STAGE = Stage(
    "distill", 3, DistillConfig, inputs=("refine", "pick", "targets", "critic", "q_critic", "distill"), roles=(),
    run=run, trains=True, outputs=("adapter/", "target/", "head/", "target_head/"),
)  # fmt: skip
