"""`turnwise traces RUN`: writes some of a run's episodes for MLflow's page of traces, with turns, replies, verdicts and rewrites."""

from __future__ import annotations

from argparse import Namespace

from flows.look.traces import traces as spans
from flows.look.view.page import check_pipeline
from flows.report import answer
from flows.workspace import find_home, open_workspace
from stages.frame.types import UsageError


def traces(args: Namespace) -> int:
    """turnwise traces RUN"""
    if args.episodes < 1:
        raise UsageError(f"--episodes {args.episodes}: wanted 1 or more.")
    workspace = open_workspace(find_home(args.home, to_write=True))
    run_id = workspace.tracking.find(args.run)
    check_pipeline(workspace, run_id, "traces")
    found = spans(workspace, run_id, args.episodes)
    made = workspace.tracking.trace(run_id, found)
    there = f", {len(found) - made} were there" if made < len(found) else ""
    told = f"{made} episodes of run {run_id[:8]} are traces now{there}. Look: turnwise ui, the experiment pipeline, Traces."
    return answer(args, {"run_id": run_id, "episodes": len(found), "new": made}, [told])
