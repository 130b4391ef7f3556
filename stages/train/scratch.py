"""Train a small model from scratch on examples of a corpus.

Muon trains the matrices, AdamW embeddings and norms (Jordan et al. 2024); the rate is flat, then decays linearly. [ours]
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from stages.corpora import Example, agents, own, twenty
from stages.corpora.tokenizers import (
    Ids,
    byte_tokenizer,
    encode_episode,
    encode_reply,
    encode_thoughts,
    encode_turns,
    word_tokenizer,
)
from stages.learn import ranks
from stages.learn.fit import flat_then_falling
from stages.learn.losses import Batch, completion_nll
from stages.llm.roles import Roles

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Material:
    """The training material of a model, as tokens."""

    tokenizer: Any
    draw: Callable[[random.Random], Example]
    encode: Callable[[Any, Example], Ids]  # of the steps that learn more than the last reply


def roles_material(corpus: Any, roles: Roles) -> Material:
    encode = encode_thoughts if corpus is twenty else encode_turns
    words = corpus.words(roles) if hasattr(corpus, "words") else own.words(corpus, roles)
    return Material(word_tokenizer(words), lambda rng: corpus.example(rng, roles, None), encode)


def agents_material(prompts: Mapping[str, Roles], vocabulary: int) -> Material:
    return Material(
        byte_tokenizer(agents.texts(prompts), vocabulary), lambda rng: agents.example(rng, prompts), encode_episode
    )


def padded(rows: Sequence[tuple[list[int], list[bool]]], pad_id: int) -> Batch:
    """Rows of ids and of which ids are learned, padded on the right."""
    ids = torch.full((len(rows), max(len(ids) for ids, _ in rows)), pad_id)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for i, (row, learned) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = torch.tensor(learned)
    return Batch(ids, mask, mask.sum(1))


def in_parts(rows: Sequence[tuple[list[int], list[bool]]], n: int) -> list[list[tuple[list[int], list[bool]]]]:
    """The rows of a step in n passes of similar length; unchanged if n is 1."""
    if n == 1:
        return [list(rows)]
    by_length = sorted(rows, key=lambda row: len(row[0]))
    edges = [round(i * len(rows) / n) for i in range(n + 1)]
    return [part for start, end in pairwise(edges) if (part := by_length[start:end])]


def make_model(config: Any, tokenizer: Any, seed: int) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.width,
            intermediate_size=3 * config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            max_position_embeddings=config.positions,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def train(model: Any, material: Material, config: Any, seed: int, advance: Any) -> list[float]:
    """Train in place; returns the loss of every step. config: a PretrainConfig."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(matrices, lr=config.muon_lr, momentum=0.95, weight_decay=0.1)
    adam = torch.optim.AdamW(rest, lr=config.adam_lr, weight_decay=0.0)
    rng = random.Random(f"corpus {seed}")
    losses = []
    for step in range(config.steps):
        done = step / config.steps
        factor = flat_then_falling(done, config.flat)
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = config.muon_lr * factor, config.adam_lr * factor
        examples = [material.draw(rng) for _ in range(config.batch)]
        encode = material.encode if done < config.whole else encode_reply
        muon.zero_grad()
        adam.zero_grad()
        losses.append(
            backward(
                model, [encode(material.tokenizer, e) for e in examples], config.parts, material.tokenizer.pad_token_id
            )
        )
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()  # type: ignore[no-untyped-call]
        adam.step()
        advance(1)
    return losses


def backward(model: Any, rows: Sequence[tuple[list[int], list[bool]]], parts: int, pad_id: int) -> float:
    """Add the gradient of the mean negative log-likelihood over all learned tokens of the rows; returns that mean."""
    total = sum(sum(learned) for _, learned in rows)
    mean, found = 0.0, in_parts(rows, parts)
    owners = ranks.dealt([sum(len(ids) for ids, _ in part) for part in found], ranks.count())
    for part in (part for part, owner in zip(found, owners, strict=True) if owner == ranks.own()):
        batch = padded(part, pad_id)
        nll_B, _ = completion_nll(model, batch)
        loss = (nll_B * batch.n_completion).sum() / total
        loss.backward()  # type: ignore[no-untyped-call]
        mean += float(loss.detach())
    ranks.sum_gradients(model.parameters())
    return float(sum(ranks.gathered(mean)))
