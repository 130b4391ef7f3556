"""Make the base model that ships with the project: a small word-level decoder that knows the language of the roles.

    turnwise pretrain --set pretrain.steps=900

Llama-shaped, trained from scratch on a text of `corpora/`, saved as AutoModelForCausalLM and AutoTokenizer load it. Muon for
matrices and AdamW for embeddings and norms (Jordan et al. 2024); flat, then linear decay. [ours]
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from stages.contract import Config, Context, Outputs, Stage
from stages.corpora import desk
from stages.corpora.tokenizers import word_tokenizer
from stages.llm.roles import ROLES, Roles, load_roles

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PretrainConfig(Config):
    """Shape and schedule of the base model."""

    width: int = Field(128, ge=16, description="Hidden size. [ours]")
    layers: int = Field(3, ge=1, description="Decoder layers. [ours]")
    heads: int = Field(4, ge=1, description="Attention heads. [ours]")
    steps: int = Field(900, ge=1, description="Optimiser steps. [ours]")
    batch: int = Field(96, ge=1, description="Examples a step. [ours]")
    muon_lr: float = Field(0.02, gt=0, description="Learning rate of the matrices. [ours]")
    adam_lr: float = Field(3e-3, gt=0, description="Learning rate of embeddings and norms. [ours]")
    flat: float = Field(0.4, ge=0, le=1, description="Share of the steps before the linear decay to 3 %. [ours]")
    general_rows: int = Field(3000, ge=0, description="Role rows written to general.jsonl, for mixing into later training. [ours]")
    probe_rows: int = Field(40, ge=1, description="Held-out rows a role in probe.jsonl, for scores and the forgetting probe. [ours]")


def make_model(config: PretrainConfig, tokenizer: Any, seed: int) -> PreTrainedModel:
    import torch
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
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def rows(n: int, rng: random.Random, roles: Roles, role: str | None = None) -> list[dict[str, Any]]:
    examples = [desk.example(rng, roles, role) for _ in range(n)]
    return [{"role": e.role, "messages": list(e.messages), "reply": e.reply} for e in examples]


def encode(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """(prompt ids, reply ids with the end token)."""
    prompt = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=True, return_dict=False)
    return prompt, [*tokenizer(row["reply"]).input_ids, tokenizer.eos_token_id]


def train(model: Any, tokenizer: Any, config: PretrainConfig, roles: Roles, seed: int, advance: Any) -> list[float]:
    """Train in place; returns the loss of every step."""
    import torch

    from stages.learn.batches import pad_rows
    from stages.learn.losses import completion_nll

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
        muon.zero_grad()
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()  # type: ignore[no-untyped-call]
        adam.step()
        losses.append(float(loss.detach()))
        advance(1)
    return losses


def role_scores(model: Any, tokenizer: Any, folder: Path, probe: list[dict[str, Any]]) -> dict[str, float]:
    """Share of held-out prompts that each role answers exactly, greedily; of the evaluator also the share of right verdicts.

    policy and successor have many right answers, so theirs is the share of readable ones.
    """
    from stages.llm.hf import HfEngine
    from stages.llm.roles import ask

    replies = ask(HfEngine(str(folder)), [row["messages"] for row in probe], adapter=None, temperature=0.0, max_tokens=64, seed=0)
    right: dict[str, list[bool]] = defaultdict(list)
    for row, (_, reply) in zip(probe, replies, strict=True):
        role, want, got = row["role"], row["reply"], reply.text
        if role == "policy":
            right[role].append(got.startswith("Thought:") and got.split()[-2:-1] == want.split()[-2:-1])
        elif role == "successor":
            right[role].append(got.startswith("Future:") and " then " in got)
        else:
            right[role].append(got == want)
        if role == "evaluator":
            right["evaluator_verdict"].append(got.split()[:2] == want.split()[:2])
    return {f"pretrain/{role}": sum(found) / len(found) for role, found in right.items()}


def card(config: PretrainConfig, seed: int, n_parameters: int, n_words: int, scores: dict[str, float]) -> str:
    lines = "\n".join(f"| {name.removeprefix('pretrain/')} | {share:.3f} |" for name, share in sorted(scores.items()))
    return f"""# The embedded base model

A word-level Llama-shaped decoder, {n_parameters:,} parameters, {n_words} tokens, made by `turnwise pretrain` with seed {seed}:
{config.steps} steps of {config.batch} examples of `stages/corpora/desk.py`. It knows the language of the roles on `service_desk`,
and no rule of any desk: every training example has a rule book of its own, drawn at random (`tests/corpora/test_desk.py`).

Made only to try the pipeline on a laptop. It can do nothing else.

| role, on {config.probe_rows} held-out prompts each | right |
|---|---|
{lines}

policy, successor: share of readable replies, as many are right. The others: share of replies equal to the one right answer.
The refiner answers a bare "Optimality: No." with any other option, which counts as wrong here although it is not.

`general.jsonl`: role rows for mixing into training. `probe.jsonl`: held-out role rows, the forgetting probe of `evaluate`.
"""


def run(context: Context) -> Outputs:
    """Artifact `model`: weights, tokenizer, model card, general.jsonl and probe.jsonl."""
    config: PretrainConfig = context.config
    roles = load_roles(context.run.roles.prompts)
    words = desk.words(roles)
    tokenizer = word_tokenizer(words)
    model = make_model(config, tokenizer, context.run.seed)
    bar = context.progress("pretrain", config.steps)
    losses = train(model, tokenizer, config, roles, context.run.seed, bar.advance)
    folder = context.workdir / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rng = random.Random(f"held out {context.run.seed}")
    probe = [row for role in ROLES for row in rows(config.probe_rows, rng, roles, role)]
    for name, content in (("probe", probe), ("general", rows(config.general_rows, rng, roles))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    scores = role_scores(model, tokenizer, folder, probe)
    n_parameters = sum(p.numel() for p in model.parameters())
    (folder / "README.md").write_text(card(config, context.run.seed, n_parameters, len(tokenizer), scores))
    return Outputs(
        scores | {"pretrain/loss": losses[-1], "pretrain/parameters": float(n_parameters)}, {}, {"model": folder}, {"pretrain/step_loss": losses}
    )


STAGE = Stage("pretrain", 1, PretrainConfig, inputs=(), roles=ROLES, run=run, shared=("roles",), outputs=("model/",))
