"""Make the base model that ships with the project: a small word-level decoder that knows the language of the roles.

    turnwise pretrain --set pretrain.steps=900

Llama-shaped, trained from scratch on `corpus.py`, saved as AutoModelForCausalLM and AutoTokenizer load it. Muon for
matrices and AdamW for embeddings and norms (Jordan et al. 2024); flat, then linear decay. [ours]
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from stages import corpus
from stages.contract import Config, Context, Outputs, Stage
from stages.llm.roles import ROLES, Roles, load_roles

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

SPECIAL = ("<|pad|>", "<|end|>", "<|unknown|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }}{% if m['role'] == 'assistant' %} <|end|>{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class PretrainConfig(Config):
    """Shape and schedule of the base model."""

    width: int = Field(128, ge=16, description="Hidden size. [ours]")
    layers: int = Field(3, ge=1, description="Decoder layers. [ours]")
    heads: int = Field(4, ge=1, description="Attention heads. [ours]")
    steps: int = Field(1000, ge=1, description="Optimiser steps. [ours]")
    batch: int = Field(128, ge=1, description="Examples a step. [ours]")
    muon_lr: float = Field(0.02, gt=0, description="Learning rate of the matrices. [ours]")
    adam_lr: float = Field(3e-3, gt=0, description="Learning rate of embeddings and norms. [ours]")
    flat: float = Field(0.4, ge=0, le=1, description="Share of the steps before the linear decay to 3 %. [ours]")
    general_rows: int = Field(3000, ge=0, description="Role rows written to general.jsonl, for mixing into later training. [ours]")
    probe_rows: int = Field(40, ge=1, description="Held-out rows a role in probe.jsonl, for scores and the forgetting probe. [ours]")


def make_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """One token a word, one for '.' and ','; text with single spaces survives encode and decode unchanged."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("[.,]"), "isolated")])
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", unk_token="<|unknown|>")
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL[3:])})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(config: PretrainConfig, tokenizer: Any, seed: int) -> PreTrainedModel:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=config.width, intermediate_size=3 * config.width, num_hidden_layers=config.layers,
            num_attention_heads=config.heads, num_key_value_heads=config.heads, max_position_embeddings=256, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    )


def rows(n: int, rng: random.Random, roles: Roles, role: str | None = None) -> list[dict[str, Any]]:
    examples = [corpus.example(rng, roles, role) for _ in range(n)]
    return [{"role": e.role, "messages": list(e.messages), "reply": e.reply} for e in examples]


def encode(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """(prompt ids, reply ids with the end token)."""
    prompt = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=True, return_dict=False)
    return prompt, [*tokenizer(row["reply"]).input_ids, tokenizer.eos_token_id]


def train(model: Any, tokenizer: Any, config: PretrainConfig, roles: Roles, seed: int, advance: Any) -> list[float]:
    """Train in place; returns the loss of every step."""
    import torch

    from stages.learn.losses import completion_nll
    from stages.learn.batches import pad_rows

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(matrices, lr=config.muon_lr, momentum=0.95, weight_decay=0.1)
    adam = torch.optim.AdamW(rest, lr=config.adam_lr, weight_decay=0.0)
    rng = random.Random(f"corpus {seed}")
    losses = []
    for step in range(config.steps):
        done = step / config.steps
        factor = 1.0 if done < config.flat else 1.0 - 0.97 * (done - config.flat) / (1 - config.flat)
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = config.muon_lr * factor, config.adam_lr * factor
        pairs = [encode(tokenizer, row) for row in rows(config.batch, rng, roles)]
        batch = pad_rows([p for p, _ in pairs], [r for _, r in pairs], pad_id=tokenizer.pad_token_id)
        nll_B, _ = completion_nll(model, batch)
        loss = (nll_B * batch.n_completion).sum() / batch.n_completion.sum()
        muon.zero_grad(), adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step(), adam.step()
        losses.append(float(loss.detach()))
        advance(1)
    return losses
