"""RFT, a baseline: supervised learning on the agent's own winning episodes, again and again.

    L = E_{episodes with reward 1} [ -log pi_theta(a | s) ]

Source: rejection-sampling fine-tuning, as the baseline of arXiv 2512.04601. Winning episodes of all iterations are
kept. [ours]

    turnwise run demo_rft
"""

from __future__ import annotations

import random
from typing import Any

from pydantic import Field

from stages.frame.contract import Context, Outputs, Stage
from stages.learn.adapter import save_adapter
from stages.learn.fit import adamw, fit
from stages.play.transitions import transitions
from stages.train.training import (
    PassConfig,
    TrainRow,
    fit_metrics,
    mixed_batches,
    mixed_nll,
    of_step,
    pad_id,
    trainable_policy,
)


class RftConfig(PassConfig):
    """How the wins are learned."""

    epochs: int = Field(2, ge=1, description="Passes over the rows. [ours]")
    batch: int = Field(32, ge=1, description="Turns a step. [ours]")
    rows: int = Field(512, ge=1, description="Most turns an iteration, drawn from all wins so far. [ours]")


def run(context: Context) -> Outputs:
    """Artifact `adapter`; without a single win so far it is the adapter that came in."""
    config: RftConfig = context.config
    rng = random.Random(context.seed)
    won = [t for t in transitions(context.replay, context.inputs["collect"]) if t.total_reward >= 1 and not t.malformed]
    rows = [TrainRow(t.prompt_ids, t.action_ids, key=t.key) for t in rng.sample(won, min(config.rows, len(won)))]
    model = trainable_policy(context)
    bar = context.progress("train on wins", config.epochs * -(-len(rows) // config.batch))

    def loss(model: Any, parts: Any) -> Any:
        return mixed_nll(model, parts, autocast=config.autocast)[:2]

    batches = mixed_batches(
        {"policy": (rows, config.batch)}, main="policy", epochs=config.epochs, rng=rng, pad_id=pad_id(model), device=model.device,
        pass_tokens=config.pass_tokens,
    )  # fmt: skip
    optimiser = adamw(model, lr=config.rate(context.iteration))
    history = fit(
        model, batches, loss, optimiser, clip=config.clip, after_step=lambda done: bar.advance(1), merge=of_step
    )
    save_adapter(model, context.workdir / "adapter", context.engine.model_hash)
    return Outputs(
        fit_metrics("rft", history) | {"rft/wins": float(len(won))}, {}, {"adapter": context.workdir / "adapter"}
    )


STAGE = Stage("rft", 1, RftConfig, inputs=("collect", "rft"), roles=(), run=run, outputs=("adapter/",))
