"""A training step with fused LoRA against the same step by peft's own path.

    python -m benchmarks.speed.fused_lora                     # widths 128 and 576, fp32 and bf16 autocast, on a CPU
    python -m benchmarks.speed.fused_lora --widths 128 --layers 2 --tokens 256 --pairs 2

A step is Self-AC's packed row, forward and backward, and AdamW, on a frozen base with LoRA of rank 32 on every linear
layer. Both steps run in turn in one process on one thread.

torch, fused: median seconds of a step. ratio: median over pairs of fused / torch, ± half the interquartile range; below 1
fused is faster. Random weights: only the time matters.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.passes import (
    CONFIG,
    in_turn,
    made_up,
    one_thread,
    random_policy,
    self_ac_part,
    table_head,
    table_row,
    with_log_probs,
)
from stages.frame.sections import Kernels
from stages.learn.fit import adamw
from stages.learn.kernels import training_kernels
from stages.learn.value_head import new_head
from stages.train.actor_critic import credited_pass, joint_loss

TURNS, LENGTH, CRITIC = 4, 40, (1,) * 8


def measure(width: int, layers: int, tokens: int, pairs: int, *, autocast: bool) -> None:
    [one] = made_up(1, TURNS, LENGTH, LENGTH, LENGTH, 1000)
    n = max(1, tokens // (len(one.ids) + (TURNS + 1) * len(CRITIC)))
    model = random_policy(width, layers, len(one.ids) + len(CRITIC), 1000)
    head, config = new_head(model, seed=0), CONFIG.model_copy(update={"autocast": autocast})
    episodes = with_log_probs(model, made_up(n, TURNS, LENGTH, LENGTH, LENGTH, 1000))
    part = self_ac_part(episodes, CRITIC, 0)
    both = nn.ModuleList([model, head])
    optimiser = adamw(both, lr=1e-6)

    def step(kernels: Kernels) -> Callable[[], None]:
        def once() -> None:
            optimiser.zero_grad(set_to_none=True)
            with training_kernels(model, kernels, autocast=autocast):
                found = credited_pass(model, head, part, config, value_grad_scale=1.0)
                joint_loss(found, part, config, actor_weight=0.5)[0].backward()  # type: ignore[no-untyped-call]
            optimiser.step()

        return once

    found = in_turn(step("torch"), step("fused"), pairs)
    kind = "bf16 autocast" if autocast else "fp32"
    table_row(width, layers, kind, len(part.row.ids), f"{found.first_s:.3f}", f"{found.second_s:.3f}", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 576])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the packed row, at most")
    parser.add_argument("--pairs", type=int, default=15)
    args = parser.parse_args()
    one_thread()
    table_head("width", "layers", "numbers", "tokens", "torch, s", "fused, s", "ratio")
    for width in args.widths:
        for autocast in (False, True):
            torch.manual_seed(0)
            measure(width, args.layers, args.tokens, args.pairs, autocast=autocast)


if __name__ == "__main__":
    main()
