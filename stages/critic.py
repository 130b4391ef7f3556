"""Train the successor on the backed-up futures (L1), then move the target network. distill moves it again.

    L1 = E_{(s,a) from the replay} [ -log M_theta(f | s, a) ],   theta_target <- theta_target + rate (theta -
        theta_target)

Source: arXiv 2512.04601, L1 and Algorithm 1. Ours: a row's length-normalised NLL is its new priority, and the EMA
averages the LoRA tensors. Every step also holds policy rows, because policy and successor share one adapter.

    turnwise rerun critic --of RUN --set critic.lr=1e-3
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from stages.frame.contract import Context, FromPath, Outputs, Stage
from stages.frame.types import MissingInput, Row
from stages.learn.fit import Lists
from stages.learn.later import Later
from stages.train.history import curves, fit_metrics
from stages.train.model import MixedConfig
from stages.train.network import batches_of, followed, open_net, save_net, trained
from stages.train.passes import Pass, mixed_nll
from stages.train.rows import general_rows, policy_rows, read_targets, target_rows, weighed


class CriticConfig(MixedConfig):
    """L1 and the target network."""

    epochs: int = Field(1, ge=1, description="Passes over the iteration's targets. [ours]")
    frozen: bool = False
    """Give targets weight 0, so the successor is not trained. Steps and policy rows stay the same. [ours, ablation]"""
    batch: int = Field(48, ge=1, description="Targets a step. [ours]")
    policy_rows: int = Field(16, ge=0)
    """Policy rows in every step, from the last refinements or, at first, its own actions. [ours]"""
    general_rows: int = Field(0, ge=0)
    """General rows in every step. [paper: general instruction data against forgetting]"""
    general_path: Annotated[str, FromPath(used_with="general_rows")] = "data/base/general.jsonl"
    """JSONL file of general rows. [ours]"""
    ema_rate: float = Field(0.01, gt=0, le=1)
    """EMA rate of the target network, a step. [paper: an EMA; rate ours]"""


def run(context: Context) -> Outputs:
    """Artifacts `adapter` and `target`, rows of `priorities`."""
    config: CriticConfig = context.config
    rows = target_rows(read_targets(context.replay, context.inputs["targets"], "successor"))
    if not rows:
        raise MissingInput(f"critic needs successor targets of run {context.latest('targets')}, found 0; rerun targets")
    model, target = open_net(context, context.latest("distill") or context.latest("critic"))
    losses: dict[tuple[Any, ...], tuple[float, int]] = {}
    steps = 0
    kinds = {"successor": (rows, config.batch), "policy": (policy_rows(context), config.policy_rows)}
    if config.general_rows:
        kinds["general"] = (general_rows(context.run.model.path, config.general_path), config.general_rows)
    kinds = {kind: (weighed(rows, config.weight), n) for kind, (rows, n) in kinds.items()}
    if config.frozen:
        kinds["successor"] = ([replace(row, weight=0.0) for row in rows], config.batch)
    bar = context.progress("train critic", config.epochs * -(-len(rows) // config.batch))

    def loss(model: Any, step: Pass) -> Any:
        value, metrics, nll_R = mixed_nll(model, step, autocast=config.autocast)

        def told(found: list[float]) -> dict[str, Any]:
            each = zip(step.rows, step.kinds, found, strict=True)
            return {"each/nll": [[row.key, nll] for row, kind, nll in each if kind == "successor"]}

        return value, metrics | Later([nll_R], told)

    def each(lists: Lists) -> None:
        losses.update({tuple(key): (nll, steps) for key, nll in lists["each/nll"]})

    def after_step(done: list[dict[str, float]]) -> None:
        nonlocal target, steps
        target = followed(target, model, config.ema_rate)
        steps = len(done)
        bar.advance(1)

    batches = batches_of(context, model, kinds, main="successor", rng=random.Random(context.seed))
    history = trained(context, model, batches, loss, after_step, each)
    rows_left, files = {"priorities": priority_rows(losses)}, save_net(context, model, target)
    steps_told = curves("critic", history, ("nll/successor", "nll/policy", "grad_norm"))
    return Outputs(fit_metrics("critic", history), rows_left, files, steps_told)


def priority_rows(losses: dict[tuple[Any, ...], tuple[float, int]]) -> list[Row]:
    return [{"episode_id": key[0], "turn": key[1], "loss": nll, "step": step} for key, (nll, step) in losses.items()]


STAGE = Stage(
    "critic", 3, CriticConfig, inputs=("targets", "collect", "refine", "pick", "critic", "distill"), roles=(), run=run, trains=True,
    outputs=("priorities", "adapter/", "target/"),
)  # fmt: skip
