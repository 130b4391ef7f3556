"""The base model of the wide desk: its roles hold at every size, and it knows no rule."""

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
from stages.corpora import wide
from stages.corpora.tokenizers import word_tokenizer
from stages.evaluate import EvaluateConfig
from stages.frame.sections import RolesConfig, TaskConfig
from stages.llm.hf import HfEngine
from stages.llm.roles import load_roles

BASE = Path(__file__).parent.parent / "data" / "base_wide"
pytestmark = pytest.mark.skipif(not BASE.is_dir(), reason="the base model has not been made: turnwise pretrain")


@pytest.fixture(scope="module")
def engine() -> HfEngine:
    return HfEngine(str(BASE))


def test_it_knows_its_roles_as_its_card_says(engine: HfEngine) -> None:
    """Of 20 held-out prompts a role at least 19, greedily; a model that has learned nothing has 0."""
    found = answered(engine, BASE, wide.SHARE)
    right = Counter(row["role"] for row, reply in found if wide.right(row, reply)[row["role"]])
    assert all(right[role] >= 19 for role in wide.SHARE), right


@pytest.mark.parametrize(("slots", "values"), [(1, 3), (2, 3), (3, 3), (4, 3), (5, 3), (4, 5)])
def test_it_acts_readably_at_every_size_and_knows_no_slot_better_than_chance(
    engine: HfEngine, tmp_path: Path, slots: int, values: int
) -> None:
    """96 visits, 192 steps: 1 slot in v is right. Its own habits make some values likelier, so the bounds are wide."""
    task = TaskConfig(env="wide_desk", options={"slots": slots, "values": values})
    bench = models.Bench(
        BASE, tmp_path, engine=engine, task=task, roles=RolesConfig(prompts="wide_desk", max_action_tokens=24)
    )
    metrics = bench.run(evaluate.STAGE, EvaluateConfig(episodes=96, audit_turns=0), {}).metrics
    assert metrics["evaluate/malformed_frac"] < 0.02
    assert abs(metrics["evaluate/wide_desk/slots_right"] - 1 / values) < 0.12
    assert metrics["evaluate/win_rate"] < 3.5 / values ** (2 * slots) + 0.05


def test_its_weights_are_small_enough_to_ship() -> None:
    assert sum(file.stat().st_size for file in BASE.iterdir()) < 6_000_000
    assert not [file.name for file in BASE.iterdir() if file.suffix in (".bin", ".pt", ".pkl")]


def test_the_shipped_tokenizer_is_the_one_of_the_corpus() -> None:
    """So the prompts that the model was made with are those of today: a changed word of a prompt wants a new model."""
    made = word_tokenizer(wide.words(load_roles("wide_desk")))
    shipped = json.loads((BASE / "tokenizer.json").read_text())["model"]
    assert shipped == json.loads(made.backend_tokenizer.to_str())["model"]


def test_the_arms_on_the_wide_desk_play_the_same_visits() -> None:
    demo: Any = presets.load("wide")
    for name in ("wide+rft", "wide+rft_relabel", "wide+nlac_no_critique"):
        run: Any = presets.load(name)
        assert (run.iterations, run.collect, run.task, run.model) == (10, demo.collect, demo.task, demo.model), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "more"),
    [
        ("wide", {}),
        ("wide", {"task.options.slots": 5, "task.options.audit": "slot"}),
        ("wide+rft_relabel", {"task.options.audit": "answer"}),
        ("wide+grpo", {}),
        ("wide+nlql", {"task.options.audit": "verdict"}),
    ],
)
def test_a_whole_loop_on_the_shipped_model(
    preset: str, more: dict[str, Any], home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every stage reads what the one before it left; of NLAC nearly every target and refinement can be read."""
    monkeypatch.chdir(home)
    small = {
        "iterations": 1, "collect.first_episodes": 32, "targets.transitions": 24, "refine.states": 24, "pick.states": 8,
        "evaluate.episodes": 12, "evaluate.audit_turns": 8, "model.lora_rank": 4,
    }  # fmt: skip
    found = looped(preset, BASE, home, capsys, {**small, **more})
    assert found["collect/malformed_frac"] < 0.05
    if presets.load(preset).method == "nlac":
        assert found["targets/dropped"] <= 2 and found["refine/rows"] >= 16
