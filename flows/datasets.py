"""The data that a run reads: the task's splits, each with its size and a hash of its content; and whether it exists."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from flows.presets import RunConfig
from flows.registry import METHODS
from flows.shipped import bring
from stages import envs
from stages.frame.types import UsageError
from stages.store.runs import ScenarioSet


def splits(run: RunConfig) -> dict[str, dict[str, Any]]:
    """Split -> the task's options on it: the splits of collecting, of the curve, and of the test."""
    config: Any = run  # with the sections of the stages
    names = dict.fromkeys((config.collect.split, config.evaluate.split, "test"))
    return {name: {**run.task.options, **(config.evaluate.test_options if name == "test" else {})} for name in names}


def scenario_sets(run: RunConfig) -> list[ScenarioSet]:
    """The whole set of each split; a run draws from it by its seed. So the digest depends only on the data. Raises
    UsageError where data is missing.
    """
    config: Any = run
    roles = {"test": "test", config.evaluate.split: "validation", config.collect.split: "train"}
    return [_scenario_set(run.task.env, split, options, roles[split]) for split, options in splits(run).items()]


def _scenario_set(env: str, split: str, options: dict[str, Any], role: str) -> ScenarioSet:
    found = envs.scenarios(env, options, split, None, 0)
    content = sorted(json.dumps([one.id, one.data], sort_keys=True, default=str) for one in found)
    digest = hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]
    source = {"env": env, "split": split, "options": json.dumps(options, sort_keys=True)}
    return ScenarioSet(role, f"{env} {split}", digest, len(found), source)


def check_data(run: RunConfig) -> None:
    """Raises UsageError where data of a split or the general rows are missing. Otherwise the run would fail after it
    loaded a model, or hours later.
    """
    for told in missing_rows(run):
        raise UsageError(told)
    check_splits(run)


def check_splits(run: RunConfig) -> None:
    """Raises UsageError where the task's data is missing for a split that the run needs."""
    for split, options in splits(run).items():
        envs.scenarios(run.task.env, options, split, 1, run.seed)


def missing_rows(run: RunConfig) -> list[str]:
    """One message for each stage of the run whose general rows are missing."""
    found = []
    for stage, path in general_rows(run).items():
        bring(path)
        if not Path(path).is_file():
            found.append(
                f"{stage}.general_path: wanted a JSONL file of general instruction rows at {path!r}, found none. Put one there, with lines of "
                f'{{"role", "messages", "reply"}}. Or mix none: --set {stage}.general_rows=0'
            )
    return found


def general_rows(run: RunConfig) -> dict[str, str]:
    """Stage -> its file of general rows, of those that mix some in."""
    configs = {stage: getattr(run, stage) for stage in METHODS[run.method]}
    return {stage: one.general_path for stage, one in configs.items() if getattr(one, "general_rows", 0)}
