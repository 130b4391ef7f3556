"""The commands that run something: run, plan, rerun, explain, study, claims, pretrain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turnwise.arguments.command import (
    RUNS,
    add_plain,
    add_rows,
    add_run_options,
    add_set,
    add_stored,
    command,
    flag,
    number,
    several,
)  # fmt: skip

JOBS = "how many runs go on at once (default: one per core; one on a GPU)"


def add(commands: Any) -> None:
    """Add them to the commands."""
    what = "Train: run every stage of a preset. Finished stages are reused."
    run = command(commands, "run", what, "turnwise run demo --set seed=1", module=RUNS)
    named = "task, method and model (demo, desk+grpo, tau_retail+grpo+qwen7b), or a path that ends in .toml"
    run.add_argument("preset", metavar="PRESET", help=named)
    add_set(run)
    many = "run this many seeds, counted up from the preset's; with lists of values in --set this is a sweep over all combinations"
    number(run, "--seeds", many)
    number(run, "--jobs", "how many runs of a sweep go on at once (default: one per core; one on a GPU)")
    due = "make the scheduled run of this time, like 2026-11-22T03:00; the preset's key `each_run` says what kind of run it is"
    run.add_argument("--due", metavar="TIME", help=due)
    add_run_options(run)

    what = "Estimate steps, tokens, memory, disk and hours of a run before you start it."
    plan = command(commands, "plan", what, "turnwise plan demo --device h100")
    named = "task, method and model, as of run, or a path that ends in .toml"
    plan.add_argument("preset", metavar="PRESET", help=named)
    add_set(plan)
    device = "a100, a100-40, b200, cpu, h100, h20, h200, l40s or rtx4090 (default: h100)"
    plan.add_argument("--device", default="h100", metavar="NAME", help=device)
    number(plan, "--devices", "number of devices (default: 1)", 1)
    assume = "assume a quantity that only a run can tell, like turns=10 (repeatable)"
    several(plan, "--assume", "NAME=NUMBER", assume)

    what = "Run one stage again from its stored inputs, and what follows it if you ask for it."
    example = "turnwise rerun critic --of 3f9c --set critic.lr=1e-4 --through evaluate"
    rerun = command(commands, "rerun", what, example, module=RUNS)
    add_stored(rerun)
    extent = rerun.add_mutually_exclusive_group()
    through = "also run what follows in the same iteration, up to this stage, like --through evaluate"
    extent.add_argument("--through", metavar="LAST", help=through)
    flag(extent, "--downstream", "also run everything that follows, later iterations included")
    add_set(rerun)
    add_run_options(rerun)

    what = "Say whether a stage would be reused, and if not, which field differs from the nearest finished run."
    explain = command(commands, "explain", what, "turnwise explain critic --of 3f9c --set critic.lr=1e-4")
    add_stored(explain)
    add_set(explain)

    what = "Compare methods over tasks and seeds, tuned alike, and report intervals. Finished runs are reused."
    study = command(commands, "study", what, "turnwise study studies/ladder.toml --jobs 2")
    study.add_argument("file", metavar="FILE", type=Path, help="the study, a TOML file such as studies/ladder.toml")
    number(study, "--jobs", f"{JOBS}; 0 runs nothing and reports what is finished")
    only = "run only these and the runs that tune them; names or patterns (repeatable)"
    several(study, "--only", "METHOD/TASK", only)
    add_rows(study)
    out = "also write report.html, table.md, the curves and the rows there"
    study.add_argument("--out", type=Path, metavar="FOLDER", help=out)
    add_plain(study)
    flag(study, "--dry-run", "list the runs with their state, and stop")

    what = "Test the claims of the two papers: what was seen, its control, and whether each holds."
    claims = command(commands, "claims", what, "turnwise claims --jobs 2")
    number(claims, "--jobs", JOBS)
    several(claims, "--only", "N", "this claim only (repeatable)", int)
    claims.add_argument("--study", type=Path, metavar="FILE", help="the runs (default: studies/claims.toml)")
    add_rows(claims, "; claims that need more than win rates and costs are left out")
    claims.add_argument("--out", type=Path, metavar="FOLDER", help="also write claims.md there")
    add_plain(claims)

    what = "Make the base model that ships with the project."
    pretrain = command(commands, "pretrain", what, "turnwise pretrain --set pretrain.steps=3200", module=RUNS)
    pretrain.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the model (default: data/base)")
    flag(
        pretrain,
        "--force",
        "make it again, also where a finished run made the same model; overwrite another model in the folder",
    )
    add_set(pretrain)
