"""Runs stages on made-up rows as one rank of several, for test_ranks.py.

    python ranks_child.py FOLDER RANK COUNT

FOLDER has the base model. Each case leaves RANK.json (metrics, rows) and RANK.safetensors in FOLDER/CASE/COUNT.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from inspect import unwrap
from pathlib import Path
from typing import Any

import models
import self_ac_play
import test_q_critic
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from test_autocast import STAGES

from stages import q_critic, self_ac
from stages.frame.contract import Config, Outputs
from stages.frame.sections import TrainConfig
from stages.learn.adapter import trainable_state
from stages.learn.fit import adamw, fit
from stages.learn.tree_attention import tree_attention
from stages.train.model import deal_out, trainable
from stages.train.passes import mixed_nll, step_passes
from stages.train.rows import TrainRow

ALL = {**STAGES, "q_critic": (q_critic.STAGE, unwrap(test_q_critic.bench), test_q_critic.LATER, {"batch": 8}, "")}
SELF_AC: dict[str, dict[str, Any]] = {
    "self_ac": {"advantage_scale": "batch"},
    "self_ac, two adapters": {"separate": True, "kl_coef": 0.1},
    "self_ac, soft prompt": {"soft_prompt": 2},
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"checkpointing": True},
    # In 16 bits other passes round otherwise; with one row each they are the same ones.
    "autocast, fused": {"kernels": "fused", "autocast": True, "pass_tokens": 1},
    "layers": {"shard": "layers"},
    "layers, checkpointing": {"shard": "layers", "checkpointing": True},
    "layers, autocast, fused": {"shard": "layers", "kernels": "fused", "autocast": True, "pass_tokens": 1},
}


def cases() -> list[tuple[str, str]]:
    """(stage, way); a layer computed again knows one adapter."""
    return [
        (name, way)
        for name in (*ALL, *SELF_AC)
        for way in WAYS
        if not (name == "self_ac, two adapters" and "checkpointing" in way)
    ] + [("self_ac", "stopped and resumed"), ("self_ac", "layers, stopped and resumed")]


class Stopped(Exception):
    pass


@contextmanager
def stopped_after(n: int) -> Iterator[None]:
    """Self-AC ends by an error once the checkpoint of its n-th step is written."""
    module: Any = self_ac
    real = module.save_checkpoint

    def save(path: Path, model: Any, optimiser: Any, history: Any = (), **options: Any) -> None:
        real(path, model, optimiser, history, **options)
        if len(history) == n:
            raise Stopped

    module.save_checkpoint = save
    try:
        yield
    finally:
        module.save_checkpoint = real


def run(name: str, way: str, base: Path, folder: Path) -> Outputs:
    if way.endswith("stopped and resumed"):
        way = way.replace("stopped and resumed", "").strip(", ") or "plain"
        with suppress(Stopped), stopped_after(2):
            run(name, way, base, folder)
    options = dict(WAYS[way])
    shape = {key: options.pop(key) for key in ("kernels",) if key in options}
    train = TrainConfig(shard=options.pop("shard", "none"))
    checkpointing = options.pop("checkpointing", False)
    if name in SELF_AC:
        row_tokens = options.pop("pass_tokens", 200)
        bench = models.Bench(base, folder, shape=shape, train=train, checkpointing=checkpointing)
        self_ac_play.keep_episodes(bench)
        outputs: Outputs = self_ac_play.run(
            bench, epochs=3, row_tokens=row_tokens, checkpoint_every=1, **SELF_AC[name], **options
        )
        return outputs
    stage, filled, inputs, config, _ = ALL[name]
    bench = filled(base, folder)
    bench.shape, bench.train, bench.checkpointing = shape, train, checkpointing
    made: Outputs = bench.run(stage, stage.config(**config, **options), inputs, name="it")
    return made


def steps(base: Path, shard: str) -> dict[str, torch.Tensor]:
    """The gradient of one step, and the weights after 20 steps of AdamW on trees of rows."""
    found = {}
    for what, n in (("gradient", 1), ("weights", 20)):
        bench = models.Bench(base, base.parent, train=TrainConfig.model_validate({"shard": shard}))
        context = bench.context(Config(), {})
        model = models.shake(trainable(context, None), 3, 0.1)
        before = trainable_state(model)
        deal_out(context, model)
        rng = random.Random(0)
        batches: list[Any] = [step_passes({"a": made_up(rng)}, 60, "cpu") for _ in range(n)]
        rates = [p for p in model.parameters() if p.requires_grad]
        optimiser = torch.optim.SGD(rates, lr=1.0) if n == 1 else adamw(model, lr=1e-3)
        with tree_attention(model):
            fit(model, batches, lambda model, step: mixed_nll(model, step)[:2], optimiser, clip=1e9)
        after = trainable_state(model)
        found[what] = torch.cat([(after[k] - (before[k] if n == 1 else 0)).flatten() for k in after])
    return found


def made_up(rng: random.Random) -> list[TrainRow]:
    """Rows of different lengths, of which some begin alike."""
    starts = [[rng.randrange(2, 200) for _ in range(rng.randrange(4, 30))] for _ in range(3)]
    return [TrainRow(rng.choice(starts), [rng.randrange(2, 200) for _ in range(rng.randrange(1, 9))]) for _ in range(8)]


def main(folder: Path, rank: int, count: int) -> None:
    if count > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count)
    for shard in ("none", "layers"):
        save_file(steps(folder / "base", shard), folder / f"steps-{shard}-{count}-{rank}.safetensors")
    for name, way in cases():
        place = folder / name / way / str(count)
        own, shared = place / f"work{rank}", place / "checkpoints"
        own.mkdir(parents=True)
        shared.mkdir(exist_ok=True)
        (own / "checkpoints").symlink_to(shared)
        outputs = run(name, way, folder / "base", own)
        tensors: dict[str, torch.Tensor] = {}
        for kind in ("adapter", "target", "head", "target_head", "critic"):
            if kind in outputs.files:
                [file] = outputs.files[kind].glob("*.safetensors")
                tensors |= {f"{kind}/{key}": value for key, value in load_file(file).items()}
        save_file(tensors, place / f"{rank}.safetensors")
        told = {"metrics": outputs.metrics, "rows": outputs.rows, "curves": outputs.curves}
        (place / f"{rank}.json").write_text(json.dumps(told, default=list))
    if count > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
