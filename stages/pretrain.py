"""Make a base model for a task's roles: a small one of words or bytes from scratch, or a real one warmed.

Roles: on the desk, on the wide desk, in 20 Questions, in arithmetic or in your own corpus (stages/corpora/own.py).
Agents act in math, game24 and wiki_search.

    turnwise pretrain --set pretrain.steps=3200
    turnwise pretrain --set pretrain.corpus=twenty --set roles.prompts=twenty --out data/base_twenty
    turnwise pretrain --set pretrain.corpus=maths --set roles.prompts=maths --out data/base_maths
    turnwise pretrain --set pretrain.corpus=wide --set roles.prompts=wide_desk --out data/base_wide
    turnwise pretrain --set pretrain.corpus=agents --out data/base_agents
    turnwise pretrain --set pretrain.base=data/models/smollm2 --set pretrain.lora_rank=16 --out data/models/mine

A small model is Llama-shaped (stages/train/scratch.py). With `base` any instruct model learns to speak as the roles do,
through its own chat template (stages/train/warm.py). Every row has its own random rules, so no task's answers are
learned. AutoModelForCausalLM and AutoTokenizer load the result. [ours]
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from stages.corpora import agents, desk, maths, own, scene, twenty, twenty_marks, wide
from stages.corpora.held_out import (
    agents_card,
    desk_card,
    maths_card,
    own_card,
    play_scores,
    role_scores,
    twenty_card,
    warmed_card,
    wide_card,
)
from stages.frame.contract import Config, Context, DataPath, ModuleName, Outputs, Stage
from stages.frame.own import is_own
from stages.frame.types import UsageError
from stages.llm.roles import Roles, roles_of

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

OF_WIDE = {"layers": 4, "batch": 48, "steps": 8000, "general_rows": 0, "probe_rows": 60}
"""Defaults where corpus = wide, whose examples are short."""

OF_BASE = {"steps": 160, "batch": 64, "general_rows": 0, "probe_rows": 16}
"""Defaults where base is set: a real model knows the language already."""

OTHERS: dict[str, dict[str, Any]] = {"agents": OF_AGENTS, "twenty": OF_TWENTY, "maths": OF_MATHS, "wide": OF_WIDE}
ROLE_PLAY: dict[str, Any] = {"desk": desk, "twenty": twenty, "maths": maths, "wide": wide}
"""Corpora of all roles: modules with `SHARE`, `example` and `words`."""

MARKS = {
    "desk": (desk.right, desk_card),
    "twenty": (twenty_marks.right, twenty_card),
    "maths": (maths.right, maths_card),
    "wide": (wide.right, wide_card),
}
"""Which replies of these are right, and the card that tells it."""


class PretrainConfig(Config):
    """Shape and schedule of the base model. Some defaults differ for agents, twenty, maths and wide: see each.

    With base only corpus, lora_rank, steps, batch, adam_lr, flat, general_rows and probe_rows count.
    """

    corpus: ModuleName = Field(
        "desk",
        description="What the model is taught. desk, wide, twenty and maths: the roles on the desk, on the wide desk (with roles.prompts = wide_desk), in 20 Questions (twenty) and in arithmetic (maths). agents: to act in three environments. my.words: your own module, by a name with a dot. [ours]",
    )
    base: DataPath = ""
    """Folder or hub name of an instruct model that is warmed for the roles; empty = a small model is made. [ours]"""
    lora_rank: int = Field(0, ge=0)
    """With base: rank of the adapter that is trained and merged; 0 = all weights are trained. [ours]"""
    width: int = Field(128, ge=16, description="Hidden size; 96 for maths. [ours]")
    layers: int = Field(3, ge=1, description="Decoder layers; 4 for agents and wide. [ours]")
    heads: int = Field(4, ge=1, description="Attention heads. [ours]")
    positions: int = Field(512, ge=1)
    """Longest text that the model takes, in tokens; 1024 for agents. [ours]"""
    vocabulary: int = Field(1000, ge=262)
    """Tokens of the byte-level tokenizer, for agents; the others have one a word. [ours]"""
    steps: int = Field(3200, ge=1)
    """Optimiser steps; 1800 for agents, 3600 for twenty, 2000 for maths, 8000 for wide; 160 with base. [ours]"""
    batch: int = Field(
        96,
        ge=1,
        description="Examples a step; 32 for agents, 48 for twenty, maths and wide; 64 with base. [ours]",
    )
    parts: int = Field(4, ge=1, description="Passes of like length that a step is cut into, against padding. [ours]")
    muon_lr: float = Field(0.02, gt=0, description="Learning rate of the matrices. [ours]")
    adam_lr: float = Field(3e-3, gt=0)
    """Learning rate of embeddings and norms. With base of all that is trained: 1e-3 for an adapter, 1e-4 for all weights. [ours]"""
    flat: float = Field(0.4, ge=0, le=1, description="Share of the steps before the linear decay to 3 %. [ours]")
    whole: float = Field(0.2, ge=0, le=1)
    """Share of first steps that also learn the text before the last reply; 1 for agents, twenty and maths. [ours]"""
    general_rows: int = Field(3000, ge=0)
    """Role rows written to general.jsonl, for mixing into later training; 0 for all but the desk, and with base. [ours]"""
    probe_rows: int = Field(40, ge=1)
    """Held-out rows a role in probe.jsonl, for scores and the forgetting probe. agents: 192 episodes a task; twenty: 100 rows; maths: 200; wide: 60; with base: 16. [ours]"""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_corpus(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        warm = {**OF_BASE, "adam_lr": 1e-3 if values.get("lora_rank") else 1e-4} if values.get("base") else {}
        return {**OTHERS.get(str(values.get("corpus")), {}), **warm, **values}

    @field_validator("corpus")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in (known := (*ROLE_PLAY, "agents")) and not is_own(name):
            raise ValueError(f"wanted {', '.join(known)}, or a module of your own with a dot, like my.words")
        return name


def role_play(name: str) -> Any:
    """The module of a corpus with all roles; None for agents, which has none."""
    return own.load(name) if is_own(name) else ROLE_PLAY.get(name)


def probe_rows(corpus: Any, n: int, rng: random.Random, roles: Roles, role: str | None = None) -> list[dict[str, Any]]:
    """Examples of the roles as general.jsonl and probe.jsonl hold them."""
    examples = [corpus.example(rng, roles, role) for _ in range(n)]
    return [{"role": e.role, "messages": list(e.messages), "reply": e.reply} for e in examples]


def run(context: Context) -> Outputs:
    """Artifact `model`: weights, tokenizer, model card. If all roles are taught, also general.jsonl and probe.jsonl.
    Of several ranks the first one scores and leaves them. Raises UsageError for weights that are to be dealt out.
    """
    if context.run.train.shard != "none":
        raise UsageError("train.shard: pretrain shares out passes alone; set it to none")
    return warmed(context) if context.config.base else made(context)


def made(context: Context) -> Outputs:
    """A small model from scratch."""
    from stages.learn import ranks
    from stages.learn.fit import check_finite
    from stages.train.scratch import agents_material, make_model, roles_material, train

    config: PretrainConfig = context.config
    roles, seed = roles_of(context.run.roles), context.run.seed
    prompts = agents.prompts() if config.corpus == "agents" else {}
    corpus = role_play(config.corpus)
    material = roles_material(corpus, roles) if corpus else agents_material(prompts, config.vocabulary)
    model = make_model(config, material.tokenizer, seed)
    bar = context.progress("pretrain", config.steps)
    losses = train(model, material, config, seed, bar.advance)
    check_finite(model.parameters(), steps=config.steps)
    if ranks.own():
        return Outputs({})
    folder = context.workdir / "model"
    model.save_pretrained(folder)
    material.tokenizer.save_pretrained(folder)
    n_parameters = sum(p.numel() for p in model.parameters())
    how = (
        f"{n_parameters:,} parameters, {len(material.tokenizer)} tokens, made by `turnwise pretrain` with seed {seed}:\n"
        f"{config.steps} steps of {config.batch}"
    )
    if corpus:
        right, told = marks(config.corpus, corpus)
        scores = role_scores(str(folder), write_rows(folder, config, corpus, roles, seed), right)
        card = told(how, config.probe_rows, scores)
    else:
        scores = play_scores(folder, prompts, config.probe_rows)
        card = agents_card(how, config.probe_rows, scores)
    (folder / "README.md").write_text(card)
    metrics = scores | {"pretrain/loss": losses[-1], "pretrain/parameters": float(n_parameters)}
    return Outputs(metrics, {}, {"model": folder}, {"pretrain/step_loss": losses})


def warmed(context: Context) -> Outputs:
    """The model at `base` after steps on the corpus. With an adapter, the artifact `adapter` holds what was learned, and
    `model` is its merge. Raises UsageError for a corpus without roles.
    """
    from stages.learn import ranks
    from stages.train.warm import open_warm, rows_of, save_warm, warm

    config: PretrainConfig = context.config
    if (corpus := role_play(config.corpus)) is None:
        raise UsageError(f"pretrain.base: the corpus {config.corpus!r} has no roles; {', '.join(ROLE_PLAY)} have")
    roles, seed = roles_of(context.run.roles), context.run.seed
    model, tokenizer, end = open_warm(config.base, rank=config.lora_rank, seed=seed)
    rng = random.Random(f"corpus {seed}")

    def draw() -> Any:
        scenes = (scene(corpus, rng, roles, size) for size in sizes(config.batch, len(corpus.SHARE)))
        return rows_of(tokenizer, [example for examples in scenes for example in examples], end)

    bar = context.progress("pretrain", config.steps)
    losses = warm(model, draw, steps=config.steps, lr=config.adam_lr, flat=config.flat, advance=bar.advance)
    if ranks.own():
        return Outputs({})
    folder, adapter = context.workdir / "model", context.workdir / "adapter"
    save_warm(model, config.base, folder, adapter)
    probe, (right, _) = write_rows(folder, config, corpus, roles, seed), marks(config.corpus, corpus)
    before, after = (
        role_scores(path, probe, right, dtype="bfloat16", max_tokens=160) for path in (config.base, str(folder))
    )
    how = f"{config.steps} steps of {config.batch} examples of the corpus {config.corpus}, with seed {seed}"
    (folder / "README.md").write_text(warmed_card(config.base, how, config.probe_rows, before, after))
    metrics = after | {f"{name}_before": share for name, share in before.items()} | {"pretrain/loss": losses[-1]}
    files = {"model": folder} | ({"adapter": adapter} if adapter.is_dir() else {})
    return Outputs(metrics, {}, files, {"pretrain/step_loss": losses})


def sizes(batch: int, n_roles: int) -> list[int]:
    """The examples of a step, in scenes of a few roles each: what the roles of a scene share is read once."""
    each = min(4, n_roles)
    return [each] * (batch // each) + ([batch % each] if batch % each else [])


def marks(name: str, corpus: Any) -> tuple[Callable[..., dict[str, bool]], Callable[..., str]]:
    """Which replies are right in a corpus, and the card of a small model that was made from it."""
    return MARKS.get(name, (getattr(corpus, "right", own.readable), own_card))


def write_rows(folder: Path, config: PretrainConfig, corpus: Any, roles: Roles, seed: int) -> list[dict[str, Any]]:
    """Writes general.jsonl and probe.jsonl; returns the rows of the latter."""
    rng = random.Random(f"held out {seed}")
    probe = [row for role in corpus.SHARE for row in probe_rows(corpus, config.probe_rows, rng, roles, role)]
    for name, content in (("probe", probe), ("general", probe_rows(corpus, config.general_rows, rng, roles))):
        if content:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return probe


STAGE = Stage(
    "pretrain", 3, PretrainConfig, inputs=(), roles=(*desk.SHARE, "value"), run=run, trains=True, shared=("roles",),
    outputs=("model/", "adapter/"),
)  # fmt: skip
