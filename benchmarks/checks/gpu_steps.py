"""A part of gpu_check: whole training steps (forward, backward, AdamW), by method, kernels and attention.

Bf16 weights, LoRA of rank 32, layers worked out again. Self-AC's step and GRPO's are of the same episodes. NLAC's row is
one episode of 13 turns with two rows a turn, which is a line and 25 branches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import log
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.checks.gpu_equality import CRITIC, SHAPES, random_policy
from benchmarks.passes import GrpoRow, grpo_log_probs, grpo_row, made_up, self_ac_part, table_row
from benchmarks.speed.tree_rows import episode_rows
from flows import presets
from flows.cost.estimate import Machine, train_flops, training_memory
from flows.cost.shapes import DEVICES, GIB, Device, Shape
from flows.cost.work import Rows, Work
from stages.frame.sections import Attention
from stages.learn.adapter import base_of
from stages.learn.episode_row import EpisodeIds
from stages.learn.fit import adamw
from stages.learn.fused_lora import fused_lora
from stages.learn.kernels import liger, no_liger
from stages.learn.losses import turn_ppo_clip
from stages.learn.tree_attention import tree_attention
from stages.learn.value_head import new_head
from stages.train.actor_critic import Part, SelfAcConfig, credited_pass, joint_loss
from stages.train.passes import half, mixed_nll, step_passes

HEAD = (
    "shape", "method", "kernels", "attention", "autocast", "tokens", "first, s", "ms", "tokens/s", "share of peak", "GiB",
    "planned GiB",
)  # fmt: skip
LONGEST_S = 5.0  # of the timed steps of a row: a slow card takes fewer of them
TORCH, FUSED, LIGER = "torch", "fused LoRA", "fused LoRA, Liger"
Loss = Callable[[bool], Tensor]


@dataclass(frozen=True)
class Step:
    """A method's step. loss: by whether under autocast. rows: its work, as `turnwise plan` counts it."""

    method: str
    loss: Loss
    tokens: int
    rows: tuple[Rows, ...]


def episodes_of(args: argparse.Namespace, shape: Shape) -> list[EpisodeIds]:
    """As many as a row holds, with the log-probs of a policy that knows nothing, as a random model nearly is."""
    [one] = made_up(1, args.turns, args.length, args.length, args.length, shape.vocabulary)
    n = max(1, args.row_tokens // (len(one.ids) + (args.turns + 1) * len(CRITIC)))
    old = tuple((-log(shape.vocabulary),) * args.length for _ in range(args.turns))
    made = made_up(n, args.turns, args.length, args.length, args.length, shape.vocabulary)
    return [replace(e, old_log_probs=old) for e in made]


def self_ac_step(model: Any, head: Any, part: Part) -> Step:
    def loss(autocast: bool) -> Tensor:
        config = SelfAcConfig(autocast=autocast, ratio="token")
        found = credited_pass(model, head, part, config, value_grad_scale=1.0)
        return joint_loss(found, part, config, actor_weight=1 - config.alpha)[0]

    n, episodes = len(part.row.ids), len(part.episodes)
    return Step("Self-AC", loss, n, (Rows(episodes, n / episodes, len(part.row.target_positions) / episodes),))


def grpo_step(model: Any, row: GrpoRow) -> Step:
    def loss(autocast: bool) -> Tensor:
        with half(row.ids.device, autocast):
            log_probs = grpo_log_probs(model, row)
        options: dict[str, Any] = {"clip": 0.2, "ratio": "token", "normaliser": float(len(log_probs))}
        return turn_ppo_clip(log_probs, row.old_log_probs, row.turn_of_token, row.advantages, **options)[0]

    n, episodes = row.ids.numel(), len(row.ids)
    return Step("GRPO", loss, n, (Rows(episodes, n / episodes, len(row.target_ids) / episodes),))


def nlac_step(model: Any, args: argparse.Namespace, shape: Shape, device: str) -> Step:
    """Critic and distill rows of one episode, two a turn, as one tree: that of benchmarks/speed/tree_rows.py."""
    sizes = {**args.nlac, "vocabulary": shape.vocabulary}
    (only,) = step_passes({"policy": episode_rows(argparse.Namespace(**sizes))}, 0, device)
    tree, reply = only.tree, sizes["reply"]
    lines = tuple(Rows(1, float((path >= 0).sum()), 0) for path in tree.paths)
    branches = zip(tree.branch_prefix.tolist(), tree.branch_length.tolist(), strict=True)
    rows = (*lines, *(Rows(1, prefix + own, reply, own=own) for prefix, own in branches))
    n = f"NLAC, {len(tree.branch_line)} branches"
    return Step(n, lambda autocast: mixed_nll(model, only, autocast=autocast)[0], len(tree.ids), rows)


@contextmanager
def running(model: Any, kernels: str, attention: Attention) -> Iterator[None]:
    with tree_attention(model, attention), ExitStack() as stack:
        if kernels != TORCH:
            stack.enter_context(fused_lora(model, strict=True))
        if kernels == LIGER:
            stack.enter_context(liger(model))
        yield


def timed(step: Callable[[], None], device: str, repeats: int) -> tuple[float, float, float]:
    """(seconds of the first step, which compiles and fills the allocator; median of others; GiB allocated at most)."""
    cuda = device == "cuda"

    def once() -> float:
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    first = once()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    found = [once()]
    while len(found) < repeats and sum(found) < LONGEST_S:
        found.append(once())
    return first, statistics.median(found), torch.cuda.max_memory_allocated() / GIB if cuda else float("nan")


def room_of(device: str) -> float:
    """GiB of the device; of a CPU no limit is known."""
    return torch.cuda.get_device_properties(0).total_memory / GIB if device == "cuda" else float("inf")


def machine_for(shape: Shape, peak: Device | None, tokens: int, *, autocast: bool) -> Machine:
    sets = ["model.dtype=bfloat16", "model.gradient_checkpointing=true", f"self_ac.row_tokens={tokens}"]
    run = presets.load("desk+self_ac", [*sets, f"self_ac.autocast={str(autocast).lower()}"])
    return Machine(run, shape, peak or DEVICES["h100"], 1)


def planned_gib(machine: Machine, step: Step) -> float:
    whole = Rows(1, step.tokens, sum(rows.n * rows.predicted for rows in step.rows))
    return sum(training_memory(machine, Work("self_ac", trained=(whole,), steps=1)).values())


def variants(method: str, device: str) -> list[tuple[str, Attention, bool]]:
    """(kernels, attention, autocast) of a method's rows: kernels by sdpa, then the best of them by FlexAttention."""
    found: list[tuple[str, Attention, bool]] = [(TORCH, "sdpa", True), (FUSED, "sdpa", True)]
    if not no_liger(device):
        found.append((LIGER, "sdpa", True))
    if method != "GRPO" and device == "cuda":
        found.append((found[-1][0], "flex", True))
    return [*found, (TORCH, "sdpa", False)]


def steps(name: str, device: str, peak: Device | None, args: argparse.Namespace) -> None:
    """Rows of the third table of gpu_check for one shape. What does not fit the card, or comes after `args.until`, says so."""
    shape = SHAPES[name]
    room = room_of(device)
    weights = shape.parameters * 2 / GIB
    if weights > room:
        table_row(name, f"skipped: its weights take {weights:.1f} GiB, the device has {room:.1f}", *[""] * 10)
        return
    model = random_policy(shape, torch.bfloat16, device)
    base_of(model).gradient_checkpointing_enable({"use_reentrant": False})
    head = new_head(model, seed=0)
    episodes = episodes_of(args, shape)
    part, row = self_ac_part(episodes, CRITIC, 0), grpo_row(episodes)
    row = replace(row, **{key: value.to(device) for key, value in vars(row).items()})
    made = [
        self_ac_step(model, head, replace(part, row=part.row.to(device))),
        nlac_step(model, args, shape, device),
        grpo_step(model, row),
    ]
    modules = nn.ModuleList([model, head])
    optimiser = adamw(modules, lr=1e-5)
    for step in made:
        for kernels, attention, autocast in variants(step.method, device):
            machine = machine_for(shape, peak, step.tokens, autocast=autocast)
            planned = planned_gib(machine, step)
            cells = [name, step.method, kernels, attention, "yes" if autocast else "no", step.tokens]
            if time.perf_counter() > args.until:
                table_row(*cells, "skipped: the time is over", *[""] * 4, f"{planned:.1f}")
                continue
            if planned > room:
                table_row(*cells, f"skipped: the device has {room:.1f} GiB", *[""] * 4, f"{planned:.1f}")
                continue

            def once(step: Step = step, autocast: bool = autocast) -> None:
                optimiser.zero_grad(set_to_none=True)
                step.loss(autocast).backward()  # type: ignore[no-untyped-call]
                optimiser.step()

            try:
                with running(model, kernels, attention):
                    first, seconds, memory = timed(once, device, args.repeats)
            except torch.OutOfMemoryError:
                table_row(*cells, "out of memory", *[""] * 4, f"{planned:.1f}")
                continue
            work = sum(sum(train_flops(machine, rows, autocast=autocast)) for rows in step.rows)
            share = f"{work / seconds / (1e12 * peak.bf16):.2f}" if peak else "-"
            rates = [f"{first:.1f}", f"{1000 * seconds:.0f}", f"{step.tokens / seconds:.0f}", share]
            table_row(*cells, *rates, f"{memory:.1f}", f"{planned:.1f}")
