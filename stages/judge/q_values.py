"""Q(s, a) as a number: a value head on the same model, read where the language critic would begin to speak.

    Q(s, a) = w . h + b,   h = TransformerBody(x)[-1],   x the successor's student prompt of (s, a)

So the scalar critic sees exactly what the language critic sees. Source: arXiv 2512.04601, the baseline SAC. It gives
only the idea; head and prompt are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.frame.contract import Context
from stages.frame.types import Message, Sleeper
from stages.judge.backup import successor_prompt
from stages.learn.adapter import base_of, open_adapter
from stages.learn.tree import tree_of
from stages.learn.tree_attention import body_pass
from stages.learn.value_head import ValueHead, load_head
from stages.llm.hf import check_adapter, shared_base
from stages.llm.roles import Roles
from stages.llm.tokens import has_room

BATCH = 32
"""Prompts of a pass. Cost alone."""


@dataclass(frozen=True)
class QCritic:
    """A model with the adapter of a q_critic run, and its head, in evaluation mode."""

    model: Any
    head: ValueHead


def open_q(context: Context) -> QCritic:
    """The critic of the newest q_critic run. Raises UsageError where head or adapter do not fit the model."""
    run, shape = str(context.latest("q_critic")), context.run.model
    check_adapter(context.artifact(run, "adapter"), context.engine.model_hash)
    if isinstance(context.engine, Sleeper):  # as before a training
        context.engine.sleep()
    model = open_adapter(shared_base(shape.path, shape.dtype), context.artifact(run, "adapter")).eval()
    head = load_head(context.artifact(run, "head"), width=base_of(model).config.hidden_size)
    return QCritic(model, head.to(model.device).eval())


def q_prompts(
    context: Context, roles: Roles, pairs: Sequence[tuple[Sequence[Message], str]]
) -> list[tuple[int, ...] | None]:
    """The prompt ids of each (state, action); Q is read at their end. None if they do not fit into the context."""
    found = context.engine.encode_all([successor_prompt(roles, state, action) for state, action in pairs])
    context_length = context.engine.context if found else None
    return [ids if has_room(ids, context_length) else None for ids in found]


@torch.no_grad()
def q_values(model: Any, head: ValueHead, prompts: Sequence[Sequence[int]]) -> list[float]:
    """Q at the end of each prompt, in order. What prompts of a pass begin with alike goes through the model once."""
    order = sorted(range(len(prompts)), key=lambda i: tuple(prompts[i]))
    found: dict[int, float] = {}
    for start in range(0, len(order), BATCH):
        members = order[start : start + BATCH]
        tree, places = tree_of([prompts[i] for i in members])
        ends = torch.stack([place[-1] for place in places])
        states_TD = body_pass(model, tree.to(model.device))
        found.update(zip(members, head(states_TD[ends.to(model.device)]).tolist(), strict=True))
    return [found[i] for i in range(len(prompts))]
