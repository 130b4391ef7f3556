"""Warm a real model for a task's roles: gradient steps on a corpus, through the model's own chat template.

    L = mean over all reply tokens of -log pi(y_t | prompt, y_<t),   the end token included

In a made-up corpus every row has its own random rules. So the model learns to speak as the roles do, and no task's
answers. The rows of a step form trees: what prompts share is read once. Passes compute in bfloat16. [ours]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from stages.corpora import Example
from stages.learn.adapter import WEIGHTS, base_of, new_adapter, read_tensors, save_adapter
from stages.learn.fit import adamw, fit, flat_then_falling
from stages.learn.fused_lora import fused_lora
from stages.llm.hf import best_device, merge_adapter, model_hash, read_base
from stages.llm.roles import mix
from stages.llm.tokens import ChatTokenizer, end_token
from stages.train.passes import Pass, mixed_nll, step_passes
from stages.train.rows import TrainRow

RISE = 10
"""First steps, over which the rate rises linearly."""
PASS_TOKENS = 4096
"""Most tokens of one pass. It bounds the memory; a step's gradient is the same."""


def open_warm(path: str, *, rank: int, seed: int) -> tuple[Any, ChatTokenizer, int]:
    """The model at `path` in training mode, its tokenizer, and its end token. rank: of a fresh adapter; 0 = none, and
    all weights are trained, in fp32.
    """
    chat = ChatTokenizer(path)
    base = read_base(path, "bfloat16" if rank else "float32")[0].to(best_device())
    model = new_adapter(base, rank=rank, alpha=2 * rank, seed=mix("warm", seed) % 2**31) if rank else base
    return model.train(), chat, end_token(chat.tokenizer)


def rows_of(tokenizer: ChatTokenizer, examples: Sequence[Example], end: int) -> list[TrainRow]:
    """A row an example: the prompt as an engine would read it, and the reply with its end token."""
    prompts = tokenizer.encode_all([example.messages for example in examples])
    replies = [(*tokenizer.encode_reply(example.reply), end) for example in examples]
    return [TrainRow(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]


def warm(
    model: Any, draw: Callable[[], list[TrainRow]], *, steps: int, lr: float, flat: float, advance: Callable[[int], Any]
) -> list[float]:
    """Train in place, by AdamW on what is trainable; returns the loss of every step.

    draw: the rows of a step. lr rises over RISE steps, is flat for a share of all, and falls linearly to 3 %.
    Raises Diverged as `fit`.
    """
    optimiser = adamw(model, lr=lr * rate_factor(0, steps, flat))
    batches = (step_passes({"warm": draw()}, PASS_TOKENS, model.device) for _ in range(steps))

    def loss(model: Any, step: Pass) -> Any:
        return mixed_nll(model, step, autocast=True)[:2]

    def after_step(done: list[dict[str, float]]) -> None:
        for group in optimiser.param_groups:
            group["lr"] = lr * rate_factor(len(done), steps, flat)
        advance(1)

    with fused_lora(model):
        found = fit(model, batches, loss, optimiser, after_step=after_step)
    return [metrics["loss"] for metrics in found]


def rate_factor(step: int, steps: int, flat: float) -> float:
    """Share of the learning rate at a step, which counts from 0."""
    return min(flat_then_falling(step / steps, flat), (step + 1) / RISE)


def save_warm(model: Any, base: str, folder: Path, adapter: Path) -> None:
    """Write the model with its tokenizer to `folder`, in bfloat16. One with an adapter is merged, and `adapter` holds
    what was learned, in fp16.
    """
    if base_of(model) is model:
        model.to(torch.bfloat16).save_pretrained(folder)
        ChatTokenizer(base).tokenizer.save_pretrained(folder)
        return
    from safetensors.torch import save_file

    save_adapter(model, adapter, model_hash(base))
    halves = {name: tensor.half() for name, tensor in read_tensors(adapter).items()}
    save_file(halves, adapter / WEIGHTS, metadata={"format": "pt"})
    merge_adapter(base, adapter, folder)
