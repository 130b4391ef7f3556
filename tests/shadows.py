"""Tiny models with an adapter, made-up episodes, and two slow twins of the packed row.

`interleaved`: the row as the Self-AC slides draw it, one dense mask filled by a loop. `separate`: plain passes, one an
episode and one a state. Neither shares code with stages.learn.episode_row*; both go by the fields of `EpisodeIds` alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import models
import torch
from torch import Tensor

from stages.learn.adapter import new_adapter
from stages.learn.episode_row import EpisodeIds, pack
from stages.learn.tree_attention import body_pass
from stages.learn.value_head import ValueHead, episode_pass, new_head

CRITIC = (7, 3, 11)
VOCABULARY = 40
# fp32 keeps 7 digits; sums over up to a few hundred terms, in another order in each twin, leave 5 of the largest entry.
TOLERANCE = 1e-5
KINDS = ("Llama", "Qwen2", "Qwen3")


def tiny(kind: str, **changes: Any) -> Any:
    """Two layers, four heads over two of keys, random weights; `kind` as transformers spells it."""
    import transformers

    config: dict[str, Any] = models.SMALL | {
        "vocab_size": VOCABULARY,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    torch.manual_seed(0)
    # Of a family that also sees, the config of its text part.
    shape = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    return getattr(transformers, f"{kind}ForCausalLM")(shape(**(config | changes))).eval()


def with_adapter(kind: str = "Llama", **changes: Any) -> Any:
    return models.shake(new_adapter(tiny(kind, **changes), rank=2, alpha=4.0, seed=0), spread=0.2).eval()


def make_head(model: Any, soft_len: int = 0) -> ValueHead:
    """A head whose values are of size 1, so that a difference shows."""
    return new_head(model, soft_len=soft_len, spread=1.0, seed=3)


def make_episode(n_turns: int, seed: int = 0, *, truncated: bool = False) -> EpisodeIds:
    """Random ids; actions of 1-4 tokens, observations of 0-3, a prompt of 2-6 before the first."""
    rng = random.Random(seed)
    ids, starts, ends = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 6))], [], []
    for _ in range(n_turns):
        starts.append(len(ids))
        ids += [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))]
        ends.append(len(ids) - 1)
        ids += [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 3))]
    log_probs = tuple(tuple(-rng.random() for _ in range(s, e + 1)) for s, e in zip(starts, ends, strict=True))
    return EpisodeIds(
        tuple(ids),
        tuple(starts),
        tuple(ends),
        log_probs,
        tuple(rng.random() for _ in range(n_turns + 1)),
        truncated,
        (seed,),
    )


@dataclass
class Pass:
    """visible: (V, D) states of visible tokens. values: (all states,). actions: (K, D) that predict actions."""

    visible: Tensor
    values: Tensor
    actions: Tensor


Run = Callable[[Any, ValueHead, Sequence[EpisodeIds], Sequence[int]], Pass]


def packed(model: Any, head: ValueHead, episodes: Sequence[EpisodeIds], critic: Sequence[int] = CRITIC) -> Pass:
    row = pack(episodes, critic, max_positions=None, soft_len=head.soft_len)
    actions, values_BM = episode_pass(model, head, row)
    visible = body_pass(model, row.tree)[: sum(len(e.ids) for e in episodes)] if head.soft is None else torch.zeros(0)
    return Pass(visible, torch.cat([values_BM[b, : e.n_turns + 1] for b, e in enumerate(episodes)]), actions)


def separate(model: Any, head: ValueHead, episodes: Sequence[EpisodeIds], critic: Sequence[int] = CRITIC) -> Pass:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    embed = inner.get_input_embeddings()

    def states(ids: Sequence[int], soft: Tensor | None = None) -> Tensor:
        x = embed(torch.tensor([list(ids)]))
        if soft is not None:
            x = torch.cat([x, soft[None]], 1)
        found: Tensor = inner.model(inputs_embeds=x, use_cache=False).last_hidden_state[0]
        return found

    visible, values, actions = [], [], []
    for e in episodes:
        visible.append(states(e.ids))
        for start, end in zip(e.action_start, e.action_end, strict=True):
            actions += [visible[-1][t - 1] for t in range(start, end + 1)]
        for length in [*e.action_start, len(e.ids)]:
            last = states([*e.ids[:length], *critic], head.soft)[-1]
            values.append(last @ head.weight + head.bias)
    return Pass(torch.cat(visible), torch.stack(values), torch.stack(actions))


def interleaved(model: Any, head: ValueHead, episodes: Sequence[EpisodeIds], critic: Sequence[int] = CRITIC) -> Pass:
    """sp up |cp_0| a_0 o_0 |cp_1| ... of one episode after the other, and one dense mask."""
    ids: list[int] = []
    tags: list[tuple[int, int]] = []  # (episode, 0 or k + 1)
    positions: list[int] = []
    place: dict[tuple[int, int], int] = {}  # (episode, visible token) -> position in the row
    ends: list[int] = []
    for b, e in enumerate(episodes):
        state_at = {length: k for k, length in enumerate([*e.action_start, len(e.ids)])}
        for t in range(len(e.ids) + 1):
            if t in state_at:
                ids += critic
                tags += [(b, state_at[t] + 1)] * len(critic)
                positions += range(t, t + len(critic))
                ends.append(len(ids) - 1)
            if t < len(e.ids):
                place[b, t] = len(ids)
                ids.append(e.ids[t])
                tags.append((b, 0))
                positions.append(t)
    mask = torch.zeros(1, 1, len(ids), len(ids), dtype=torch.bool)
    for i, (episode, own) in enumerate(tags):
        for j, (other, shadow) in enumerate(tags[: i + 1]):
            mask[0, 0, i, j] = episode == other and shadow in (0, own)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    states = inner.model(
        input_ids=torch.tensor([ids]), attention_mask=mask, position_ids=torch.tensor([positions]), use_cache=False
    ).last_hidden_state[0]  # fmt: skip
    visible = torch.stack([states[at] for at in place.values()])
    actions = [
        states[place[b, t - 1]]
        for b, e in enumerate(episodes) for start, end in zip(e.action_start, e.action_end, strict=True) for t in range(start, end + 1)
    ]  # fmt: skip
    return Pass(visible, torch.stack([states[at] @ head.weight + head.bias for at in ends]), torch.stack(actions))


def action_ids(episodes: Sequence[EpisodeIds]) -> Tensor:
    return torch.tensor(
        [
            e.ids[t]
            for e in episodes
            for s, end in zip(e.action_start, e.action_end, strict=True)
            for t in range(s, end + 1)
        ]
    )


def joint_loss(model: Any, found: Pass, episodes: Sequence[EpisodeIds]) -> Tensor:
    """Log-probs of the action tokens times fixed random weights, plus squared values: actor and critic at once."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    log_probs = inner.get_output_embeddings()(found.actions).log_softmax(-1)
    targets = action_ids(episodes)
    weights = torch.randn(len(targets), generator=torch.Generator().manual_seed(5))
    loss: Tensor = (log_probs[torch.arange(len(targets)), targets] * weights).sum() + (found.values**2).sum()
    return loss


def gradients(loss: Tensor, *modules: Any) -> dict[str, Tensor]:
    """By module index and parameter name; 0 where the loss does not reach. The graph is kept."""
    named = {f"{i}.{name}": p for i, m in enumerate(modules) for name, p in m.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True, retain_graph=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(named.items(), grads, strict=True)}


def assert_close(found: Tensor, wanted: Tensor, what: str = "") -> None:
    """Equal to TOLERANCE of the largest entry, or of 1 where entries are smaller."""
    assert found.shape == wanted.shape, what
    off = float((found - wanted).detach().abs().max()) / max(1.0, float(wanted.detach().abs().max()))
    assert off <= TOLERANCE, f"{what} off by {off:.2e}"
