"""The commands that run something: run, plan, rerun, explain, study, claims, pretrain."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from turnwise.arguments.command import add_run_options, add_set, command

STAGE_NAMES = "collect, targets, critic, refine, distill, evaluate, ..."


def add(commands: Any) -> None:
    """Add them to the commands."""
    run = command(
        commands,
        "run",
        "Run a preset: every stage, over its iterations; finished stages are reused.",
        "turnwise run demo --set seed=1",
    )
    run.add_argument(
        "preset", metavar="PRESET", help="name of a preset (demo, tiny, ...), or a path that ends in .toml"
    )
    add_set(run)
    many = "so many seeds, from the preset's on; they and each list of values in --set make a sweep, all combinations of them"
    run.add_argument("--seeds", type=int, metavar="N", help=many)
    run.add_argument(
        "--jobs", type=int, metavar="N", help="of a sweep: runs at once (default: one a core; one on a GPU)"
    )
    due = "the run that the preset's schedule would have made then, as its key `each_run` says; a time like 2026-11-22T03:00"
    run.add_argument("--due", metavar="TIME", help=due)
    add_run_options(run)
    what = "Estimate a run before it runs: steps, tokens, memory and hours of every stage, disk, and whether it fits."
    plan = command(commands, "plan", what, "turnwise plan demo --device h100", module="turnwise.commands.plan")
    plan.add_argument("preset", metavar="PRESET", help="name of a preset, or a path that ends in .toml")
    add_set(plan)
    plan.add_argument(
        "--device",
        default="h100",
        metavar="NAME",
        help="a100, a100-40, b200, h100, h20, h200, l40s or rtx4090 (default: h100)",
    )
    plan.add_argument("--devices", type=int, default=1, metavar="N", help="how many of them (default: 1)")
    plan.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="what only a run can tell, like turns=10 (repeatable)",
    )
    what = "Run one stage again from its stored inputs; with what follows it, as a pipeline run of its own."
    rerun = command(commands, "rerun", what, "turnwise rerun critic --of 3f9c --set critic.lr=1e-4 --through evaluate")
    rerun.add_argument("stage", metavar="STAGE", help=STAGE_NAMES)
    rerun.add_argument(
        "--of", metavar="RUN", required=True, help="pipeline run, or run of the stage; the start of its id is enough"
    )
    rerun.add_argument(
        "--iteration", type=int, metavar="N", help="of a pipeline run: this iteration instead of the last"
    )
    extent = rerun.add_mutually_exclusive_group()
    extent.add_argument(
        "--through",
        metavar="LAST",
        help="run what follows in the same iteration, too, up to this stage, as in --through evaluate",
    )
    extent.add_argument("--downstream", action="store_true", help="run all that follows, later iterations included")
    add_set(rerun)
    add_run_options(rerun)
    what = "Say whether a stage would run again or be reused, field by field, and how it differs from the nearest finished run."
    explain = command(
        commands,
        "explain",
        what,
        "turnwise explain critic --of 3f9c --set critic.lr=1e-4",
        module="turnwise.commands.explain",
    )
    explain.add_argument("stage", metavar="STAGE", help=STAGE_NAMES)
    explain.add_argument(
        "--of", metavar="RUN", required=True, help="pipeline run, or run of the stage; the start of its id is enough"
    )
    explain.add_argument(
        "--iteration", type=int, metavar="N", help="of a pipeline run: this iteration instead of the last"
    )
    add_set(explain)
    what = "Run methods over tasks and seeds, tuned alike, and report them with intervals; finished runs are reused."
    study = command(
        commands, "study", what, "turnwise study studies/ladder.toml --jobs 2", module="turnwise.commands.study"
    )
    study.add_argument("file", metavar="FILE", type=Path, help="the study, a TOML file such as studies/ladder.toml")
    jobs = "runs at once (default: one a core; one on a GPU); 0 reports what is finished and runs nothing"
    study.add_argument("--jobs", type=int, metavar="N", help=jobs)
    only = "run these only, and what they are tuned by, by names or patterns of them (repeatable); all that is finished is reported"
    study.add_argument("--only", action="append", default=[], metavar="METHOD/TASK", help=only)
    _add_rows(study, "")
    study.add_argument(
        "--out", type=Path, metavar="FOLDER", help="also write report.html, table.md, the curves and the rows there"
    )
    study.add_argument("--plain", action="store_true", help="without Prefect")
    study.add_argument("--dry-run", action="store_true", help="list the runs with their state, and stop")
    what = "Put the sources' claims to the test: what was seen, its control, and whether each holds; finished runs are reused."
    claims = command(commands, "claims", what, "turnwise claims --jobs 2", module="turnwise.commands.claims")
    claims.add_argument("--jobs", type=int, metavar="N", help="runs at once (default: one a core; one on a GPU)")
    claims.add_argument(
        "--only", action="append", default=[], type=int, metavar="N", help="this claim only (repeatable)"
    )
    claims.add_argument("--study", type=Path, metavar="FILE", help="the runs (default: studies/claims.toml)")
    _add_rows(claims, "; a claim that wants more of a run than win rates and costs is left out")
    claims.add_argument("--out", type=Path, metavar="FOLDER", help="also write claims.md there")
    claims.add_argument("--plain", action="store_true", help="without Prefect")
    pretrain = command(
        commands,
        "pretrain",
        "Make the base model that ships with the project.",
        "turnwise pretrain --set pretrain.steps=3200",
    )
    pretrain.add_argument("--out", type=Path, metavar="FOLDER", help="where the model goes (default: data/base)")
    pretrain.add_argument("--force", action="store_true", help="make it again even if a finished run made the same")
    add_set(pretrain)


def _add_rows(command: argparse.ArgumentParser, more: str) -> None:
    """--rows; more: what its help says besides."""
    what = "a cells.jsonl of a study in another folder: what finished there with the same config and code is not run again (repeatable)"
    command.add_argument("--rows", action="append", default=[], type=Path, metavar="FILE", help=what + more)
