"""What a GPU makes of the training steps: are packed rows right there, how long does a step take, how much memory, what
share of the peak?

    make gpu-check                            # on a machine with CUDA: shapes of Qwen2.5-0.5B and 7B, random weights
    python -m benchmarks.checks.gpu_check --smoke    # the same code at a tiny shape on the CPU; its times mean nothing

First table: how far separate passes, a packed row by sdpa and one by FlexAttention are from the truth, separate passes
of the same weights in fp64. Separate passes are off by rounding alone; a packed row may be FACTOR times as far off, and
no further. Second: whole steps (forward, backward, AdamW) of Self-AC and of GRPO on the same episodes, adapter of rank
32, layers worked out again. share of peak: work by flows/cost/estimate.py / seconds / the device's peak on its data
sheet; memory: the largest that was allocated, beside what `turnwise plan` would have said. Exit status 1 where there is
no CUDA device, or a number of the first table is above what is allowed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
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
from stages.learn.episode_row import EpisodeIds
from stages.learn.fit import adamw
from stages.learn.losses import turn_ppo_clip
from stages.learn.tree import tree_of
from stages.learn.tree_attention import body_pass, tree_attention
from stages.learn.tree_flex import flex_layout_of
from stages.learn.value_head import new_head
from stages.train.actor_critic import Part, SelfAcConfig, credited_pass, joint_loss

TINY = Shape(2, 64, 2, 1, 32, 96, 300, attention_bias=True, positions=512)
SHAPES = {"tiny": TINY, "0.5b": KNOWN["Qwen/Qwen2.5-0.5B-Instruct"], "7b": KNOWN["Qwen/Qwen2.5-7B-Instruct"]}
FACTOR = 4.0  # on a CPU a packed row is 0.9 to 1.1 times as far from the truth as separate passes
# Separate passes further off than this would hide what a kernel does.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 1e-1}
CRITIC = tuple(range(1, 17))


def random_policy(shape: Shape, dtype: torch.dtype, device: str) -> Any:
    """A Qwen2 of random weights made on the device, with a LoRA adapter that does something.

    Weights of size 1 / sqrt(width) keep the size of what they multiply: attention then picks tokens, and one that a mask
    hides is missed.
    """
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.inner, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, tie_word_embeddings=shape.tied,
        max_position_embeddings=shape.positions, initializer_range=shape.width**-0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return shake(new_adapter(base, rank=RANK, alpha=2 * RANK, seed=0)).train()


def made_up_rows(vocabulary: int) -> list[list[int]]:
    """Three lines, two of which begin alike, and four branches of each: what a packed row is made of."""
    generator = torch.Generator().manual_seed(0)

    def ids(n: int) -> list[int]:
        return torch.randint(vocabulary, (n,), generator=generator).tolist()

    lines = [first := ids(240), ids(160), first[:80] + ids(120)]
    return [*lines, *(line[: len(line) * k // 4] + ids(len(CRITIC)) for line in lines for k in (1, 2, 3, 4))]


def separate(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """States of every token of every row, (N, D): a pass each, by the model's own attention."""
    base = base_of(model)
    passes = (base.model(input_ids=torch.tensor([ids], device=base.device), use_cache=False) for ids in rows)
    return torch.cat([one.last_hidden_state[0] for one in passes])


def packed(model: Any, rows: Sequence[Sequence[int]], *, flex: bool = False) -> Tensor:
    """The same states, from one pass over the tree of these rows."""
    tree, places = tree_of(rows)
    tree = tree.to(base_of(model).device)
    states = body_pass(model, tree, layout=flex_layout_of(tree) if flex else None)
    return states[torch.cat(places).to(states.device)]


def projected(states: Tensor) -> Tensor:
    """A random projection: signs, which every dtype holds exactly, the same for all passes.

    The mean square of states behind an RMSNorm is nearly constant: its gradient is rounding.
    """
    signs = 2 * torch.randint(2, states.shape, generator=torch.Generator().manual_seed(1)) - 1
    return (states * signs.to(states)).sum()


def states_and_gradient(model: Any, states: Tensor) -> tuple[Tensor, ...]:
    """In fp64: the states, and the gradient of each of the adapter's tensors."""
    model.zero_grad(set_to_none=True)
    projected(states).backward()  # type: ignore[no-untyped-call]
    return states.detach().double(), *(p.grad.double() for p in model.parameters() if p.grad is not None)


def off(found: Sequence[Tensor], truth: Sequence[Tensor]) -> tuple[float, float]:
    """|found - truth| / |truth| of the worst token's state, and of the worst tensor's gradient; NaN where one is."""
    (states, *gradient), (true_states, *true_gradient) = found, truth
    tokens = (states - true_states).norm(dim=1) / true_states.norm(dim=1)
    tensors = [(x - y).norm() / y.norm() for x, y in zip(gradient, true_gradient, strict=True)]
    return float(tokens.max()), float(torch.stack(tensors).max())


def equivalence(shape: Shape, dtype: torch.dtype, device: str, *, flex: bool) -> dict[str, tuple[float, float]]:
    """Pass ("separate", "sdpa", with `flex` also "flex") -> how far its states and its gradient are from the truth."""
    model, twin = (random_policy(shape, of, device) for of in (dtype, torch.float64))
    twin.load_state_dict(model.state_dict())
    rows = made_up_rows(shape.vocabulary)
    truth = states_and_gradient(twin, separate(twin, rows))
    passes = {"separate": separate, "sdpa": packed} | ({"flex": partial(packed, flex=True)} if flex else {})
    return {name: off(states_and_gradient(model, made(model, rows)), truth) for name, made in passes.items()}


def wrongs(shape: Shape, device: str) -> list[str]:
    """Prints the first table. Returns a sentence for each number that is above what is allowed."""
    table_head("dtype", "of", "separate", "packed, sdpa", "packed, flex", "allowed")
    wrong = []
    for dtype, rounding in ROUNDING.items():
        found = equivalence(shape, dtype, device, flex=device == "cuda")
        for i, of in enumerate(("states", "gradient")):
            offs = {name: both[i] for name, both in found.items()}
            limits = {name: rounding if name == "separate" else FACTOR * offs["separate"] for name in offs}
            cells = [f"{offs[name]:.1e}" if name in offs else "-" for name in ("separate", "sdpa", "flex")]
            table_row(str(dtype).removeprefix("torch."), of, *cells, f"{limits['sdpa']:.1e}")
            wrong += [
                f"{of} in {dtype}, {name}: off by {offs[name]:.1e}, allowed {limit:.1e}: do not train Self-AC so here."
                for name, limit in limits.items()
                if not offs[name] <= limit
            ]
    return wrong


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
            machine = Machine(presets.load("desk+self_ac", sets), shape, peak or DEVICES["h100"], 1)
            planned = sum(training_memory(machine, Work("self_ac", trained=(rows,), steps=1)).values())
            first = (name, method, kernel, "yes" if autocast else "no", n)
            try:
                seconds, memory = timed(loss, model, both, device, args.repeats)
            except torch.OutOfMemoryError:
                table_row(*first, "out of memory", "", "", "", f"{planned:.1f}")
                continue
            work = sum(train_flops(machine, rows, autocast=autocast))
            share = f"{work / seconds / (1e12 * peak.bf16):.2f}" if peak else "-"
            cells = (f"{1000 * seconds:.0f}", f"{n / seconds:.0f}", share, f"{memory:.1f}", f"{planned:.1f}")
            table_row(*first, *cells)


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
    wrong = wrongs(TINY if args.smoke else replace(SHAPES["0.5b"], layers=4), device)
    print()
    table_head(
        "shape", "method", "kernel", "autocast", "tokens", "ms", "tokens/s", "share of peak", "GiB", "planned GiB"
    )
    for name in args.shapes:
        steps(name, device, peak, args)
        if device == "cuda":
            torch.cuda.empty_cache()
    sys.stderr.writelines(f"{one}\n" for one in wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
