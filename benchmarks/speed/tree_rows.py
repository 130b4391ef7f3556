"""A step of NLAC on one long episode: its rows as a tree against the same rows padded, forward and backward.

    python -m benchmarks.speed.tree_rows                            # 13 turns, 4,800 + 13 x 300 tokens, width 256
    python -m benchmarks.speed.tree_rows --width 768 --layers 1 --rounds 1

At every state the critic learns a future (the role's words, then the reply) and the policy a rewritten action: two rows
a turn, each of which begins with all that was said before. padded: the same loss by rows side by side, like lengths
together, at most `--pass-tokens` a pass. tree: what they share stands there once (stages.learn.tree), all in one pass.
LoRA of rank 32 on a frozen random base, one thread, each arm in a process of its own.

tokens: that go through the model, bound: no tree has fewer. work: floating-point operations, matrix products as PyTorch
counts them, and attention by the pairs that the kernels are handed. off: largest difference of the rows' log-probs and
of the gradients, in shares of the largest. MiB: most memory that the step took beyond what the model takes.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks.counts import attention_flops, causal_pairs, matmul_flops
from benchmarks.passes import backward, one_thread, random_policy, seconds, table_head, table_row
from stages.learn.losses import Batch, completion_nll, pad_rows
from stages.learn.tree import n_unique
from stages.learn.tree_layout import layout_of
from stages.train.passes import Pass, mixed_nll, step_passes
from stages.train.rows import TrainRow


def episode_rows(args: argparse.Namespace) -> list[TrainRow]:
    """Of each turn the successor's row and the policy's."""
    rng = random.Random(0)

    def some(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(args.vocabulary) for _ in range(n))

    state, words, rows = some(args.system), some(args.words), []
    for turn in range(args.turns):
        rows.append(TrainRow((*state, *words, *some(args.reply)), some(args.reply), key=("a", turn)))
        rows.append(TrainRow(state, some(args.reply), key=("b", turn)))
        state = (*state, *some(args.turn))
    return rows


def padded(rows: list[TrainRow], pass_tokens: int) -> list[Batch]:
    """Like lengths together, as many as fit when padded to the longest."""
    found: list[list[TrainRow]] = []
    longest = 0
    for row in sorted(rows, key=lambda r: -len(r.prompt_ids) - len(r.completion_ids)):
        if not found or (len(found[-1]) + 1) * longest > pass_tokens:
            found.append([])
            longest = len(row.prompt_ids) + len(row.completion_ids)
        found[-1].append(row)
    return [pad_rows([r.prompt_ids for r in group], [r.completion_ids for r in group], pad_id=0) for group in found]


def padded_loss(model: Any, batch: Batch, normaliser: float) -> Tensor:
    nll_B, _ = completion_nll(model, batch)
    return (nll_B * batch.n_completion).sum() / normaliser


def arm(args: argparse.Namespace) -> None:
    """Runs one arm and prints what it measured, as JSON."""
    one_thread()
    rows = episode_rows(args)
    n_positions = max(len(r.prompt_ids) + len(r.completion_ids) for r in rows)
    model = random_policy(args.width, args.layers, n_positions, args.vocabulary)
    normaliser = float(sum(len(r.completion_ids) for r in rows))
    passes: list[Any] = step_passes({"": rows}, 0, "cpu") if args.arm == "tree" else padded(rows, args.pass_tokens)

    def loss(each: Any) -> Tensor:
        return mixed_nll(model, each)[0] if isinstance(each, Pass) else padded_loss(model, each, normaliser)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for each in passes:
            loss(each).backward()  # type: ignore[no-untyped-call]

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    if args.arm == "tree":
        (only,) = passes
        layout = layout_of(only.tree)
        tokens = len(only.tree.ids)
        pairs = causal_pairs([layout.n_visible] * len(only.tree.paths)) + sum(g.mask.numel() for g in layout.groups)
    else:
        tokens = sum(batch.ids.numel() for batch in passes)
        pairs = sum(causal_pairs([batch.ids.shape[1]] * len(batch.ids)) for batch in passes)
    flops = sum(matmul_flops(backward(lambda each=each: loss(each), model)) for each in passes)  # type: ignore[misc]
    with torch.no_grad():
        total = float(sum(loss(each) for each in passes))
    print(json.dumps({
        "tokens": tokens, "bound": n_unique([r.ids for r in rows]), "loss": total,
        "work": flops + attention_flops(pairs, args.width, args.layers), "MiB": most / 1024,
        "gradient": gradient[:: max(1, len(gradient) // 5000)].tolist(), "seconds": [seconds(step) for _ in range(args.rounds)],
    }))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=13)
    parser.add_argument("--system", type=int, default=4800, help="tokens before the first action")
    parser.add_argument("--turn", type=int, default=300, help="tokens of an action and its observation")
    parser.add_argument("--words", type=int, default=120, help="of the role that predicts")
    parser.add_argument("--reply", type=int, default=128, help="tokens of an action, or a future")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--pass-tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arm", choices=["tree", "padded"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        arm(args)
        return
    found = {}
    for name in ("padded", "tree"):
        command = [sys.executable, "-m", "benchmarks.speed.tree_rows", *sys.argv[1:], "--arm", name]
        found[name] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    theirs, ours = found["padded"], found["tree"]
    table_head("arm", "tokens", "work", "seconds", "MiB")
    for name, one in found.items():
        table_row(name, one["tokens"], f"{one['work'] / 1e12:.2f} TFLOP", f"{statistics.median(one['seconds']):.1f}", f"{one['MiB']:.0f}")  # fmt: skip
    time_s = [statistics.median(one["seconds"]) for one in (ours, theirs)]
    table_row("ratio", *(f"{ours[name] / theirs[name]:.3f}" for name in ("tokens", "work")), f"{time_s[0] / time_s[1]:.3f}", f"{ours['MiB'] / theirs['MiB']:.2f}")  # fmt: skip
    x, y = torch.tensor(ours["gradient"]), torch.tensor(theirs["gradient"])
    off = abs(ours["loss"] / theirs["loss"] - 1), float((x - y).abs().max() / y.abs().max())
    print(f"bound: {ours['bound']} tokens, the tree has {ours['tokens'] / ours['bound']:.3f} of it; off: loss {off[0]:.0e}, gradient {off[1]:.0e}")  # fmt: skip


if __name__ == "__main__":
    main()
