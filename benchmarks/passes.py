"""What the benchmarks of Self-AC's cost share: random models with an adapter, made-up episodes, the step of either
method, and two steps timed in turn.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from stages.learn.adapter import base_of, new_adapter
from stages.learn.episode_row import EpisodeIds, pack
from stages.learn.losses import chunked_log_probs, turn_ppo_clip
from stages.learn.value_head import ValueHead
from stages.train.actor_critic import Part, SelfAcConfig, credited_pass, joint_loss

CONFIG = SelfAcConfig()
RANK = 32


def random_base(width: int, layers: int, positions: int, vocabulary: int) -> Any:
    """A Llama of random weights, heads of 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, width // 64),
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=positions, **shape)).eval()


def random_policy(width: int, layers: int, positions: int, vocabulary: int) -> Any:
    """It, frozen, with a LoRA adapter of rank 32 on every linear layer, as the stages train one."""
    return shake(
        new_adapter(random_base(width, layers, positions, vocabulary), rank=RANK, alpha=2 * RANK, seed=0)
    ).train()


def shake(model: Any) -> Any:
    """Random values in the adapter: a fresh one has B = 0, and A no gradient."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def made_up(n: int, turns: int, action: int, observation: int, last: int, vocabulary: int) -> list[EpisodeIds]:
    """n episodes of one length: a prompt as long as an observation, then the turns; `last` tokens after the last
    action. Reward 1 at every other end.
    """
    starts = tuple(observation + k * (action + observation) for k in range(turns))
    length = starts[-1] + action + last
    ends, old = tuple(s + action - 1 for s in starts), tuple((0.0,) * action for _ in starts)
    return [
        EpisodeIds(
            tuple((i * 31 + t * t * 7919) % vocabulary for t in range(length)),
            starts,
            ends,
            old,
            (*[0.0] * turns, float(i % 2)),
            False,
            (i,),
        )
        for i in range(n)
    ]


def with_log_probs(model: Any, episodes: Sequence[EpisodeIds]) -> list[EpisodeIds]:
    """The episodes with log-probs near those of the model, as if it had just played them; else a product over a turn's
    tokens would explode.
    """
    found = []
    for e in episodes:
        row = grpo_row([e])
        with torch.no_grad():
            log_probs = (grpo_log_probs(model, row) + 1e-3 * torch.arange(len(row.turn_of_token)).sin()).tolist()
        lengths = [end - start + 1 for start, end in zip(e.action_start, e.action_end, strict=True)]
        edges = [sum(lengths[:k]) for k in range(e.n_turns + 1)]
        found.append(replace(e, old_log_probs=tuple(tuple(log_probs[a:b]) for a, b in pairwise(edges))))
    return found


def self_ac_part(episodes: Sequence[EpisodeIds], critic_ids: Sequence[int], soft_len: int) -> Part:
    """One packed row, as the stage `self_ac` makes it, that is a whole step."""
    row = pack(episodes, critic_ids, max_positions=None, soft_len=soft_len)
    returns = tuple(sum(e.rewards) for e in episodes)
    n_turns = float(row.n_turns.sum())
    return Part(row, tuple(episodes), returns, None, n_turns + len(episodes), n_turns, first=False)


def self_ac_loss(model: Any, head: ValueHead, part: Part) -> Tensor:
    """The step of the stage `self_ac`, its checks and metrics included."""
    found = credited_pass(model, head, part, CONFIG, value_grad_scale=CONFIG.value_grad_scale)
    return joint_loss(found, part, CONFIG, actor_weight=1 - CONFIG.alpha)[0]


@dataclass(frozen=True)
class GrpoRow:
    """The same episodes without shadows, side by side, up to the last action: what follows it is never predicted. B
    rows, T tokens, K of actions.
    """

    ids: Tensor  # (B, T)
    source: Tensor  # (K,) counted over B x T
    target_ids: Tensor  # (K,)
    turn_of_token: Tensor  # (K,)
    old_log_probs: Tensor  # (K,)
    advantages: Tensor  # (turns,)


def grpo_row(episodes: Sequence[EpisodeIds]) -> GrpoRow:
    """Episodes of one length, so that nothing is padded. Advantages are +1 and -1 by turns of the episodes."""
    width = episodes[0].action_end[-1] + 1
    turns = [(b, k) for b, e in enumerate(episodes) for k in range(e.n_turns)]
    places = [
        (b, t, z)
        for z, (b, k) in enumerate(turns)
        for t in range(episodes[b].action_start[k], episodes[b].action_end[k] + 1)
    ]
    return GrpoRow(
        ids=torch.tensor([e.ids[:width] for e in episodes]),
        source=torch.tensor([b * width + t - 1 for b, t, _ in places]),
        target_ids=torch.tensor([episodes[b].ids[t] for b, t, _ in places]),
        turn_of_token=torch.tensor([z for _, _, z in places]),
        old_log_probs=torch.tensor([p for e in episodes for turn in e.old_log_probs for p in turn]),
        advantages=torch.tensor([1.0 - 2 * (b % 2) for b, _ in turns]),
    )


def grpo_log_probs(model: Any, row: GrpoRow) -> Tensor:
    """(K,). The entropy is worked out and left, as Self-AC's step has it too."""
    base = base_of(model)
    states_TD = base.model(input_ids=row.ids, use_cache=False).last_hidden_state.flatten(0, 1)
    return chunked_log_probs(
        states_TD.index_select(0, row.source), base.get_output_embeddings(), row.target_ids, entropy=True
    )[0]


def grpo_loss(model: Any, row: GrpoRow) -> Tensor:
    log_probs = grpo_log_probs(model, row)
    options: dict[str, Any] = {"clip": CONFIG.ratio_clip, "ratio": "token", "normaliser": float(len(log_probs))}
    return turn_ppo_clip(log_probs, row.old_log_probs, row.turn_of_token, row.advantages, **options)[0]


@dataclass(frozen=True)
class Timing:
    """Seconds, medians; ratio: median of second / first over the pairs, spread: half its interquartile range."""

    first_s: float
    second_s: float
    ratio: float
    spread: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ± {self.spread:.3f}"


def one_thread() -> None:
    """PyTorch on one thread, and glibc without mmap for large buffers, which it would otherwise give back at every
    free: the page faults cost more than a tenth of a step, and fall on whichever of two steps has the buffers that are
    just large enough. A GPU's allocator keeps its memory, too.
    """
    torch.set_num_threads(1)
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        trim_threshold, mmap_max = -1, -4  # malloc.h
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)


def in_turn(
    first: Callable[[], object], second: Callable[[], object], pairs: int, clock: Callable[[], float] = time.thread_time
) -> Timing:
    """Both steps in turn, so that what slows the machine slows both. The first pair is a warm-up.

    clock: unless another is given, processor time of this thread: with one thread for PyTorch that is all the work, and
    time given to other processes does not count.
    """
    found = [(seconds(first, clock), seconds(second, clock)) for _ in range(pairs + 1)][1:]
    ratios = sorted(b / a for a, b in found)
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if pairs > 1 else [ratios[0]] * 3
    firsts, seconds_ = zip(*found, strict=True)
    return Timing(statistics.median(firsts), statistics.median(seconds_), statistics.median(ratios), (high - low) / 2)


def seconds(step: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    start = clock()
    step()
    return clock() - start


def backward(loss: Callable[[], Tensor], *modules: Any) -> Callable[[], None]:
    """Forward and backward pass from empty gradients; no optimiser's step, which is the same for all."""

    def step() -> None:
        for module in modules:
            module.zero_grad(set_to_none=True)
        loss().backward()  # type: ignore[no-untyped-call]

    return step


def table_head(*names: str) -> None:
    table_row(*names)
    table_row(*["---"] * len(names))


def table_row(*cells: object) -> None:
    print(f"| {' | '.join(str(cell) for cell in cells)} |", flush=True)
