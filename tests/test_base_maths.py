"""The base model of arithmetic: it knows its roles and about how large a result is, and not which one is right."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import models
import pytest
from probes import answered, looped

from flows import presets
from stages import evaluate
from stages.corpora import maths
from stages.corpora.tokenizers import word_tokenizer
from stages.evaluate import EvaluateConfig
from stages.frame.sections import RolesConfig, TaskConfig
from stages.llm.hf import HfEngine
from stages.llm.roles import load_roles

BASE = Path(__file__).parent.parent / "data" / "base_maths"
PRESETS = [name for name in presets.names() if name.startswith("sums")]


@pytest.fixture(scope="module")
def engine() -> HfEngine:
    return HfEngine(str(BASE))


def test_it_knows_its_roles_as_its_card_says(engine: HfEngine) -> None:
    """Of 20 held-out prompts a role at least 18, greedily, of the corrector 16, and of the refiner 10, which often tries
    again what it was told may be wrong; a model that has learned nothing has 0.
    """
    found = answered(engine, BASE, maths.SHARE)
    right = Counter(row["role"] for row, reply in found if maths.right(row, reply)[row["role"]])
    least = dict.fromkeys(maths.SHARE, 18) | {"corrector": 16, "refiner": 10}
    assert all(right[role] >= least[role] for role in least), right


@pytest.mark.parametrize("by", ["reply", "step"])
def test_it_acts_readably_and_slips_in_two_results_of_three(engine: HfEngine, tmp_path: Path, by: str) -> None:
    """192 problems, 576 results: a third right is expected, with slips that cancel out about a quarter of the answers.

    Its own habits make some numbers likelier than others, so the bounds are wide; a solver that can do sums has 1.
    """
    task = TaskConfig(env="sums", options={"by": by})
    bench = models.Bench(
        BASE, tmp_path, engine=engine, task=task, roles=RolesConfig(prompts="maths", max_action_tokens=32)
    )
    metrics = bench.run(evaluate.STAGE, EvaluateConfig(episodes=192, audit_turns=0), {}).metrics
    assert metrics["evaluate/malformed_frac"] < 0.02
    assert 0.25 < metrics["evaluate/sums/steps_right"] < 0.45
    assert 0.1 < metrics["evaluate/win_rate"] < 0.4


def test_its_weights_are_small_enough_to_ship() -> None:
    assert sum(file.stat().st_size for file in BASE.iterdir()) < 3_000_000
    assert not [file.name for file in BASE.iterdir() if file.suffix in (".bin", ".pt", ".pkl")]


def test_the_shipped_tokenizer_is_the_one_of_the_corpus() -> None:
    """So the prompts that the model was made with are those of today: a changed word of a prompt wants a new model."""
    made = word_tokenizer(maths.words(load_roles("maths")))
    shipped = json.loads((BASE / "tokenizer.json").read_text())["model"]
    assert shipped == json.loads(made.backend_tokenizer.to_str())["model"]


def test_the_baselines_play_as_many_problems_of_the_same_kind() -> None:
    demo: Any = presets.load("sums")
    for name in PRESETS:
        run: Any = presets.load(name)
        assert (run.iterations, run.collect.first_episodes, run.collect.episodes) == (6, 384, 192), name
        assert run.task.options["by"] == "reply" and (run.task.env, run.model, run.roles) == (
            "sums",
            demo.model,
            demo.roles,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "by"),
    [
        ("sums", "reply"),
        ("sums", "step"),
        ("sums_told+rft_relabel", "reply"),
        ("sums+ppo", "step"),
        ("sums+sac", "step"),
        ("sums+nlrl", "reply"),
        ("sums+nlql", "step"),
        ("sums+hindsight", "reply"),
    ],
)
def test_a_whole_loop_on_the_shipped_model(
    preset: str, by: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every stage reads what the one before it left; of NLAC nearly every target and refinement can be read, where an
    untrained model's are all dropped.
    """
    monkeypatch.chdir(home)
    small = {
        "iterations": 1, "collect.first_episodes": 32, "targets.transitions": 24, "refine.states": 24, "pick.states": 8,
        "q_critic.transitions": 24, "evaluate.episodes": 12, "evaluate.audit_turns": 8, "model.lora_rank": 4, "task.options.by": by,
    }  # fmt: skip
    found = looped(preset, BASE, home, capsys, small)
    assert found["collect/malformed_frac"] < 0.05
    if presets.load(preset).method == "nlac":
        assert found["targets/dropped"] <= 2 and found["refine/rows"] >= 20
