"""What the environment could not read is not learned, bootstrapped from or judged, but dropped and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tau_small
from models import Bench, Recorder, words_of

from stages import collect, envs, evaluate, refine, targets
from stages.collect import CollectConfig
from stages.evaluate import EvaluateConfig
from stages.frame.sections import RolesConfig, TaskConfig
from stages.frame.types import Request, TurnwiseError
from stages.play import played
from stages.refine import RefineConfig
from stages.targets import TargetsConfig

ASIDE = "Step aside from the conversation above."
THINK = '{"name": "think", "arguments": {"thought": "hm"}}'
BAD = {
    "broken JSON": '{"name": "think", "arguments": {"thought": "hm"}',
    "no arguments": '{"name": "return_items"}',
    "an unknown tool": '{"name": "return_items", "arguments": {}}',
}


class Cast:
    """Roles of tau_bench by the last message's first words. `fresh`, `better`, `base`: actions of three policies."""

    def __init__(self, fresh: str = THINK, better: str = THINK, base: str = THINK) -> None:
        self.fresh, self.better, self.base = fresh, better, base

    def __call__(self, prompt: str, request: Request) -> str:
        words = words_of(prompt)
        if not words.startswith(ASIDE):
            return f"Thought: t\nAction: {self.fresh if request.adapter else self.base}"
        head = words.removeprefix(ASIDE).split(maxsplit=1)[0]
        if head == "Judge":
            return "Optimality: No. look it up."
        if head == "Improve":
            return f"Thought: t\nAction: {self.better}"
        if head == "Rewrite":
            return words.rsplit("Text:\n", 1)[1]
        return "Future: the case is lost."


@pytest.fixture
def bench(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Two collected episodes of a policy that thinks, on the shop in miniature, whose customer talks by rule."""
    path = tau_small.write(tmp_path / "data")
    bench = Bench(
        base, tmp_path, engine=Recorder(Cast()), task=TaskConfig(env="tau_bench", options={"path": path}, max_turns=4)
    )
    bench.roles = RolesConfig(prompts="tau_bench", max_action_tokens=2000, max_future_tokens=2000)
    monkeypatch.setattr(
        played, "environment", lambda c: envs.make_env(c.run.task.env, c.run.task.options, tau_small.customer)
    )
    for run_id, folder in (("critic0", "adapter"), ("distill0", "target"), ("distill0", "adapter")):
        bench.memory.files[run_id, folder] = tmp_path
    bench.run(collect.STAGE, CollectConfig(episodes=2, first_episodes=2), {}, name="collect0")
    return bench


def cast(bench: Bench, **actions: str) -> None:
    engine: Any = bench.engine
    engine._reply = Cast(**actions)


INPUTS = {"collect": ["collect0"], "critic": ["critic0"], "distill": ["distill0"]}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("whose", ["fresh", "better"])
def test_refine_teaches_no_action_that_the_environment_cannot_read(bench: Bench, kind: str, whose: str) -> None:
    cast(bench, **{whose: BAD[kind]})
    outputs = bench.run(refine.STAGE, RefineConfig(states=6), INPUTS)
    assert list(outputs.rows["targets"]) == []
    assert outputs.metrics["refine/unreadable"] == outputs.metrics["refine/dropped"] == 6
    assert {row["info"]["dropped"] for row in outputs.rows["judgements"]} == {"unreadable action"}
    cast(bench)
    outputs = bench.run(refine.STAGE, RefineConfig(states=6), INPUTS)
    assert outputs.metrics["refine/unreadable"] == 0 and len(outputs.rows["targets"]) == 6


@pytest.mark.parametrize("kind", BAD)
def test_targets_bootstraps_from_no_action_that_the_environment_cannot_read(bench: Bench, kind: str) -> None:
    cast(bench, fresh=BAD[kind])
    with pytest.raises(TurnwiseError, match=r"no reply could be read \(next action: 8"):
        bench.run(targets.STAGE, TargetsConfig(transitions=8), INPUTS)
    cast(bench)
    outputs = bench.run(targets.STAGE, TargetsConfig(transitions=8), INPUTS)
    assert outputs.metrics["targets/unreadable"] == 0 and len(outputs.rows["targets"]) == 8


@pytest.mark.parametrize("kind", BAD)
def test_the_audit_judges_no_action_that_the_environment_cannot_read(bench: Bench, kind: str) -> None:
    cast(bench, base=BAD[kind])
    outputs = bench.run(evaluate.STAGE, EvaluateConfig(episodes=2, split="train", audit_turns=5), INPUTS)
    assert outputs.metrics["audit/unreadable"] == 5
    assert [row["info"]["own"] for row in outputs.rows["judgements"]] == [True] * 5
    cast(bench)
    outputs = bench.run(evaluate.STAGE, EvaluateConfig(episodes=2, split="train", audit_turns=5), INPUTS)
    assert outputs.metrics["audit/unreadable"] == 0 and len(outputs.rows["judgements"]) == 10
