"""A fingerprint changes exactly when something that can change the result does."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from pydantic import Field
from toys import ToyConfig, ToyRun

from stages.frame.contract import Config, Outputs, Stage, fingerprint, ingredients
from stages.store.execute import stage_fingerprint
from stages.store.stage_context import stage_seed
from stages.store.workspace import Workspace


class CriticConfig(Config):
    lr: float = Field(1e-4, description="Learning rate.")
    layers: dict[str, int] = Field({"a": 1, "b": 2})


class DescribedConfig(Config):
    lr: float = Field(1e-4, description="Learning rate, told in other words.")
    layers: dict[str, int] = Field({"b": 2, "a": 1})


STAGE = Stage(
    "critic",
    1,
    CriticConfig,
    inputs=("targets", "collect"),
    roles=("policy", "successor"),
    run=lambda context: Outputs({}),
    shared=("task",),
)
PARTS: dict[str, Any] = {
    "stage": STAGE,
    "config": CriticConfig(),
    "shared": {"task": {"env": "desk", "max_turns": 8}},
    "seed": 0,
    "iteration": 3,
    "prompt_hashes": {"policy": "p1", "successor": "s1"},
    "model_hash": "m1",
    "inputs": {"targets": ["t1"], "collect": ["c1", "c2"]},
}


def of(**changes: Any) -> str:
    parts = PARTS | changes
    return fingerprint(ingredients(parts.pop("stage"), parts.pop("config"), **parts))


def _name(change: dict[str, Any]) -> str:
    """Name of a test, the same in every process: a stage's functions are written with their addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(change))


@pytest.mark.parametrize(
    "change",
    [
        {"stage": replace(STAGE, name="critic2")},
        {"stage": replace(STAGE, version=2)},
        {"config": CriticConfig(lr=2e-4)},
        {"config": CriticConfig(layers={"a": 1, "b": 3})},
        {"shared": {"task": {"env": "desk", "max_turns": 9}}},
        {"seed": 1},
        {"iteration": 4},
        {"prompt_hashes": {"policy": "p2", "successor": "s1"}},
        {"prompt_hashes": {"policy": "s1", "successor": "p1"}},
        {"model_hash": "m2"},
        {"inputs": {"targets": ["t2"], "collect": ["c1", "c2"]}},
        {"inputs": {"targets": ["t1"], "collect": ["c1"]}},
        {"inputs": {"targets": ["t1"], "collect": ["c2", "c1"]}},  # the newest input is the last one
        {"inputs": {"targets": ["c1", "c2"], "collect": ["t1"]}},
        {"inputs": {"targets": ["t1"]}},
    ],
    ids=_name,
)
def test_what_can_change_the_result_changes_the_fingerprint(change: dict[str, Any]) -> None:
    assert of(**change) != of()


@pytest.mark.parametrize(
    "change",
    [
        {"config": CriticConfig(layers={"b": 2, "a": 1})},
        {"config": DescribedConfig()},
        {"config": CriticConfig(lr=0.0001)},
        {"shared": {"task": {"max_turns": 8, "env": "desk"}}},
        {"shared": {"roles": {"prompts": "elsewhere"}, "task": {"env": "desk", "max_turns": 8}}},
        {"prompt_hashes": {"successor": "s1", "refiner": "r1", "policy": "p1"}},
        {"inputs": {"collect": ("c1", "c2"), "targets": ["t1"]}},
        {"stage": replace(STAGE, outputs=("priorities",))},
    ],
    ids=_name,
)
def test_what_cannot_change_the_result_leaves_the_fingerprint(change: dict[str, Any]) -> None:
    assert of(**change) == of()


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    """Written down once: if it moves, every stored run is made again, so that must be meant."""
    assert of() == "f7e31c09fa62315eac723accd1ce182653df7d1329bc4ec8ccee3490ba9ff0f9"


def test_the_config_of_another_stage_leaves_the_fingerprint(workspace: Workspace) -> None:
    stage = Stage("double", 1, ToyConfig, inputs=("source",), roles=(), run=lambda context: Outputs({}))

    def of_run(run: ToyRun) -> str:
        return stage_fingerprint(stage, run=run, inputs={"source": ["s1"]}, iteration=0, workspace=workspace)

    same, other = ToyConfig(scale=2.0), ToyRun()
    assert of_run(ToyRun(source=same, total=same)) == of_run(other)
    assert of_run(ToyRun(double=same)) != of_run(other)
    task = other.task.model_copy(update={"max_turns": 3})
    assert of_run(ToyRun(task=task)) != of_run(other)
    assert stage_fingerprint(
        replace(stage, shared=("model",)), run=ToyRun(task=task), inputs={}, iteration=0, workspace=workspace
    ) == stage_fingerprint(replace(stage, shared=("model",)), run=other, inputs={}, iteration=0, workspace=workspace)


def test_an_upstream_stage_without_runs_is_no_input(workspace: Workspace) -> None:
    stage = Stage("double", 1, ToyConfig, inputs=("source",), roles=(), run=lambda context: Outputs({}))
    choices: tuple[dict[str, list[str]], ...] = ({}, {"source": []})
    made = [
        stage_fingerprint(stage, run=ToyRun(), inputs=inputs, iteration=0, workspace=workspace) for inputs in choices
    ]
    assert made[0] == made[1]


def test_the_seed_of_a_stage_depends_on_run_seed_stage_and_iteration_only() -> None:
    seeds = {
        stage_seed(seed, stage, iteration)
        for seed in range(5)
        for stage in ("collect", "critic")
        for iteration in range(-1, 10)
    }
    assert len(seeds) == 5 * 2 * 11
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert stage_seed(0, "collect", 0) == 133218374


def test_how_long_a_server_is_waited_for_and_by_how_many_leaves_the_fingerprint(workspace: Workspace) -> None:
    from flows import presets
    from flows.registry import load_stage

    stage = replace(load_stage("collect"), roles=())
    one, patient, other = (
        presets.load("tiny", sets)
        for sets in (
            (),
            ("model.timeout_s=5", "task.oracle_timeout_s=7", "model.concurrency=9"),
            ("model.dtype=bfloat16",),
        )
    )
    keys = [
        stage_fingerprint(stage, run=run, inputs={}, iteration=0, workspace=workspace) for run in (one, patient, other)
    ]
    assert keys[0] == keys[1] != keys[2]
