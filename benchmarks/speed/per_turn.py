"""An ordinary actor-critic, which reads the history anew for every turn, against Self-AC's packed step on the same
episodes.

    python -m benchmarks.speed.per_turn                     # 2, 4 and 8 turns of 100 + 100 tokens
    python -m benchmarks.speed.per_turn --turns 2 4 8 16 --length 25 --episodes 4 --batch 4

Self-AC: the stage's own step, one pass an episode. Per turn: s_k + critic prompt for every V_k, and s_k + a_k for every
action's log-probs, in batches of `--batch` rows of like length, padded to the right; a backward pass a batch, so that
one batch is held in memory. Its targets and advantages are handed to it, as if stored with the rollout: it pays for no
extra pass to find them. Before timing both steps' losses and gradients are compared.

ratio: per turn / Self-AC, median over pairs of steps in turn, ± half the interquartile range. actor alone: only the s_k
+ a_k passes; what a critic that reads V off the same pass, without a prompt of its own, would cost. by tokens, by work:
the same ratio counted, in tokens without padding and in floating-point operations, matrix products with padding and
attention by its pairs; `--pairs 0` stops there. Random weights: only the time matters.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.counts import attention_flops, causal_pairs, matmul_flops, shadow_pairs
from benchmarks.passes import (
    CONFIG,
    backward,
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
from stages.learn.adapter import base_of
from stages.learn.ledger import step_targets
from stages.learn.losses import chunked_log_probs, completion_states, pad_rows, turn_ppo_clip
from stages.learn.value_head import ValueHead, new_head, values_of_batch
from stages.train.actor_critic import Part, credited_pass

ALLOWED = 1e-4  # fp32 sums in another order


@dataclass(frozen=True)
class State:
    """What is learned of one state: its TD targets; and of the action taken in it, empty in s_N, its log-probs and its
    advantage.
    """

    ids: tuple[int, ...]
    targets: Tensor  # (n,)
    action: tuple[int, ...]
    old_log_probs: tuple[float, ...]
    advantage: float


def states_of(model: Any, head: ValueHead, part: Part) -> list[State]:
    """Every state of the episodes, with the targets and advantages that the packed step has for them."""
    with torch.no_grad():
        found = credited_pass(model, head, part, CONFIG, value_grad_scale=1.0)
    targets = torch.stack(
        step_targets(part.row, found.values_BM, gamma=CONFIG.gamma, n_max=CONFIG.td_steps, known_end=CONFIG.known_end),
        2,
    )
    advantages, states = iter(found.advantages_J.tolist()), []
    for b, e in enumerate(part.episodes):
        for k, prefix in enumerate(e.prefixes):
            acts = k < e.n_turns
            action = e.ids[prefix : e.action_end[k] + 1] if acts else ()
            states.append(
                State(
                    e.ids[:prefix],
                    targets[b, k],
                    action,
                    e.old_log_probs[k] if acts else (),
                    next(advantages) if acts else 0.0,
                )
            )
    return states


def batches(states: Sequence[State], size: int) -> Iterator[list[State]]:
    """By length, so that a batch is padded little."""
    order = sorted(states, key=lambda s: len(s.ids) + len(s.action))
    yield from ([*order[i : i + size]] for i in range(0, len(order), size))


def critic_loss(
    model: Any, head: ValueHead, batch: Sequence[State], critic_ids: Sequence[int], n_states: float
) -> Tensor:
    values_B = values_of_batch(model, head, [s.ids for s in batch], critic_ids)
    targets_BN = torch.stack([s.targets for s in batch])
    return (values_B[:, None] - targets_BN).square().mean(1).sum() / n_states


def actor_loss(model: Any, batch: Sequence[State], n_turns: float) -> Tensor:
    rows = pad_rows([s.ids for s in batch], [s.action for s in batch], pad_id=0)
    states_KD, row_K, column_K = completion_states(model, rows)
    log_probs_K, _ = chunked_log_probs(
        states_KD, base_of(model).get_output_embeddings(), rows.ids[row_K, column_K], entropy=True
    )
    old_K = torch.tensor([p for s in batch for p in s.old_log_probs])
    advantages_J = torch.tensor([s.advantage for s in batch])
    return turn_ppo_clip(
        log_probs_K, old_K, row_K, advantages_J, clip=CONFIG.ratio_clip, ratio=CONFIG.ratio, normaliser=n_turns
    )[0]


def per_turn(
    model: Any, head: ValueHead, states: Sequence[State], critic_ids: Sequence[int], size: int, *, critic: bool = True
) -> float:
    """Forward and backward pass over all batches; returns the loss. The gradients add up in the parameters."""
    model.zero_grad(set_to_none=True)
    head.zero_grad(set_to_none=True)
    acting = [s for s in states if s.action]
    total = 0.0
    for batch in batches(states, size) if critic else ():
        loss = CONFIG.alpha * critic_loss(model, head, batch, critic_ids, float(len(states)))
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    for batch in batches(acting, size):
        loss = (1 - CONFIG.alpha) * actor_loss(model, batch, float(len(acting)))
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def largest_difference(
    model: Any, head: ValueHead, part: Part, states: Sequence[State], critic_ids: Sequence[int], size: int
) -> tuple[float, float]:
    """Of the two losses, and of the gradients in shares of the largest entry of any."""

    def gradients() -> list[Tensor]:
        return [
            p.grad.clone()
            for module in (model, head)
            for p in module.parameters()
            if p.requires_grad and p.grad is not None
        ]

    loss = per_turn(model, head, states, critic_ids, size)
    slow = gradients()
    fast_loss = self_ac_loss(model, head, part)
    backward(lambda: fast_loss, model, head)()
    fast = gradients()
    largest = max(float(g.abs().max()) for g in slow)
    return abs(loss - float(fast_loss.detach())), max(
        float((a - b).abs().max()) for a, b in zip(slow, fast, strict=True)
    ) / largest


def measure(args: argparse.Namespace, turns: int) -> None:
    critic_ids = tuple(range(1, args.critic + 1))
    drawn = made_up(args.episodes, turns, args.length, args.length, args.length, args.vocabulary)
    model = random_policy(args.width, args.layers, len(drawn[0].ids) + args.critic, args.vocabulary)
    head = new_head(model, seed=0)
    part = self_ac_part(with_log_probs(model, drawn), critic_ids, 0)
    states = states_of(model, head, part)
    off = largest_difference(model, head, part, states, critic_ids, args.batch)
    if not max(off) < ALLOWED:
        sys.exit(
            f"wanted equal steps, found a loss off by {off[0]:.0e} and a gradient off by {off[1]:.0e} (allowed {ALLOWED:.0e}): nothing was timed"
        )
    packed = backward(lambda: self_ac_loss(model, head, part), model, head)

    def slow(critic: bool = True) -> None:
        per_turn(model, head, states, critic_ids, args.batch, critic=critic)

    lengths = [len(s.ids) + args.critic for s in states] + [len(s.ids) + len(s.action) for s in states if s.action]
    pairs = causal_pairs([len(e.ids) for e in part.episodes]) + shadow_pairs(part.row)[0]
    work = [
        matmul_flops(step) + attention_flops(n, args.width, args.layers)
        for step, n in ((slow, causal_pairs(lengths)), (packed, pairs))
    ]
    counted = [sum(lengths) / len(part.row.ids), work[0] / work[1]]
    timed = ["-"] * 4
    if args.pairs:
        both, actor = in_turn(packed, slow, args.pairs), in_turn(packed, lambda: slow(critic=False), args.pairs)
        timed = [str(both), f"{both.ratio / turns:.2f}", str(actor), f"{1000 * both.first_s:.0f}"]
    table_row(turns, len(drawn[0].ids), f"{off[0]:.0e}, {off[1]:.0e}", *(f"{x:.2f}" for x in counted), *timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--length", type=int, default=100, help="tokens of an action, and of an observation")
    parser.add_argument("--critic", type=int, default=16, help="tokens of the critic prompt")
    parser.add_argument("--episodes", type=int, default=2, help="in Self-AC's one row")
    parser.add_argument(
        "--batch",
        type=int,
        default=2,
        help="rows of a batch of the per-turn passes; with as many episodes nothing is padded",
    )
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    one_thread()
    table_head(
        "turns",
        "tokens",
        "off: loss, gradient",
        "by tokens",
        "by work",
        "ratio",
        "ratio / turns",
        "actor alone",
        "Self-AC ms",
    )
    for turns in args.turns:
        measure(args, turns)


if __name__ == "__main__":
    main()
