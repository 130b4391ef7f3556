"""Which scenarios a run reads: the splits with their options, and each as a set with its size and a hash of its
content.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from stages import envs
from stages.store.runs import ScenarioSet

if TYPE_CHECKING:
    from flows.presets import RunConfig


def splits(run: RunConfig) -> dict[str, dict[str, Any]]:
    """Split -> the task's options on it: the splits of collecting, of the curve, and of the test."""
    config: Any = run  # with the sections of the stages
    names = dict.fromkeys((config.collect.split, config.evaluate.split, "test"))
    return {name: {**run.task.options, **(config.evaluate.test_options if name == "test" else {})} for name in names}


def scenario_sets(run: RunConfig) -> list[ScenarioSet]:
    """The set of each split, whole: a run draws from it by its seed. So the digest tells of the data alone. Raises
    UsageError where data is not there.
    """
    config: Any = run
    roles = {"test": "test", config.evaluate.split: "validation", config.collect.split: "train"}
    return [_scenario_set(run.task.env, split, options, roles[split]) for split, options in splits(run).items()]


def _scenario_set(env: str, split: str, options: dict[str, Any], role: str) -> ScenarioSet:
    found = envs.scenarios(env, options, split, None, 0)
    content = sorted(json.dumps([one.id, one.data], sort_keys=True, default=str) for one in found)
    digest = hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]
    return ScenarioSet(
        role,
        f"{env} {split}",
        digest,
        len(found),
        {"env": env, "split": split, "options": json.dumps(options, sort_keys=True)},
    )
