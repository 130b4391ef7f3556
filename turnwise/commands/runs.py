"""The commands that run something or list runs. `turnwise/arguments` has their arguments. Results go to stdout."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows import presets, registry, telling
from flows.book import EXPERIMENT
from flows.datasets import check_data
from flows.keep.export import export_run, pretrain_to
from flows.orchestration import launch
from flows.orchestration.server import make_database
from flows.presets import RunConfig
from flows.report import Display, answer, comparison, duration, emit, ending, metrics_table
from flows.rerun import follows, prepare, stored_summary
from flows.telling import rate_text
from flows.workspace import find_home, open_workspace
from stages.envs import nearest
from stages.frame.types import UsageError
from stages.store.runs import SET, RunInfo, differences
from turnwise.commands.describe import describe, describe_text
from turnwise.commands.dry_run import plan, reusable
from turnwise.commands.due import as_due


def run(args: Namespace) -> int:
    """turnwise run PRESET"""
    home = find_home(args.home, to_write=not args.dry_run)
    presets.name_of(args.preset)  # before anything is opened
    if args.seeds is not None or any("[" in item for item in args.set):  # what a sweep needs is imported for one alone
        from flows.evidence.study.sweep import is_sweep
        from turnwise.commands.sweep import sweep

        if args.seeds is not None or is_sweep(args.preset, args.set, home):
            return sweep(args, home)
    if args.jobs is not None:
        raise UsageError("--jobs: this is one run. Leave --jobs out, or make a sweep with --seeds or a list in --set.")
    args = as_due(args, home) if args.due else args
    if args.dry_run:
        return _dry_run(args, home)
    with launch.launcher(home, plain=args.plain) as launcher:
        config = presets.load(args.preset, args.set)
        asked = telling.asked(args.preset, config, args.set)  # before the working directory changes
        workspace = open_workspace(home)
        with Display(quiet=args.quiet, rows_to=None if args.quiet else "stderr" if args.json else "stdout") as display:
            summary = launch.launch_run(
                config, workspace, launcher, display, sets=args.set, force=args.force, asked=asked
            )
    return answer(args, asdict(summary), ending(summary))


def _dry_run(args: Namespace, home: Path) -> int:
    config = presets.load(args.preset, args.set)
    changed = telling.asked(args.preset, config, args.set).changed
    workspace = open_workspace(home)  # the folder that the paths of the config count from
    check_data(config)
    planned = plan(config, workspace, force=args.force)
    return _print_plan(args, config, planned, changed, f"the preset {config.preset}")


def _print_plan(
    args: Namespace, config: RunConfig, planned: list[dict[str, Any]], changed: telling.Changes, there: str
) -> int:
    """changed: what differs from what the run is made from, which is `there`."""
    values = config.model_dump(mode="json")
    own = differences(presets.resolve({"preset": config.preset}).model_dump(mode="json"), values)
    if args.json:
        emit({"config": values, "stages": planned, "changed": changed, "not_default": own})
        return 0
    for pairs, what in ((changed, there), (own, "the code's defaults")):
        lines = [f"  {telling.changes_told({key: pair})}" for key, pair in pairs.items()]
        print("\n".join([f"Differs from {what} in:", *(lines or ["  nothing"])]))
    print(json.dumps(values, indent=1))
    for one in planned:
        place = one["part"] if one["part"] != "iteration" else one["iteration"]
        print(f"{one['stage']} {place}: {'reuse ' + one['reuse'][:8] if one['reuse'] else 'run'}")
    fresh = sum(one["reuse"] is None for one in planned)
    print(
        f"{fresh} of {len(planned)} stages would run, {len(planned) - fresh} would be reused. To do it, leave out --dry-run."
    )
    return 0


def rerun(args: Namespace) -> int:
    """turnwise rerun STAGE --of RUN"""
    home = find_home(args.home, to_write=not args.dry_run)
    if args.through is not None or args.downstream:
        return _rerun_on(args, home)
    workspace = open_workspace(home)
    again = prepare(args.stage, args.of, workspace, sets=args.set, iteration=args.iteration)
    with launch.launcher(home, plain=args.plain or args.dry_run) as launcher:
        # With nothing changed the old run itself has the fingerprint: to run it again is then all that was asked for.
        force = args.force or not args.set
        if args.dry_run:
            found = None if force else reusable(again.call, workspace)
            told = {"stage": args.stage, "of": again.old, "inputs": dict(again.call.inputs), "reuse": found}
            would = f"reuse {found[:8]}" if found else "run"
            return answer(args, told, [f"{again.call.title}: {would} with the inputs of {again.old[:8]}"])
        with Display(quiet=args.quiet) as display:
            done = launch.launch_rerun(again, workspace, launcher, display, sets=args.set, force=force)
    before = workspace.tracking.metrics(again.old)
    same = {key: before[key] for key in done.metrics if key in before}
    old, new, verb = again.old[:8], done.run_id[:8], "reused" if done.reused else "made"
    last = f"run {new} {verb} from the inputs of {old}, which is unchanged. Look: turnwise show {new}"
    if follows("evaluate", args.stage):
        last += f"; its win rate: turnwise rerun {args.stage} --of {new} --through evaluate"
    lines = [*metrics_table(old, new, before, done.metrics), last]
    return answer(args, {**asdict(done), "rerun_of": again.old, "old_metrics": same}, lines)


def _rerun_on(args: Namespace, home: Path) -> int:
    """turnwise rerun STAGE --of RUN --through LAST, or --downstream"""
    from flows.branch import compare, prepare

    workspace = open_workspace(home)
    branch = prepare(args.stage, args.of, workspace, sets=args.set, iteration=args.iteration, through=args.through)
    with launch.launcher(home, plain=args.plain or args.dry_run) as launcher:
        if args.dry_run:
            planned = plan(branch.run, workspace, force=args.force, branch=branch)
            return _print_plan(args, branch.run, planned, branch.changes, f"run {branch.of[:8]}")
        with Display(quiet=args.quiet, rows_to=None if args.quiet else "stderr" if args.json else "stdout") as display:
            summary = launch.launch_run(
                branch.run, workspace, launcher, display, sets=args.set, force=args.force, branch=branch
            )
    compared = compare(branch, summary, workspace)
    lines = [*comparison(branch.of[:8], summary.run_id[:8], compared), *ending(summary)]
    return answer(args, {**asdict(summary), "rerun_of": branch.of, "compared": compared}, lines)


def runs(args: Namespace) -> int:
    """turnwise runs"""
    from flows.evidence.study.keep import EXPERIMENT as STUDY  # the report of a study takes time to import

    if args.limit < 1:
        raise UsageError(f"--limit {args.limit}: wanted at least 1.")
    if args.stage not in (known := [EXPERIMENT, STUDY, *registry.STAGES]):
        raise UsageError(
            f"--stage: there is no stage {args.stage!r}{nearest(args.stage, known)} Stages: {', '.join(known)}."
        )
    workspace = open_workspace(find_home(args.home))
    found = []
    for info in workspace.tracking.runs(args.stage, args.limit):
        row: dict[str, Any] = {
            "run_id": info.run_id, "name": info.name, "preset": info.tags.get("preset"), "seed": _whole(info.tags.get("seed")), "set": _set(info),
            "status": info.status, "started": _iso(info.started), "seconds": None if info.ended is None else round(info.ended - info.started, 1),
        }  # fmt: skip
        if args.stage == EXPERIMENT:
            final = stored_summary(workspace, info.run_id)["final"]
            row["final"] = {key: value for key, value in final.items() if key.startswith("win")}
        else:
            row |= {key: info.tags.get(key) for key in ("changed", "iteration", "pipeline", "rerun_of")}
            row["iteration"] = int(info.tags.get("iteration", -1))
        found.append(row)
    if args.json:
        emit(found)
        return 0
    for row in found:
        detail = rate_text(row["final"]) if "final" in row else f"iteration {row['iteration']}"
        started, took = row["started"][:16].replace("T", " "), duration(row["seconds"])
        print(f"{row['run_id'][:8]}  {started}  {row['status']:<9}{took:>8}  {detail:<18}  {row['name']}")
    if not found:
        print(f"No runs of {args.stage} in {workspace.home}. To make one: turnwise run demo", file=sys.stderr)
    return 0


def stages(args: Namespace) -> int:
    """turnwise stages"""
    described = describe(args.name)
    return answer(args, described, [describe_text(described)])


def pretrain(args: Namespace) -> int:
    """turnwise pretrain"""
    home = find_home(args.home, to_write=True)
    config = presets.resolve({"preset": "pretrain"}, args.set)
    out = (home / "data" / "base" if args.out is None else args.out).resolve()
    with Display(quiet=args.quiet) as display:
        done = pretrain_to(config, open_workspace(home), out, display.bar, force=args.force)
    lines = [f"{key:<32}{value:>12.5g}" for key, value in sorted(done.metrics.items())]
    lines.append(f"model of run {done.run_id[:8]} in {out}. A preset names it as model.path.")
    return answer(args, {**asdict(done), "out": str(out)}, lines)


def export(args: Namespace) -> int:
    """turnwise export RUN FOLDER"""
    folder = args.folder.resolve()
    try:
        written = export_run(open_workspace(find_home(args.home)), args.run, folder, args.what)
    except OSError as error:
        raise UsageError(
            f"export: {str(error.filename or folder)[:200]} cannot be used ({error.strerror}). Name a folder that can be written."
        ) from None
    value = {"folder": str(folder), "files": [str(path.relative_to(folder)) for path in written]}
    return answer(args, value, map(str, written))


def init(args: Namespace) -> int:
    """turnwise init"""
    home = find_home(args.home, to_write=True)
    make_database(home)
    open_workspace(home).tracking.initialise()
    print(f"{home} is ready. Next: turnwise run demo")
    return 0


def _set(info: RunInfo) -> dict[str, str]:
    """What differs from the preset, as the run's params say it."""
    return {key.removeprefix(SET): value for key, value in info.params.items() if key.startswith(SET)}


def _whole(text: str | None) -> int | None:
    return None if text is None else int(text)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
