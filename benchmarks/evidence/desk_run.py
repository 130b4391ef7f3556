"""A stored run on a desk, as the benchmarks that look into one read it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from flows.rerun import stored_summary
from flows.workspace import find_home, open_workspace
from stages.store.replay import Replay

T = TypeVar("T")


def desk_run(run: str, desk_options: Callable[..., T]) -> tuple[T, list[dict[str, str]], Replay]:
    """The options of its desk as `desk_options` makes them, the stage runs of each iteration by stage, and the replay
    that holds their rows. Raises UsageError for an unknown run.
    """
    workspace = open_workspace(find_home())
    run_id = workspace.tracking.find(run)
    config = json.loads(workspace.tracking.artifact(run_id, "config.json").read_text())
    iterations = [one["runs"] for one in stored_summary(workspace, run_id)["iterations"]]
    return desk_options(**config["task"]["options"]), iterations, workspace.replay
