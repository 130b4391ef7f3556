"""Finds the weights that a project folder still needs, and those that `turnwise gc` may delete.

docs/explanation/architecture.md has the rule. All other weights can be made again: configs, inputs, rows and metrics
are never deleted. [ours]
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.book import EXPERIMENT
from flows.registry import STAGES, read_weights
from flows.rerun import stored_summary
from stages.frame.contract import POLICY_STAGES
from stages.frame.types import MissingInput
from stages.store.execute import lineage_inputs
from stages.store.runs import STANDS_FOR, RunInfo
from stages.store.workspace import Workspace

LEARNERS = ("critic", "q_critic", *POLICY_STAGES)
"""Stages that leave weights. `pretrain` is not among them: it leaves the base model."""
KEEP = 2
"""By default, this many newest iterations of a pipeline run are kept."""


@dataclass(frozen=True)
class Weights:
    """The weights of one run. files: bytes by artifact path. why: the reason to keep them, "" if there is none."""

    run_id: str
    stage: str
    iteration: int
    pipeline: str  # whose run it is; "" = of none
    files: Mapping[str, int]
    why: str

    @property
    def size_bytes(self) -> int:
        return sum(self.files.values())


def survey(workspace: Workspace, newest: int) -> list[Weights]:
    """All stored weights, by pipeline run, iteration and stage. newest: iterations to keep of each pipeline run."""
    learners = {name: workspace.tracking.runs(name) for name in LEARNERS if name in STAGES}
    needed = kept(workspace, newest, [one for runs in learners.values() for one in runs])
    found = [
        Weights(
            one.run_id, stage, int(one.tags.get("iteration", -1)), one.tags.get("pipeline", ""), files,
            needed.get(one.run_id, "") if one.status == "FINISHED" else "it runs" if one.status == "RUNNING" else "",
        )
        for stage, runs in learners.items()
        for one in runs
        if (files := workspace.tracking.weights(one.run_id))
    ]  # fmt: skip
    return sorted(found, key=lambda w: (w.pipeline, w.iteration, list(STAGES).index(w.stage)))


def kept(workspace: Workspace, newest: int, learners: Sequence[RunInfo]) -> dict[str, str]:
    """Run id -> why the weights of that run are kept."""
    tracking = workspace.tracking
    found = dict.fromkeys(tracking.models.sources(), "a registered model")
    members: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for one in learners:
        if pipeline := one.tags.get("pipeline"):
            members[pipeline][int(one.tags.get("iteration", -1))].add(one.run_id)
    listed: set[str] = set()
    for info in tracking.runs(EXPERIMENT):
        summary, mine = stored_summary(workspace, info.run_id), members[info.run_id]
        for row in summary["iterations"]:
            mine[int(row["iteration"])] |= set(row["runs"].values())
        listed |= {run_id for runs in mine.values() for run_id in runs}
        found |= _of_pipeline(workspace, mine, _chosen(summary), newest)
    for one in tracking.running():
        found |= dict.fromkeys(_read_by(workspace, one), "a run that is running reads them")
    for one in learners:
        if not one.tags.get("pipeline") and one.run_id not in listed:
            found.setdefault(one.run_id, "of no pipeline run")
    for one in learners:  # a stand-in is kept as long as the run whose place it takes
        if original := one.tags.get(STANDS_FOR):
            found.pop(one.run_id, None)
            if original in found:
                found[one.run_id] = found[original]
    return found


def _chosen(summary: Mapping[str, Any]) -> int | None:
    """The iteration whose adapter is evaluated at the end. In an unfinished run it is the best one so far."""
    if summary["final"]:
        return int(summary["final"]["iteration"])
    rows = [row for row in summary["iterations"] if row["iteration"] >= 0 and row.get("win_rate") is not None]
    return int(max(rows, key=lambda row: (row["win_rate"], -row["iteration"]))["iteration"]) if rows else None


def _of_pipeline(workspace: Workspace, mine: Mapping[int, set[str]], chosen: int | None, newest: int) -> dict[str, str]:
    last = sorted(number for number in mine if number >= 0)[-newest:]
    recent = {run_id for number in last for run_id in mine[number]}
    found: dict[str, str] = {}
    for run_id in (one for one in recent if workspace.tracking.is_finished(one)):
        read = read_weights(workspace.tracking.experiment(run_id), _inputs(workspace, run_id))
        found |= dict.fromkeys(read, "a kept iteration reads them")
    if chosen is not None:
        found |= dict.fromkeys(mine.get(chosen, ()), "of the chosen adapter's iteration")
    return found | dict.fromkeys(recent, "of the newest iterations")


def _inputs(workspace: Workspace, run_id: str, tags: Mapping[str, str] = {}) -> dict[str, list[str]]:
    """Upstream stage -> run ids. A run that has just begun has them only in its tag, if they fit there."""
    try:
        return lineage_inputs(workspace, run_id)
    except MissingInput:
        with suppress(json.JSONDecodeError):
            found: dict[str, list[str]] = json.loads(tags.get("inputs", "{}"))
            return found
        return {}


def _read_by(workspace: Workspace, running: RunInfo) -> list[str]:
    return [run_id for runs in _inputs(workspace, running.run_id, running.tags).values() for run_id in runs]


def delete(workspace: Workspace, found: Iterable[Weights]) -> list[Weights]:
    """Delete the weights that are not kept, and return them. Weights that a running run has begun to read stay."""
    tracking = workspace.tracking

    def drop(run_id: str) -> bool:
        return tracking.drop(run_id, lambda: any(run_id in _read_by(workspace, one) for one in tracking.running()))

    return [one for one in found if not one.why and drop(one.run_id)]


def kind_of(path: str) -> str:
    """What a file of weights is: adapter, target, critic, head or moments."""
    return Path(path).parts[0].removesuffix(".safetensors")
