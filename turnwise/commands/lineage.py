"""`turnwise lineage RUN`: the stage runs that made it, as text, and with --svg as a drawing."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from flows.book import EXPERIMENT
from flows.lineage import lineage as nodes_of
from flows.lineage import runs_of, svg, text
from flows.registry import STAGES
from flows.report import answer
from flows.rerun import stored_summary
from flows.workspace import find_home, open_workspace
from stages.frame.types import UsageError


def lineage(args: Namespace) -> int:
    """turnwise lineage RUN"""
    out: Path | None = args.svg and args.svg.resolve()  # before the working directory changes
    workspace = open_workspace(find_home(args.home))
    run_id = workspace.tracking.find(args.run)
    experiment = workspace.tracking.experiment(run_id)
    if experiment not in (EXPERIMENT, *STAGES):
        raise UsageError(
            f"{args.run}: wanted a pipeline run or a stage run, found a run of {experiment}. See: turnwise runs"
        )
    pipeline = run_id if experiment == EXPERIMENT else workspace.tracking.tags(run_id).get("pipeline", "")
    wanted = runs_of(stored_summary(workspace, run_id)) if experiment == EXPERIMENT else [run_id]
    if not (nodes := nodes_of(wanted, workspace, pipeline=pipeline)):
        raise UsageError(f"{args.run}: this pipeline run finished no stage, so nothing made it. See: turnwise runs")
    if out:
        try:
            out.write_text(svg(nodes), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--svg: {out} cannot be written ({error.strerror}). Name another file.") from None
    return answer(args, [{**asdict(node), "title": node.title} for node in nodes], text(nodes, pipeline))
