"""Stages that learn nothing but behave like NLAC's: same names, same inputs; they note every call. For tests of the
flows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import Field

from flows import presets, registry
from stages.frame.contract import Config, Context, Outputs, Stage
from stages.frame.types import Row

POLICIES = ("distill", "rft", "grpo", "sdpo")
INPUTS = {
    "collect": POLICIES,
    "targets": ("collect", "critic", "distill"),
    "critic": ("targets", "collect", "refine", "pick", "distill", "critic"),
    "refine": ("collect", "critic", "distill"),
    "q_critic": ("collect", "q_critic", "pick", "distill"),
    "pick": ("collect", "critic", "q_critic", "distill"),
    "distill": ("refine", "pick", "targets", "critic", "q_critic", "distill"),
    "rft": ("collect", "rft"),
    "grpo": ("collect", "grpo"),
    "sdpo": ("collect", "sdpo"),
    "evaluate": (*POLICIES, "critic", "q_critic"),
}
WEIGHTS = "adapter_model.safetensors"
MAKE_ADAPTERS = ("critic", "q_critic", "distill", "rft", "grpo", "sdpo")


class FakeConfig(Config):
    lr: float = 0.1
    split: str = "validation"
    test_options: dict[str, Any] = Field(default_factory=dict)
    episodes: int = 8
    lag: int = 0


@dataclass
class Stages:
    """What was called, and what is to happen. win_rates: validation win rate by iteration, -1 the base model's. won: by
    the scenario's number, of the policy that an evaluation reads; the rows of `episodes` are left out without it.
    """

    calls: list[tuple[str, int]] = field(default_factory=list)
    inputs: dict[tuple[str, int], dict[str, list[str]]] = field(default_factory=dict)
    splits: list[tuple[str, int]] = field(default_factory=list)
    win_rates: dict[int, float] = field(default_factory=lambda: {-1: 0.1, 0: 0.3, 1: 0.5, 2: 0.5})
    won: Callable[[str | None, int], bool] | None = None
    raises: dict[tuple[str, int], BaseException] = field(default_factory=dict)

    def run(self, name: str, context: Context) -> Outputs:
        if error := self.raises.pop((name, context.iteration), None):
            raise error
        self.calls.append((name, context.iteration))
        self.inputs[name, context.iteration] = {key: list(runs) for key, runs in context.inputs.items()}
        read = [
            (context.artifact(run_id, "adapter") / WEIGHTS).read_text()
            for run_id in registry.read_weights(name, context.inputs)
        ]
        files = {}
        if name in MAKE_ADAPTERS:
            (context.workdir / "adapter").mkdir()
            (context.workdir / "adapter" / "weights").write_text(f"{name} {context.iteration} {context.config.lr}")
            (context.workdir / "adapter" / WEIGHTS).write_text(
                f"{name} {context.iteration} {context.config.lr} after {read}"
            )
            files["adapter"] = context.workdir / "adapter"
        if name == "evaluate":
            self.splits.append((context.config.split, context.iteration))
            rate = self.win_rates[context.iteration]
            metrics = {"evaluate/win_rate": rate, "evaluate/win_low": rate - 0.1, "evaluate/win_high": rate + 0.1}
            metrics["evaluate/return"] = rate  # a win pays 1, and nothing else does
            return Outputs(metrics, self.episodes(context))
        return Outputs({f"{name}/episodes": 4.0, f"{name}/lr": context.config.lr}, files=files)

    def episodes(self, context: Context) -> dict[str, Sequence[Row]]:
        if self.won is None:
            return {}
        policy = context.latest("rft")
        rows = []
        for i in range(context.config.episodes):
            row = {
                "episode_id": f"e{i}", "iteration": 0, "task": "t", "split": "s", "scenario_id": str(i), "scenario": {}, "adapter": None,
                "outcome": "scored", "total_reward": float(self.won(policy, i)), "n_turns": 1, "n_malformed": 0, "attempts": 1,
                "seconds": 0.0, "n_tokens": 1, "error": "", "messages": [],
            }  # fmt: skip
            rows.append(row)
        return {"episodes": rows}


@contextmanager
def fake_stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stages]:
    """Put the fakes in place of the real stages."""
    stages = Stages()
    for name, inputs in INPUTS.items():

        def run(context: Context, name: str = name) -> Outputs:
            return stages.run(name, context)

        module: Any = SimpleNamespace(
            STAGE=Stage(name, 1, FakeConfig, inputs=inputs, roles=(), run=run), __doc__=f"The fake {name}."
        )
        monkeypatch.setitem(sys.modules, f"fake_{name}", module)
    # In place: a module that is imported meanwhile, and keeps the table, has the real one afterwards.
    real = dict(registry.STAGES)
    _fill(registry.STAGES, {name: f"fake_{name}" for name in INPUTS})
    presets.run_config.cache_clear()
    try:
        yield stages
    finally:
        _fill(registry.STAGES, real)
        presets.run_config.cache_clear()


def _fill(table: dict[str, str], values: dict[str, str]) -> None:
    table.clear()
    table.update(values)
