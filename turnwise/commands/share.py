"""`turnwise share`: copies a project's finished runs into the store that its `turnwise.toml` names."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import asdict

from flows.keep.share import share as move
from flows.report import Display, answer
from flows.workspace import find_home, open_workspace


def share(args: Namespace) -> int:
    """turnwise share"""
    workspace = open_workspace(find_home(args.home, to_write=True))
    with Display(quiet=args.quiet) as display:
        done = move(workspace, display.bar, lambda text: print(f"turnwise: {text}", file=sys.stderr))
    lines = [f"{run_id[:8]} was not moved: {why}" for run_id, why in done.left_out.items()]
    if done.running:
        lines.append(f"{done.running} runs of {workspace.home / 'mlflow'} have not ended. Then: turnwise share")
    lines.append(
        f"{len(done.new)} runs and {len(done.versions)} versions moved into {workspace.tracking.db}; {done.known} runs were there."
    )
    answer(args, asdict(done), lines)
    return 1 if done.left_out else 0
