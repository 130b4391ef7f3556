"""A part of gpu_check: how far packed rows are from the truth, by each kernel. The truth is separate passes of the same
weights in fp64, by transformers' and peft's own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.passes import RANK, shake, table_head, table_row
from flows.cost.shapes import KNOWN, Shape
from stages.learn.adapter import base_of, new_adapter
from stages.learn.fused_lora import fused_lora
from stages.learn.kernels import liger, no_liger
from stages.learn.tree import tree_of
from stages.learn.tree_attention import body_pass
from stages.learn.tree_flex import flex_layout_of

TINY = Shape(2, 64, 2, 1, 32, 96, 300, attention_bias=True, positions=512)
SHAPES = {"tiny": TINY, "0.5b": KNOWN["Qwen/Qwen2.5-0.5B-Instruct"], "7b": KNOWN["Qwen/Qwen2.5-7B-Instruct"]}
FACTOR = 4.0  # on a CPU a packed row is 0.9 to 1.1 times as far from the truth as separate passes
# Separate passes further off than this would hide what a kernel does.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 1e-1}
CRITIC = tuple(range(1, 17))
PASSES = ("separate", "sdpa", "flex", "fused", "liger")


def random_base(shape: Shape, dtype: torch.dtype, device: str) -> Any:
    """A Qwen2 of random weights made on the device.

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
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def random_policy(shape: Shape, dtype: torch.dtype, device: str) -> Any:
    """It, with a LoRA adapter that does something."""
    return shake(new_adapter(random_base(shape, dtype, device), rank=RANK, alpha=2 * RANK, seed=0)).train()


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


def fused(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """The same, by fused LoRA."""
    with fused_lora(model, strict=True):
        return packed(model, rows)


def with_liger(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """The same, with Liger's kernels, too."""
    with liger(model):
        return fused(model, rows)


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
    """Pass, one of PASSES -> how far its states and its gradient are from the truth. flex: FlexAttention, too."""
    model, twin = (random_policy(shape, of, device) for of in (dtype, torch.float64))
    twin.load_state_dict(model.state_dict())
    rows = made_up_rows(shape.vocabulary)
    truth = states_and_gradient(twin, separate(twin, rows))
    passes: dict[str, Any] = {"separate": separate, "sdpa": packed, "fused": fused}
    passes |= {"flex": partial(packed, flex=True)} if flex else {}
    passes |= {} if no_liger(device) else {"liger": with_liger}
    return {name: off(states_and_gradient(model, made(model, rows)), truth) for name, made in passes.items()}


def wrongs(shape: Shape, device: str) -> list[str]:
    """Prints the first table of gpu_check. Returns a sentence for each number that is above what is allowed."""
    heads = ("separate", "packed, sdpa", "packed, flex", "sdpa, fused LoRA", "sdpa, fused LoRA, Liger")
    table_head("dtype", "of", *heads, "allowed")
    wrong = []
    for dtype, rounding in ROUNDING.items():
        found = equivalence(shape, dtype, device, flex=device == "cuda")
        for i, of in enumerate(("states", "gradient")):
            offs = {name: both[i] for name, both in found.items()}
            limits = {name: rounding if name == "separate" else FACTOR * offs["separate"] for name in offs}
            cells = [f"{offs[name]:.1e}" if name in offs else "-" for name in PASSES]
            table_row(str(dtype).removeprefix("torch."), of, *cells, f"{limits['sdpa']:.1e}")
            wrong += [
                f"{of} in {dtype}, {name}: off by {offs[name]:.1e}, allowed {limit:.1e}: do not train Self-AC so here."
                for name, limit in limits.items()
                if not offs[name] <= limit
            ]
    return wrong
