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
        "Train: run every stage of a preset. Finished stages are reused.",
        "turnwise run demo --set seed=1",
    )
    run.add_argument(
        "preset",
        metavar="PRESET",
        help="task, method and model (demo, desk+grpo, tau_retail+grpo+qwen7b), or a path that ends in .toml",
    )
    add_set(run)
    many = "run this many seeds, counted up from the preset's; with lists of values in --set this is a sweep over all combinations"
    run.add_argument("--seeds", type=int, metavar="N", help=many)
    run.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="how many runs of a sweep go on at once (default: one per core; one on a GPU)",
    )
    due = "make the scheduled run of this time, like 2026-11-22T03:00; the preset's key `each_run` says what kind of run it is"
    run.add_argument("--due", metavar="TIME", help=due)
    add_run_options(run)
    what = "Estimate steps, tokens, memory, disk and hours of a run before you start it."
    plan = command(commands, "plan", what, "turnwise plan demo --device h100", module="turnwise.commands.plan")
    plan.add_argument(
        "preset", metavar="PRESET", help="task, method and model, as of run, or a path that ends in .toml"
    )
    add_set(plan)
    plan.add_argument(
        "--device",
        default="h100",
        metavar="NAME",
        help="a100, a100-40, b200, cpu, h100, h20, h200, l40s or rtx4090 (default: h100)",
    )
    plan.add_argument("--devices", type=int, default=1, metavar="N", help="number of devices (default: 1)")
    plan.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="assume a quantity that only a run can tell, like turns=10 (repeatable)",
    )
    what = "Run one stage again from its stored inputs, and what follows it if you ask for it."
    rerun = command(commands, "rerun", what, "turnwise rerun critic --of 3f9c --set critic.lr=1e-4 --through evaluate")
    rerun.add_argument("stage", metavar="STAGE", help=STAGE_NAMES)
    rerun.add_argument(
        "--of", metavar="RUN", required=True, help="a pipeline run or a run of the stage; the start of the id is enough"
    )
    rerun.add_argument("--iteration", type=int, metavar="N", help="the iteration of a pipeline run (default: the last)")
    extent = rerun.add_mutually_exclusive_group()
    extent.add_argument(
        "--through",
        metavar="LAST",
        help="also run what follows in the same iteration, up to this stage, like --through evaluate",
    )
    extent.add_argument(
        "--downstream", action="store_true", help="also run everything that follows, later iterations included"
    )
    add_set(rerun)
    add_run_options(rerun)
    what = "Say whether a stage would be reused, and if not, which field differs from the nearest finished run."
    explain = command(
        commands,
        "explain",
        what,
        "turnwise explain critic --of 3f9c --set critic.lr=1e-4",
        module="turnwise.commands.explain",
    )
    explain.add_argument("stage", metavar="STAGE", help=STAGE_NAMES)
    explain.add_argument(
        "--of", metavar="RUN", required=True, help="a pipeline run or a run of the stage; the start of the id is enough"
    )
    explain.add_argument(
        "--iteration", type=int, metavar="N", help="the iteration of a pipeline run (default: the last)"
    )
    add_set(explain)
    what = "Compare methods over tasks and seeds, tuned alike, and report intervals. Finished runs are reused."
    study = command(
        commands, "study", what, "turnwise study studies/ladder.toml --jobs 2", module="turnwise.commands.study"
    )
    study.add_argument("file", metavar="FILE", type=Path, help="the study, a TOML file such as studies/ladder.toml")
    jobs = (
        "how many runs go on at once (default: one per core; one on a GPU); 0 runs nothing and reports what is finished"
    )
    study.add_argument("--jobs", type=int, metavar="N", help=jobs)
    only = "run only these and the runs that tune them; names or patterns (repeatable)"
    study.add_argument("--only", action="append", default=[], metavar="METHOD/TASK", help=only)
    _add_rows(study, "")
    study.add_argument(
        "--out", type=Path, metavar="FOLDER", help="also write report.html, table.md, the curves and the rows there"
    )
    study.add_argument("--plain", action="store_true", help="run without Prefect")
    study.add_argument("--dry-run", action="store_true", help="list the runs with their state, and stop")
    what = "Test the claims of the two papers: what was seen, its control, and whether each holds."
    claims = command(commands, "claims", what, "turnwise claims --jobs 2", module="turnwise.commands.claims")
    claims.add_argument(
        "--jobs", type=int, metavar="N", help="how many runs go on at once (default: one per core; one on a GPU)"
    )
    claims.add_argument(
        "--only", action="append", default=[], type=int, metavar="N", help="this claim only (repeatable)"
    )
    claims.add_argument("--study", type=Path, metavar="FILE", help="the runs (default: studies/claims.toml)")
    _add_rows(claims, "; claims that need more than win rates and costs are left out")
    claims.add_argument("--out", type=Path, metavar="FOLDER", help="also write claims.md there")
    claims.add_argument("--plain", action="store_true", help="run without Prefect")
    pretrain = command(
        commands,
        "pretrain",
        "Make the base model that ships with the project.",
        "turnwise pretrain --set pretrain.steps=3200",
    )
    pretrain.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the model (default: data/base)")
    pretrain.add_argument(
        "--force", action="store_true", help="make it again, also where a finished run made the same model"
    )
    add_set(pretrain)


def _add_rows(command: argparse.ArgumentParser, more: str) -> None:
    """--rows; more: what its help says besides."""
    what = "reuse the finished runs of a study in another folder, from its cells.jsonl (repeatable)"
    command.add_argument("--rows", action="append", default=[], type=Path, metavar="FILE", help=what + more)
