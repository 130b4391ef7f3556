"""One layer's attention over a packed row against plain causal attention over the same episodes: where Self-AC's step
is slower than its tokens say.

    python -m benchmarks.speed.shadow_cost
    python -m benchmarks.speed.shadow_cost --episodes 1 --turns 32 --length 25

plain: one causal call, side by side, up to the last action. packed: `tree_forward`. no shadow kernel: the same, but
the shadows' calls give back their queries. no kernel: all calls do, which leaves the copies alone; they then find their
data in the cache, so in a real step they cost more. pairs: of a query and a key, handed to the kernel. Forward and
backward, milliseconds of processor time, medians; ratio: to plain, median over rounds. Heads of 64, one thread.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.counts import causal_pairs, shadow_pairs
from benchmarks.passes import made_up, one_thread, seconds, table_head, table_row
from stages.learn import tree_attention
from stages.learn.episode_row import pack
from stages.learn.tree_layout import layout_of


def only(masked: bool, causal: bool) -> Callable[..., Tensor]:
    """The attention call, where a masked or a causal one may give back its queries instead."""

    def call(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        if masked if attn_mask is not None else causal:
            return scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)
        return query * 1.0

    return call


def step(attend: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    for x in inputs:
        x.grad = None
    out = attend(*inputs)
    out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]


def random_inputs(rows: int, tokens: int, heads: int) -> list[Tensor]:
    """Query, key and value (rows, heads, tokens, 64), token by token in memory, as projections leave them."""
    return [torch.randn(rows, tokens, heads, 64).transpose(1, 2).requires_grad_() for _ in range(3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--length", type=int, default=100, help="tokens of an action, and of an observation")
    parser.add_argument("--critic", type=int, default=16, help="tokens of the critic prompt")
    parser.add_argument("--episodes", type=int, default=2, help="in the row")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    one_thread()
    torch.manual_seed(0)
    episodes = made_up(args.episodes, args.turns, args.length, args.length, 0, 1000)
    row, lengths = pack(episodes, [1] * args.critic, max_positions=None), [len(e.ids) for e in episodes]
    layout, plain, packed = (
        layout_of(row.tree),
        random_inputs(len(lengths), lengths[0], args.heads),
        random_inputs(1, len(row.ids), args.heads),
    )

    def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).contiguous()

    def shadowed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return tree_attention.tree_forward(None, query, key, value, None, tree_layout=layout)[0]

    def with_calls(masked: bool, causal: bool) -> None:
        with patch.object(tree_attention, "scaled_dot_product_attention", only(masked, causal)):
            step(shadowed, packed)

    seen, handed = causal_pairs(lengths), shadow_pairs(row)[1]
    variants: dict[str, tuple[Callable[[], object], float]] = {
        "plain": (lambda: step(causal, plain), seen),
        "packed": (lambda: with_calls(True, True), seen + handed),
        "no shadow kernel": (lambda: with_calls(False, True), seen),
        "no kernel": (lambda: with_calls(False, False), 0.0),
    }
    rounds = [{name: seconds(run) for name, (run, _) in variants.items()} for _ in range(args.rounds + 1)][1:]
    table_head("variant", "pairs, ratio", "ms", "ratio")
    for name, (_, pairs) in variants.items():
        median_s, ratio = (
            statistics.median(one[name] for one in rounds),
            statistics.median(one[name] / one["plain"] for one in rounds),
        )
        table_row(name, f"{pairs / seen:.2f}", f"{1000 * median_s:.1f}", f"{ratio:.2f}")


if __name__ == "__main__":
    main()
