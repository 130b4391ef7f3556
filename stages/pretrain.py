"""Make a small base model of words for the roles of a task, or of bytes for agents.

Roles: on the desk, in 20 Questions, in arithmetic or in your own corpus (stages/corpora/own.py). Agents act in math,
game24 and wiki_search.

    turnwise pretrain --set pretrain.steps=3200
    turnwise pretrain --set pretrain.corpus=twenty --set roles.prompts=twenty --out data/base_twenty
    turnwise pretrain --set pretrain.corpus=maths --set roles.prompts=maths --out data/base_maths
    turnwise pretrain --set pretrain.corpus=agents --out data/base_agents

The model is Llama-shaped and trained from scratch on text of `corpora/`. AutoModelForCausalLM and AutoTokenizer load
it. Muon trains the matrices, AdamW embeddings and norms (Jordan et al. 2024); the rate is flat, then decays linearly.
[ours]
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator, model_validator

from stages.corpora import Example, agents, desk, maths, own, twenty, twenty_marks
from stages.corpora.held_out import agents_card, desk_card, maths_card, own_card, play_scores, role_scores, twenty_card
from stages.corpora.tokenizers import (
    Ids,
    byte_tokenizer,
    encode_episode,
    encode_reply,
    encode_thoughts,
    encode_turns,
    word_tokenizer,
)
from stages.frame.contract import Config, Context, ModuleName, Outputs, Stage
from stages.frame.own import is_own
from stages.llm.roles import Roles, roles_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from stages.learn.losses import Batch

OF_AGENTS = {
    "layers": 4,
    "positions": 1024,
    "steps": 1800,
    "batch": 32,
    "whole": 1.0,
    "general_rows": 0,
    "probe_rows": 192,
}
"""Defaults where corpus = agents, whose examples are whole episodes."""

OF_TWENTY = {"batch": 48, "steps": 3600, "whole": 1.0, "general_rows": 0, "probe_rows": 100}
"""Defaults where corpus = twenty, in which earlier thoughts and answers teach the table."""

OF_MATHS = {"width": 96, "steps": 2000, "batch": 48, "whole": 1.0, "general_rows": 0, "probe_rows": 200}
"""Defaults where corpus = maths, in which earlier turns are arithmetic, too."""

OTHERS: dict[str, dict[str, Any]] = {"agents": OF_AGENTS, "twenty": OF_TWENTY, "maths": OF_MATHS}
ROLE_PLAY: dict[str, Any] = {"desk": desk, "twenty": twenty, "maths": maths}
"""Corpora of all roles: modules with `SHARE`, `example` and `words`."""

MARKS = {
    "desk": (desk.right, desk_card),
    "twenty": (twenty_marks.right, twenty_card),
    "maths": (maths.right, maths_card),
}
"""Which replies of these are right, and the card that tells it."""


class PretrainConfig(Config):
    """Shape and schedule of the base model. Some defaults differ for agents, twenty and maths: see each."""

    corpus: ModuleName = Field(
        "desk",
        description="What the model is taught. desk, twenty and maths: the roles on the desk, in 20 Questions (with roles.prompts = twenty) and in arithmetic. agents: to act in three environments. my.words: your own module, by a name with a dot. [ours]",
    )
    width: int = Field(128, ge=16, description="Hidden size; 96 for maths. [ours]")
    layers: int = Field(3, ge=1, description="Decoder layers; 4 for agents. [ours]")
    heads: int = Field(4, ge=1, description="Attention heads. [ours]")
    positions: int = Field(512, ge=1)
    """Longest text that the model takes, in tokens; 1024 for agents. [ours]"""
    vocabulary: int = Field(1000, ge=262)
    """Tokens of the byte-level tokenizer, for agents; the others have one a word. [ours]"""
    steps: int = Field(3200, ge=1)
    """Optimiser steps; 1800 for agents, 3600 for twenty, 2000 for maths. [ours]"""
    batch: int = Field(96, ge=1, description="Examples a step; 32 for agents, 48 for twenty and maths. [ours]")
    parts: int = Field(4, ge=1, description="Passes of like length that a step is cut into, against padding. [ours]")
    muon_lr: float = Field(0.02, gt=0, description="Learning rate of the matrices. [ours]")
    adam_lr: float = Field(3e-3, gt=0, description="Learning rate of embeddings and norms. [ours]")
    flat: float = Field(0.4, ge=0, le=1, description="Share of the steps before the linear decay to 3 %. [ours]")
    whole: float = Field(0.2, ge=0, le=1)
    """Share of first steps that also learn the text before the last reply; 1 for agents, twenty and maths. [ours]"""
    general_rows: int = Field(3000, ge=0)
    """Role rows written to general.jsonl, for mixing into later training; 0 for all but the desk. [ours]"""
    probe_rows: int = Field(40, ge=1)
    """Held-out rows a role in probe.jsonl, for scores and the forgetting probe. agents: 192 episodes a task; twenty: 100 rows; maths: 200. [ours]"""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_corpus(cls, values: Any) -> Any:
        return {**OTHERS.get(str(values.get("corpus")), {}), **values} if isinstance(values, Mapping) else values

    @field_validator("corpus")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in (known := (*ROLE_PLAY, "agents")) and not is_own(name):
            raise ValueError(f"wanted {', '.join(known)}, or a module of your own with a dot, like my.words")
        return name


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


def role_play(name: str) -> Any:
    """The module of a corpus with all roles; None for agents, which has none."""
    return own.load(name) if is_own(name) else ROLE_PLAY.get(name)


def agents_material(prompts: Mapping[str, Roles], vocabulary: int) -> Material:
    return Material(
        byte_tokenizer(agents.texts(prompts), vocabulary), lambda rng: agents.example(rng, prompts), encode_episode
    )


def padded(rows: Sequence[tuple[list[int], list[bool]]], pad_id: int) -> Batch:
    """Rows of ids and of which ids are learned, padded on the right."""
    import torch

    from stages.learn.losses import Batch

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
            max_position_embeddings=config.positions,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def train(model: Any, material: Material, config: PretrainConfig, seed: int, advance: Any) -> list[float]:
    """Train in place; returns the loss of every step."""
    import torch

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
    from stages.learn.losses import completion_nll

    total = sum(sum(learned) for _, learned in rows)
    mean = 0.0
    for part in in_parts(rows, parts):
        batch = padded(part, pad_id)
        nll_B, _ = completion_nll(model, batch)
        loss = (nll_B * batch.n_completion).sum() / total
        loss.backward()  # type: ignore[no-untyped-call]
        mean += float(loss.detach())
    return mean


def probe_rows(corpus: Any, n: int, rng: random.Random, roles: Roles, role: str | None = None) -> list[dict[str, Any]]:
    """Examples of the roles as general.jsonl and probe.jsonl hold them."""
    examples = [corpus.example(rng, roles, role) for _ in range(n)]
    return [{"role": e.role, "messages": list(e.messages), "reply": e.reply} for e in examples]


def run(context: Context) -> Outputs:
    """Artifact `model`: weights, tokenizer, model card. If all roles are taught, also general.jsonl and probe.jsonl."""
    from stages.learn.fit import check_finite

    config: PretrainConfig = context.config
    roles, seed = roles_of(context.run.roles), context.run.seed
    prompts = agents.prompts() if config.corpus == "agents" else {}
    corpus = role_play(config.corpus)
    material = roles_material(corpus, roles) if corpus else agents_material(prompts, config.vocabulary)
    model = make_model(config, material.tokenizer, seed)
    bar = context.progress("pretrain", config.steps)
    losses = train(model, material, config, seed, bar.advance)
    check_finite(model.parameters(), steps=config.steps)
    folder = context.workdir / "model"
    model.save_pretrained(folder)
    material.tokenizer.save_pretrained(folder)
    n_parameters = sum(p.numel() for p in model.parameters())
    made = (
        f"{n_parameters:,} parameters, {len(material.tokenizer)} tokens, made by `turnwise pretrain` with seed {seed}:\n"
        f"{config.steps} steps of {config.batch}"
    )
    if corpus:
        right, told = MARKS.get(config.corpus, (getattr(corpus, "right", own.readable), own_card))
        scores = role_scores(folder, write_rows(folder, config, corpus, roles, seed), right)
        card = told(made, config.probe_rows, scores)
    else:
        scores = play_scores(folder, prompts, config.probe_rows)
        card = agents_card(made, config.probe_rows, scores)
    (folder / "README.md").write_text(card)
    metrics = scores | {"pretrain/loss": losses[-1], "pretrain/parameters": float(n_parameters)}
    return Outputs(metrics, {}, {"model": folder}, {"pretrain/step_loss": losses})


def write_rows(folder: Path, config: PretrainConfig, corpus: Any, roles: Roles, seed: int) -> list[dict[str, Any]]:
    """Writes general.jsonl and probe.jsonl; returns the rows of the latter."""
    rng = random.Random(f"held out {seed}")
    probe = [row for role in corpus.SHARE for row in probe_rows(corpus, config.probe_rows, rng, roles, role)]
    for name, content in (("probe", probe), ("general", probe_rows(corpus, config.general_rows, rng, roles))):
        if content:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return probe


STAGE = Stage(
    "pretrain", 3, PretrainConfig, inputs=(), roles=(*desk.SHARE, "value"), run=run, shared=("roles",),
    outputs=("model/",),
)  # fmt: skip
