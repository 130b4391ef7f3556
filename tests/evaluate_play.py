"""A scripted cast for evaluation, on the desk's own rules: planted policies and planted critics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models

from stages import evaluate
from stages.envs import service_desk as desk
from stages.evaluate import EvaluateConfig
from stages.frame.sections import RolesConfig, TaskConfig
from stages.frame.types import Request

OPTIONS = {"requests": 3, "tiers": 2}
INPUTS = {"distill": ["distill0"], "critic": ["critic0"]}


@dataclass
class Play:
    """The policy is right for gold alone, the base policy never. critic: "perfect", "blind" (Yes) or "contrary"."""

    critic: str = "perfect"
    policy: str = "gold"

    def __call__(self, prompt: str, request: Request) -> str:
        role = models.role_of(prompt)
        if role == "policy":
            right = request.adapter == "distill0-adapter" and ("gold" in prompt or self.policy == "all")
            return f"Action: {(models.right_action if right else models.wrong_action)(prompt, OPTIONS)}"
        if role == "successor":
            return self.future(prompt)
        return "Optimality: No. another." if "fail" in prompt else "Optimality: Yes."

    def future(self, prompt: str) -> str:
        """Of this step alone: one wrong step is a lost visit, and no other step of a gold visit is wrong here."""
        state, action = prompt.rsplit("Action: ", 1)
        needed = models.right_action(state, OPTIONS)
        tier, request = models.customer(prompt)
        _, kind, _ = next(step for step in desk.steps_of(desk.Options(**OPTIONS)) if step[0] == needed.split()[0])
        wrong = (action.splitlines()[0] != needed) != (self.critic == "contrary")
        if self.critic == "blind" or not wrong:
            return "Future: then pass."
        return f"Future: then fail. {desk.key_of(kind, request, tier)} may need {needed}."


def bench_of(base: Path, tmp_path: Path, play: Any) -> models.Bench:
    bench = models.Bench(base, tmp_path, engine=models.Recorder(play), task=TaskConfig(options=OPTIONS))
    bench.roles = RolesConfig(max_action_tokens=400, max_future_tokens=400)
    for run_id, folder in (("distill0", "adapter"), ("critic0", "adapter")):
        bench.memory.files[run_id, folder] = tmp_path
    return bench


def run(bench: models.Bench, inputs: Any = INPUTS, **config: Any) -> tuple[dict[str, float], dict[str, list[Any]]]:
    outputs = bench.run(evaluate.STAGE, EvaluateConfig(**({"episodes": 48, "audit_turns": 60} | config)), inputs)
    return dict(outputs.metrics), {table: list(rows) for table, rows in outputs.rows.items()}
