"""The model opened for training, and the config that every stage with a gradient has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from stages.frame.contract import Config, Context
from stages.frame.types import Sleeper, UsageError
from stages.learn import ranks
from stages.learn.adapter import base_of, new_adapter, open_adapter
from stages.learn.fit import lr_factor
from stages.learn.kernels import training_kernels
from stages.learn.tree_attention import check_masks, tree_attention
from stages.llm.hf import check_adapter, shared_base
from stages.llm.roles import mix
from stages.play.drawing import Draw


class OptimConfig(Config):
    """Keys that every stage with a gradient has. Between two iterations the rate falls from lr to lr x lr_final."""

    lr: float = Field(1e-4, gt=0, description="AdamW learning rate. [ours]")
    lr_decay_start: int = Field(1000, ge=0, description="Iteration from which the rate falls linearly. [ours]")
    lr_decay_end: int = Field(1000, ge=0, description="Iteration at which it is lr x lr_final. [ours]")
    lr_final: float = Field(1.0, gt=0, le=1, description="Share of the rate that is left then. [ours]")
    clip: float = Field(1.0, gt=0, description="Largest gradient norm. [ours]")
    autocast: bool = False
    """Passes compute in bfloat16 where torch's autocast does; weights, head and losses stay. [ours]"""

    def rate(self, iteration: int) -> float:
        """The learning rate of an iteration."""
        return self.lr * lr_factor(iteration, start=self.lr_decay_start, end=self.lr_decay_end, final=self.lr_final)


class PassConfig(OptimConfig):
    """And of every stage whose rows are a prompt and a completion each."""

    pass_tokens: int = Field(0, ge=0)
    """Most tokens of one pass; a shared prefix counts once. A step takes as many passes as it needs, with the same gradient. 0 = no limit. [ours]"""


class MixedConfig(PassConfig):
    """And of critic and distill, whose steps hold rows of several kinds."""

    draw: Draw = "turn"
    """Rows of a step: any (turn), or an episode's rows one after another, which share a prefix. [ours]"""
    weight: Literal["token", "row"] = Field(
        "token",
        description="What has equal weight in a step's loss. token: a long row counts for more, with its whole log-likelihood. row: every row, whatever its length. [paper: token; row ours]",
    )


def trainable(context: Context, start: Path | None) -> Any:
    """The base model with the adapter of folder `start`, or a fresh one, in training mode. Raises UsageError for an
    adapter of another base, for FlexAttention on a CPU, and once for a model on which a tree differs from its rows.
    """
    model = context.run.model
    if isinstance(context.engine, Sleeper):  # it and the training share a device, and need it one after the other
        context.engine.sleep()
    base = shared_base(model.path, model.dtype)
    if model.attention == "flex" and base.device.type == "cpu":
        raise UsageError("model.attention: FlexAttention has no backward pass on a CPU; set it to auto or sdpa")
    if model.gradient_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    if start is not None:
        check_adapter(start, context.engine.model_hash)
        return open_adapter(base, start).train()
    # The seed of the run, not of the stage: every stage of a run that starts afresh starts from the same adapter.
    fresh = new_adapter(
        base, rank=model.lora_rank, alpha=model.lora_alpha, seed=mix("adapter", context.run.seed) % 2**31
    )
    check_masks(fresh)
    return fresh.train()


def trainable_policy(context: Context) -> Any:
    """The model with the newest policy's adapter, or a fresh one, in training mode."""
    return trainable(context, context.artifact(context.policy_run, "adapter") if context.policy_run else None)


def deal_out(context: Context, model: Any) -> None:
    """The layers of a model with all its adapters, over the ranks, if `train.shard` says so. Raises UsageError where
    it cannot be.
    """
    if ranks.count() > 1 and context.run.train.shard == "layers":
        ranks.shard_layers(base_of(model))


@contextmanager
def in_training(context: Context, model: Any) -> Iterator[None]:
    """A model of `trainable` with the attention and the kernels of the run's config, put back afterwards.

    Forward and backward of all training passes belong inside: layers that a backward pass works out again must find
    the attention that they had. Raises UsageError where the model cannot have them.
    """
    shape = context.run.model
    with (
        tree_attention(model, shape.attention),
        training_kernels(model, shape.kernels, autocast=context.config.autocast),
    ):
        yield
