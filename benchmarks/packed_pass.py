"""Self-AC's packed pass against the plain causal pass of the same episodes, forward and backward: what turn-level credit costs.

    python -m benchmarks.packed_pass                      # 8 turns of 100 + 100 tokens, critic prompt of 16
    python -m benchmarks.packed_pass --turns 2 8 32 --critic 1 4 16 --width 256 768

Both passes end in the log-probs of the action tokens, as GRPO's would; the packed one also reads N + 1 values. Single thread,
processor time of the thread, both passes in turn; "ratio" is the median over the pairs. "bound" is what the count of tokens says:
1 + (N + 1) |cp| / T. Random weights: only the time matters.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stages.learn.losses import chunked_log_probs
from stages.learn.shadow import EpisodeIds, PackedRow, pack
from stages.learn.shadow_layout import layout_of
from stages.learn.value_head import ValueHead, episode_pass, new_head

VOCABULARY = 1000


def model_of(width: int, layers: int, positions: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "num_attention_heads": width // 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=positions, **shape)).train()


def episode(turns: int, action: int, observation: int) -> EpisodeIds:
    """A prompt as long as an observation, then the turns."""
    starts = tuple(observation + k * (action + observation) for k in range(turns))
    ids = tuple(t * 7919 % VOCABULARY for t in range(observation + turns * (action + observation)))
    log_probs = tuple((-1.0,) * action for _ in starts)
    return EpisodeIds(ids, starts, tuple(s + action - 1 for s in starts), log_probs, (0.0,) * (turns + 1), False)


def plain(model: Any, row: PackedRow, n_visible: int) -> Tensor:
    states_TD = model.model(input_ids=row.ids[None, :n_visible], use_cache=False).last_hidden_state[0]
    return chunked_log_probs(states_TD[row.source_positions], model.lm_head, row.ids[row.target_positions]).sum()


def packed(model: Any, head: ValueHead, row: PackedRow) -> Tensor:
    states_KD, values_BM = episode_pass(model, head, row, layout=layout_of(row))
    return chunked_log_probs(states_KD, model.lm_head, row.ids[row.target_positions]).sum() + values_BM.square().sum()


def seconds(loss: Callable[[], Tensor], model: Any) -> float:
    model.zero_grad(set_to_none=True)
    start = time.thread_time()
    loss().backward()  # type: ignore[no-untyped-call]
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[8])
    parser.add_argument("--critic", type=int, nargs="+", default=[16], help="tokens of the critic prompt")
    parser.add_argument("--width", type=int, nargs="+", default=[256])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=100, help="tokens of an action, and of an observation")
    parser.add_argument("--pairs", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| width | layers | turns | tokens | critic prompt | ratio | bound |\n|---|---|---|---|---|---|---|")
    for width, turns, critic in itertools.product(args.width, args.turns, args.critic):
        one = episode(turns, args.length, args.length)
        model = model_of(width, args.layers, len(one.ids) + critic)
        head, row = new_head(model, seed=0), pack([one], [1] * critic, max_positions=None)
        pairs = [
            (seconds(lambda: plain(model, row, len(one.ids)), model), seconds(lambda: packed(model, head, row), model))  # noqa: B023
            for _ in range(args.pairs + 1)
        ]
        ratio = statistics.median(b / a for a, b in pairs[1:])
        bound = 1 + (turns + 1) * critic / len(one.ids)
        print(f"| {width} | {args.layers} | {turns} | {len(one.ids)} | {critic} | {ratio:.2f} | {bound:.2f} |", flush=True)


if __name__ == "__main__":
    main()
