"""Self-AC's packed step against GRPO's on the same episodes, forward and backward: what turn-level credit costs.

    python -m benchmarks.speed.packed_pass                      # 8 turns of 100 + 100 tokens
    python -m benchmarks.speed.packed_pass --turns 2 8 32 --critic 16 soft1 --width 768 --layers 2

Both sides: LoRA of rank 32 on a frozen base, the loss functions of the stage with entropy, as many episodes a row as
`--row-tokens` holds, one thread.
Self-AC's step is the stage's own (critic, actor, checks, metrics). GRPO's is the cheapest there is for these episodes:
rows of one length side by side, nothing padded, and nothing after the last action, which GRPO need not read; `--last`
tokens of it are Self-AC's alone.

critic: tokens of the critic's prompt, or soft1 .. soft4 for learned vectors. |cp| / T: the bound 1 + (N + 1) |cp| / T.
tokens: tokens of the two rows, the same with T as GRPO needs it. work: floating-point operations, matrix products as
PyTorch counts them and attention by its pairs. traffic: bytes that all operations read and write. Those four are
counted and the same on any machine; `--pairs 0` stops there.
ratio: median over pairs of steps in turn, ± half the interquartile range. Random weights: only the time matters.
"""

from __future__ import annotations

import argparse
import itertools

from benchmarks.counts import attention_flops, causal_pairs, matmul_flops, shadow_pairs, traffic
from benchmarks.passes import (
    backward,
    grpo_loss,
    grpo_row,
    in_turn,
    made_up,
    one_thread,
    random_policy,
    self_ac_loss,
    self_ac_part,
    table_head,
    table_row,
    with_log_probs,
)
from stages.learn.value_head import new_head


def measure(args: argparse.Namespace, width: int, turns: int, length: int, last: int, critic: str) -> None:
    soft = int(critic[4:]) if critic.startswith("soft") else 0
    c = soft or int(critic)
    [one] = made_up(1, turns, length, length, last, args.vocabulary)
    n = max(1, args.row_tokens // (len(one.ids) + (turns + 1) * c))
    model = random_policy(width, args.layers, len(one.ids) + c, args.vocabulary)
    head = new_head(model, soft_len=soft, seed=0)
    episodes = with_log_probs(model, made_up(n, turns, length, length, last, args.vocabulary))
    part, plain = self_ac_part(episodes, () if soft else [1] * c, soft), grpo_row(episodes)
    ours = backward(lambda: self_ac_loss(model, head, part), model, head)
    theirs = backward(lambda: grpo_loss(model, plain), model)
    seen = causal_pairs([len(e.ids) for e in episodes]) + shadow_pairs(part.row)[0]
    flops = [matmul_flops(step) for step in (theirs, ours)]
    flops[0] += attention_flops(causal_pairs([plain.ids.shape[1]] * n), width, args.layers)
    flops[1] += attention_flops(seen, width, args.layers)
    moved, tokens = [traffic(step) for step in (theirs, ours)], len(part.row.ids) / plain.ids.numel()
    counted = [1 + (turns + 1) * c / len(one.ids), tokens, flops[1] / flops[0], moved[1].total() / moved[0].total()]
    timed = ["-"] * 4
    if args.pairs:
        found = in_turn(theirs, ours, args.pairs)
        rate = f"{flops[0] / found.first_s / 1e9:.0f}, {flops[1] / found.second_s / 1e9:.0f}"
        timed = [str(found), f"{100 * (found.ratio / tokens - 1):+.1f} %", f"{1000 * found.first_s:.0f}", rate]
    table_row(width, turns, f"{n} x {len(one.ids)}", last, critic, *(f"{x:.3f}" for x in counted), *timed)
    excess = {name: (moved[1][name] - tokens * moved[0][name]) / moved[0].total() for name in moved[1]}
    for name in sorted(excess, key=lambda name: -excess[name])[: args.operations]:
        print(f"    {excess[name]:+.1%} of GRPO's traffic: {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[8])
    parser.add_argument(
        "--critic",
        nargs="+",
        default=["16", "4", "soft4", "soft1"],
        help="tokens of the critic prompt, or soft1 .. soft4",
    )
    parser.add_argument(
        "--last", type=int, nargs="+", default=[0], help="tokens after the last action, read for V_N only"
    )
    parser.add_argument(
        "--length", type=int, nargs="+", default=[100], help="tokens of an action, and of an observation"
    )
    parser.add_argument("--width", type=int, nargs="+", default=[256])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument(
        "--row-tokens", type=int, default=4096, help="a row holds as many episodes as fit, at least one"
    )
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument(
        "--operations",
        type=int,
        default=0,
        help="also tell this many operations whose traffic grows most beyond the tokens",
    )
    args = parser.parse_args()
    one_thread()
    counted, timed = ["1 + (N+1) cp / T", "tokens", "work", "traffic"], ["ratio", "over tokens", "GRPO ms", "GFLOP/s"]
    table_head("width", "turns", "episodes", "last", "critic", *counted, *timed)
    for width, turns, length, last, critic in itertools.product(
        args.width, args.turns, args.length, args.last, args.critic
    ):
        measure(args, width, turns, length, last, critic)


if __name__ == "__main__":
    main()
