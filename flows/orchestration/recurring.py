"""What a deployment's next run of a preset is, so that a schedule does work: an unchanged preset would be reused whole.

The answer is a list of `--set` changes: the run that a schedule made can be made again on the command line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from flows import presets
from flows.book import EXPERIMENT

if TYPE_CHECKING:
    from stages.store.workspace import Workspace

TIMES = ("iterations", "cron", "each_run")  # say how much and when, and nothing of what a run is


def next_sets(
    preset: str, sets: Sequence[str], each_run: presets.EachRun, due: datetime, workspace: Workspace
) -> list[str]:
    """The changes of a run that fell due at `due`: `sets`, and what `each_run` adds to them.

    new_seed: the due time in Unix seconds as seed, unless `sets` name one. further: as many iterations again as the
    preset has, on top of those of the longest finished run that differs in nothing else. force: nothing; the caller
    forces the run.
    """
    named = {item.partition("=")[0].strip() for item in sets}
    if each_run == "new_seed" and "seed" not in named:
        return [*sets, f"seed={int(due.timestamp())}"]
    if each_run == "further":
        run = presets.load(preset, sets)
        return [*sets, f"iterations={_finished_iterations(run, workspace) + run.iterations}"]
    return list(sets)


def _finished_iterations(run: presets.RunConfig, workspace: Workspace) -> int:
    """Iterations of the longest finished pipeline run of this config; 0 where there is none."""
    wanted = _timeless(run.model_dump(mode="json"))
    found = [0]
    for info in workspace.tracking.runs(EXPERIMENT, 1000):
        if info.status == "FINISHED" and info.tags.get("preset") == run.preset:
            stored = json.loads(workspace.tracking.artifact(info.run_id, "config.json").read_text(encoding="utf-8"))
            if _timeless(stored) == wanted:
                found.append(int(stored["iterations"]))
    return max(found)


def _timeless(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in TIMES}
