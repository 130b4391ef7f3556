"""What a GPU makes of the training steps: are packed rows right there, how long does a step take, how much memory, what
share of the peak?

    make gpu-check                            # on a machine with CUDA: shapes of Qwen2.5-0.5B and 7B with random
        weights
    python -m benchmarks.gpu_check --smoke    # the same code at a tiny shape on the CPU; its times mean nothing

First table: a packed row against separate passes, and FlexAttention against sdpa, largest difference in shares of the
largest entry, forward and of the adapter's gradient. Second: whole steps (forward, backward, AdamW) of Self-AC and of
GRPO on the same episodes, adapter of rank 32, layers worked out again. share of peak: work by flows/cost/estimate.py /
seconds / the device's peak on its data sheet; memory: the largest that was allocated, beside what `turnwise plan` would
have said. Exit status 1 where there is no CUDA device, or a packed row is off.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from math import log
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.passes import (
    RANK,
    GrpoRow,
    grpo_log_probs,
    grpo_row,
    made_up,
    self_ac_part,
    shake,
    table_head,
    table_row,
)
from flows import presets
from flows.cost.estimate import Machine, train_flops, training_memory
from flows.cost.shapes import DEVICES, GIB, KNOWN, Device, Shape
from flows.cost.work import Rows, Work
from stages.learn.adapter import base_of, new_adapter
from stages.learn.episode_row import EpisodeIds, pack
from stages.learn.fit import adamw
from stages.learn.losses import turn_ppo_clip
from stages.learn.tree_attention import body_pass, largest_difference, tree_attention
from stages.learn.tree_flex import flex_layout_of
from stages.learn.value_head import new_head
from stages.train.actor_critic import Part, SelfAcConfig, credited_pass, joint_loss

TINY = Shape(2, 64, 2, 1, 32, 96, 300, attention_bias=True, positions=512)
SHAPES = {"tiny": TINY, "0.5b": KNOWN["Qwen/Qwen2.5-0.5B-Instruct"], "7b": KNOWN["Qwen/Qwen2.5-7B-Instruct"]}
ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # as check_masks has them
CRITIC = tuple(range(1, 17))


def random_policy(shape: Shape, dtype: torch.dtype, device: str) -> Any:
    """A Qwen2 of random weights made on the device, with a LoRA adapter that does something."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.inner, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, tie_word_embeddings=shape.tied,
        max_position_embeddings=shape.positions,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return shake(new_adapter(base, rank=RANK, alpha=2 * RANK, seed=0)).train()


def equivalence(shape: Shape, dtype: torch.dtype, device: str, *, flex: bool) -> list[float]:
    """[packed against separate passes, then with `flex`: states, and the adapter's gradient, of FlexAttention against
    sdpa].
    """
    model = random_policy(shape, dtype, device)
    with torch.no_grad():
        found = [largest_difference(model.eval(), 200)]
    if flex:
        row = pack(made_up(3, 4, 40, 40, 40, shape.vocabulary), CRITIC, max_positions=None).to(device)
        states, gradients = zip(
            *(states_and_gradient(model, row, layout) for layout in (None, flex_layout_of(row.tree))), strict=True
        )
        found += [off(*states), off(*gradients)]
    del model
    return found


def states_and_gradient(model: Any, row: Any, layout: Any) -> tuple[Tensor, Tensor]:
    model.zero_grad(set_to_none=True)
    states = body_pass(model, row.tree, layout=layout)
    states.float().square().mean().backward()  # type: ignore[no-untyped-call]
    return states.detach().float(), torch.cat(
        [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    )


def off(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().max() / x.abs().max())


def episodes_of(args: argparse.Namespace, shape: Shape) -> list[EpisodeIds]:
    """As many as a row holds, with the log-probs of a policy that knows nothing, as a random model nearly is."""
    [one] = made_up(1, args.turns, args.length, args.length, args.length, shape.vocabulary)
    n = max(1, args.row_tokens // (len(one.ids) + (args.turns + 1) * len(CRITIC)))
    old = tuple((-log(shape.vocabulary),) * args.length for _ in range(args.turns))
    return [
        replace(e, old_log_probs=old)
        for e in made_up(n, args.turns, args.length, args.length, args.length, shape.vocabulary)
    ]


def grpo_on(device: str, row: GrpoRow) -> GrpoRow:
    return replace(row, **{name: value.to(device) for name, value in vars(row).items()})


def self_ac_step(model: Any, head: Any, part: Part, config: SelfAcConfig) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        found = credited_pass(model, head, part, config, value_grad_scale=1.0)
        return joint_loss(found, part, config, actor_weight=1 - config.alpha)[0]

    return loss


def grpo_step(model: Any, row: GrpoRow, config: SelfAcConfig) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        with torch.autocast(row.ids.device.type, dtype=torch.bfloat16, enabled=config.autocast):
            log_probs = grpo_log_probs(model, row)
        options: dict[str, Any] = {"clip": config.ratio_clip, "ratio": "token", "normaliser": float(len(log_probs))}
        return turn_ppo_clip(log_probs, row.old_log_probs, row.turn_of_token, row.advantages, **options)[0]

    return loss


def timed(
    loss: Callable[[], Tensor], model: Any, modules: nn.ModuleList, device: str, repeats: int
) -> tuple[float, float]:
    """(median seconds of a step, GiB allocated at most); the first step, which compiles and fills the allocator, is
    left out.
    """
    optimiser = adamw(modules, lr=1e-5)
    cuda = device == "cuda"

    def step() -> float:
        start = time.perf_counter()
        optimiser.zero_grad(set_to_none=True)
        loss().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    with tree_attention(model) if base_of(model).model.is_gradient_checkpointing else nullcontext():
        step()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = statistics.median(step() for _ in range(repeats))
    return seconds, torch.cuda.max_memory_allocated() / GIB if cuda else float("nan")


def steps(name: str, device: str, peak: Device | None, args: argparse.Namespace) -> None:
    """Rows of the second table for one shape: GRPO, Self-AC by sdpa, Self-AC by FlexAttention, each without and with
    autocast.
    """
    shape = SHAPES[name]
    model = random_policy(shape, torch.bfloat16, device)
    base_of(model).gradient_checkpointing_enable({"use_reentrant": False})
    head = new_head(model, seed=0)
    both, episodes = nn.ModuleList([model, head]), episodes_of(args, shape)
    part = self_ac_part(episodes, CRITIC, 0)
    part = replace(part, row=part.row.to(device))
    row = grpo_on(device, grpo_row(episodes))
    kernels: tuple[Any, ...] = ("sdpa", "flex") if device == "cuda" else ("sdpa",)
    for autocast in (False, True):
        variants = {("GRPO", "sdpa"): grpo_step(model, row, SelfAcConfig(autocast=autocast))}
        for kernel in kernels:
            config = SelfAcConfig(autocast=autocast, attention=kernel, ratio="token")
            variants["Self-AC", kernel] = self_ac_step(model, head, part, config)
        for (method, kernel), loss in variants.items():
            n = row.ids.numel() if method == "GRPO" else len(part.row.ids)
            rows = Rows(len(episodes), n / len(episodes), len(row.target_ids) / len(episodes))
            sets = [
                "model.dtype=bfloat16",
                "model.gradient_checkpointing=true",
                f"self_ac.row_tokens={n}",
                f"self_ac.autocast={str(autocast).lower()}",
            ]
            machine = Machine(presets.load("self_ac_demo", sets), shape, peak or DEVICES["h100"], 1)
            planned = sum(training_memory(machine, Work("self_ac", trained=(rows,), steps=1)).values())
            try:
                seconds, memory = timed(loss, model, both, device, args.repeats)
            except torch.OutOfMemoryError:
                table_row(
                    name, method, kernel, "yes" if autocast else "no", n, "out of memory", "", "", "", f"{planned:.1f}"
                )
                continue
            work = sum(train_flops(machine, rows, autocast=autocast))
            share = f"{work / seconds / (1e12 * peak.bf16):.2f}" if peak else "-"
            cells = (n, f"{1000 * seconds:.0f}", f"{n / seconds:.0f}", share, f"{memory:.1f}", f"{planned:.1f}")
            table_row(name, method, kernel, "yes" if autocast else "no", *cells)


def peak_of(device_name: str) -> Device | None:
    """The data sheet of the device that is there; None of one that is not in the table."""
    known = device_name.lower().replace(" ", "").replace("-", "")
    return next((device for name, device in sorted(DEVICES.items(), reverse=True) if name.split("-")[0] in known), None)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU")
    parser.add_argument("--shapes", nargs="+", default=["0.5b", "7b"], choices=list(SHAPES))
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--length", type=int, default=200, help="tokens of an action, and of an observation")
    parser.add_argument("--row-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    if args.smoke:
        device, args.shapes, args.turns, args.length, args.row_tokens, args.repeats = "cpu", ["tiny"], 2, 6, 120, 1
    elif torch.cuda.is_available():
        device = "cuda"
    else:
        print(
            f"gpu-check wants a CUDA device, torch {torch.__version__} sees none; --smoke runs the same code on the CPU.",
            file=sys.stderr,
        )
        return 1
    found = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    peak = peak_of(found)
    print(f"{found}, torch {torch.__version__}, peak {f'{peak.bf16:g} TFLOP/s in bf16' if peak else 'not known'}\n")
    table_head("dtype", "packed against separate", "flex against sdpa", "its gradient", "allowed")
    wrong = False
    for dtype in (torch.float32, torch.bfloat16):
        shape = TINY if args.smoke else replace(SHAPES["0.5b"], layers=4)
        offs = equivalence(shape, dtype, device, flex=device == "cuda")
        wrong |= not max(offs) <= ALLOWED[dtype]
        cells = [f"{x:.1e}" for x in offs] + ["-"] * (3 - len(offs))
        table_row(str(dtype).removeprefix("torch."), *cells, f"{ALLOWED[dtype]:g}")
    print()
    table_head(
        "shape", "method", "kernel", "autocast", "tokens", "ms", "tokens/s", "share of peak", "GiB", "planned GiB"
    )
    for name in args.shapes:
        steps(name, device, peak, args)
        if device == "cuda":
            torch.cuda.empty_cache()
    if wrong:
        print(
            "a packed row is off by more than is allowed: do not train Self-AC with this kernel and dtype here.",
            file=sys.stderr,
        )
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
