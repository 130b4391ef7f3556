"""The critic: a scalar read at the last token of the critic's prompt, by the same transformer that acts.

    V(s) = w . h + b,   h = TransformerBody(s + cp)[-1]

Source: Self-AC slides, model. The prompt `cp` is text, or 1-4 learned vectors in its place [ours].
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stages.frame.types import MissingInput, UsageError
from stages.learn.adapter import base_of
from stages.learn.episode_row import PackedRow
from stages.learn.tree_attention import body_pass

WEIGHTS = "value_head.safetensors"
CONFIG = "value_head.json"


class ValueHead(nn.Module):
    """weight: (D,), bias: (), soft: (c, D), the learned prompt, or None. Kept and computed in fp32, under autocast too."""

    def __init__(self, width: int, *, soft_len: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(()))
        self.soft = nn.Parameter(torch.zeros(soft_len, width)) if soft_len else None

    @property
    def width(self) -> int:
        return len(self.weight)

    @property
    def soft_len(self) -> int:
        return 0 if self.soft is None else len(self.soft)

    def forward(self, states: Tensor) -> Tensor:
        """(..., D) -> (...)."""
        # Products and a sum, not a matrix product: that one autocast would take to 16 bits.
        values: Tensor = (states.float() * self.weight).sum(-1) + self.bias
        return values


def new_head(model: Any, *, soft_len: int = 0, spread: float = 0.01, seed: int) -> ValueHead:
    """A head for the model, on its device.

    w ~ spread N(0, 1) / sqrt(D), b = 0. V starts at about `spread` times the state's root mean square, which a final
    norm keeps near 1. So the first targets are rewards and not noise. With w = 0 the body would get no gradient [ours].
    The soft prompt starts as ordinary tokens would: mean + deviation x N(0, 1) of the embeddings, by dimension.
    """
    embeddings = base_of(model).get_input_embeddings().weight.detach()
    width = embeddings.shape[1]
    generator = torch.Generator().manual_seed(seed)
    head = ValueHead(width, soft_len=soft_len)
    with torch.no_grad():
        head.weight.copy_(spread * torch.randn(width, generator=generator) / width**0.5)
        if head.soft is not None:
            deviation, mean = torch.std_mean(embeddings, dim=0)
            head.soft.copy_(mean.cpu() + deviation.cpu() * torch.randn(soft_len, width, generator=generator))
    return head.to(embeddings.device)


def save_head(head: ValueHead, folder: Path) -> None:
    """Write value_head.safetensors and value_head.json into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.detach().cpu().contiguous() for name, t in head.state_dict().items()}, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"width": head.width, "soft_len": head.soft_len}) + "\n")


def load_head(folder: Path, *, width: int) -> ValueHead:
    """The head of a folder. Raises MissingInput where there is none, UsageError for one of another `width`."""
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise MissingInput(
            f"wanted {CONFIG} and {WEIGHTS} of a value head, found no such pair in the folder {folder.name!r}; train one with: turnwise run"
        )
    config = json.loads((folder / CONFIG).read_text())
    if config["width"] != width:
        raise UsageError(
            f"the value head in {folder.name!r} reads states of width {config['width']}, the model's have {width}; use the model it was trained on"
        )
    head = ValueHead(width, soft_len=config["soft_len"])
    head.load_state_dict(load_file(folder / WEIGHTS))
    return head


def episode_pass(
    model: Any, head: ValueHead, packed: PackedRow, *, value_grad_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """One pass for actor and critic: (states that predict the action tokens (K, D), V of every state (B, M)).

    V is 0 past an episode's end. No vocabulary projection: log-probs are made of the states.
    value_grad_scale: factor on the head's gradient into the body, >= 0; 0 = it reads a detached body [ours].
    A soft prompt lies before the body, so its gradient carries the factor too (Adam does not notice, except at 0).
    Raises ValueError for a negative factor, for a soft prompt at factor 0 (it would never
    learn), and for a row packed for another prompt length. Gradients flow into model and head.
    """
    if not value_grad_scale >= 0:
        raise ValueError(f"value_grad_scale is a factor of at least 0, found {value_grad_scale}")
    if head.soft_len != packed.soft_len:
        raise ValueError(
            f"the head has a soft prompt of {head.soft_len} vectors, the row was packed for {packed.soft_len}"
        )
    if head.soft is not None and value_grad_scale == 0 and torch.is_grad_enabled():
        raise ValueError(
            "with value_grad_scale 0 a soft prompt would never learn; use a text prompt, or a factor above 0"
        )
    places = packed.state_places
    embeddings = (
        None if head.soft is None else with_soft(model, head.soft, packed.ids, packed.shadow > 0, repeats=len(places))
    )
    states_TD = body_pass(model, packed.tree, embeddings_TD=embeddings)
    ends_D = states_TD.index_select(0, packed.value_positions.flatten().index_select(0, places))
    if value_grad_scale != 1:
        ends_D = value_grad_scale * ends_D + (1 - value_grad_scale) * ends_D.detach()
    values = torch.zeros(packed.value_positions.numel(), device=states_TD.device).index_copy(0, places, head(ends_D))
    return states_TD.index_select(0, packed.source_positions), values.view_as(packed.value_positions)


def with_soft(model: Any, soft_CD: Tensor, ids: Tensor, places: Tensor, *, repeats: int) -> Tensor:
    """Embeddings of the ids (..., D), with the soft prompt put, `repeats` times in order, at the places (...,) bool."""
    embeddings: Tensor = base_of(model).get_input_embeddings()(ids)
    return embeddings.masked_scatter(places[..., None], soft_CD.to(embeddings.dtype).repeat(repeats, 1))


def state_values(
    model: Any, head: ValueHead, states: Sequence[Sequence[int]], critic_ids: Sequence[int], *, batch_size: int = 16
) -> Tensor:
    """V of each state (len(states),) by plain passes over state + critic prompt, as while an episode is played.

    Equal to the packed values (fp32: to 1e-5). critic_ids: empty where the head has a soft prompt. Gradients flow; wrap
    it in `torch.no_grad()` where none is wanted. Raises ValueError for an empty state, or not exactly one kind of
    prompt.
    """
    if bool(critic_ids) == bool(head.soft_len):
        raise ValueError(
            f"wanted either the ids of a critic prompt or a soft one, found {len(critic_ids)} ids and {head.soft_len} vectors"
        )
    if any(not len(state) for state in states):
        raise ValueError(
            f"wanted states of at least one token, found an empty one at index {[len(s) for s in states].index(0)}"
        )
    # By length, so that a batch is padded little.
    order = sorted(range(len(states)), key=lambda i: len(states[i]))
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    found = [values_of_batch(model, head, [states[i] for i in batch], critic_ids) for batch in batches]
    device = head.weight.device
    if not found:
        return torch.zeros(0, device=device)
    return torch.cat(found)[torch.tensor(order, device=device).argsort()]


def values_of_batch(model: Any, head: ValueHead, states: Sequence[Sequence[int]], critic_ids: Sequence[int]) -> Tensor:
    device = head.weight.device
    prompt = list(critic_ids) or [0] * head.soft_len
    lengths = torch.tensor([len(state) for state in states], device=device)
    # Padding stands to the right, where a causal model's real tokens cannot see it: no mask is needed.
    widest = max(len(state) for state in states)
    ids_BT = torch.tensor([[*state, *prompt, *[0] * (widest - len(state))] for state in states], device=device)
    ends = lengths + len(prompt) - 1
    if head.soft is None:
        inputs = {"input_ids": ids_BT}
    else:
        columns = torch.arange(ids_BT.shape[1], device=device)
        places = (columns >= lengths[:, None]) & (columns <= ends[:, None])
        inputs = {"inputs_embeds": with_soft(model, head.soft, ids_BT, places, repeats=len(states))}
    states_BTD = base_of(model).model(**inputs, use_cache=False).last_hidden_state
    values: Tensor = head(states_BTD[torch.arange(len(states), device=device), ends])
    return values
