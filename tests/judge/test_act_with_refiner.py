"""Acting with the refiner at run time: what the critic says No to is rewritten before it is taken."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import models
import pytest
from evaluate_play import bench_of
from refine_play import OPTIONS, Seeing, asked

from benchmarks.evidence.act_with_refiner import acting
from stages import evaluate
from stages.evaluate import EvaluateConfig
from stages.frame.types import Request
from stages.llm.scripted import GARBAGE
from stages.refine import RefineConfig

INPUTS = {"critic": ["critic0"]}
ACTING = replace(evaluate.STAGE, run=partial(acting, RefineConfig()))


class Mistaken(Seeing):
    """Wrong in every state; its refiner is right, or writes garbage where it is spoiled."""

    def __call__(self, prompt: str, request: Request) -> str:
        role = models.role_of(prompt)
        if role == "policy":
            return f"Thought: x. Action: {self.action(prompt, 'wrong')}"
        if role == "refiner" and self.better == "garbage":
            return GARBAGE
        return super().__call__(prompt, request)


@pytest.mark.parametrize(
    ("critic", "better", "won"),
    [("truth", "right", 1.0), ("truth", "wrong", 0.0), ("truth", "garbage", 0.0), ("yes", "right", 0.0)],
)
def test_an_action_is_rewritten_where_the_critic_says_no(
    base: Path, tmp_path: Path, critic: str, better: str, won: float
) -> None:
    play = Mistaken(critic=critic, better=better)
    if critic == "yes":
        play.verdict = lambda prompt: "Optimality: Yes. fine."  # type: ignore[method-assign]
    bench = bench_of(base, tmp_path, play)
    assert bench.task.options == OPTIONS
    config = EvaluateConfig(episodes=12, audit_turns=0)
    assert bench.run(evaluate.STAGE, config, INPUTS).metrics["evaluate/win_rate"] == 0
    outputs = bench.run(ACTING, config, INPUTS)
    assert outputs.metrics["evaluate/win_rate"] == won
    said = asked(bench)
    assert ("refiner" in said) == (critic == "truth")
    assert {r.adapter for _, r, _ in said["policy"]} == {None}
    assert {r.adapter for _, r, _ in said["successor"]} == {"critic0-adapter"}


def test_each_state_is_judged_by_what_was_said_in_it(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Mistaken())
    outputs = bench.run(ACTING, EvaluateConfig(episodes=12, audit_turns=0), INPUTS)
    steps = int(outputs.metrics["evaluate/env_steps"])
    assert steps == 36 == len(asked(bench)["policy"]) == len(asked(bench)["evaluator"]) == len(asked(bench)["refiner"])
