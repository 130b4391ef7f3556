"""Episodes that Self-AC can learn from, and its stage run on them."""

from __future__ import annotations

from typing import Any

import models
import torch
from safetensors.torch import load_file

from stages import self_ac
from stages.frame.contract import Outputs
from stages.frame.types import Outcome
from stages.play.transitions import episode_rows
from stages.train.actor_critic import SelfAcConfig

CHECK, GIVE = ("Thought: t Action: check photo", "photo done."), ("Action: give cash", "cash done.")
CLOSE = ("Action: close phone", "phone done. Mia audits: fail.")
LENGTHS = (3, 1, 2, 3)


def keep_episodes(bench: models.Bench, run_id: str = "collect0", **changes: Any) -> list[Any]:
    """Four episodes of 3, 1, 2 and 3 turns, the second and the last one won, the third one cut short."""
    found = []
    for i, n in enumerate(LENGTHS):
        turns = [CHECK, GIVE, CLOSE][:n]
        outcome = Outcome.TRUNCATED if i == 2 else Outcome.SCORED
        found.append(models.make_episode(bench.engine, f"Ana{i}", turns, outcome, reward=float(i % 2), **changes))
    bench.memory.keep(run_id, Outputs({}, episode_rows(found, 0)))
    return found


def run(bench: models.Bench, inputs: Any = None, name: str = "self_ac0", iteration: int = 0, **config: Any) -> Outputs:
    # The episodes' log-probs are mostly made up, and none of the model's.
    options = SelfAcConfig(**({"max_gap": 1e9} | config))
    return bench.run(self_ac.STAGE, options, inputs or {"collect": ["collect0"]}, name=name, iteration=iteration)


def tensors(bench: models.Bench, name: str = "self_ac0") -> dict[str, torch.Tensor]:
    adapter = load_file(bench.memory.files[name, "adapter"] / "adapter_model.safetensors")
    head = load_file(bench.memory.files[name, "head"] / "value_head.safetensors")
    return {**adapter, **{f"head.{key}": value for key, value in head.items()}}


def row(prompt: list[int], action: list[int], reward: float = 0.0) -> dict[str, Any]:
    """A row of table `turns`, as far as training reads it."""
    return {"prompt_ids": prompt, "action_ids": action, "log_probs": [-0.5] * len(action), "reward": reward}
