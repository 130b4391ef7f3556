"""The command line: `turnwise COMMAND ...`.

Results go to stdout (`--json`: one value), progress to stderr. Exit status: 0 done or reused, 1 failed, 2 wrong usage.
Built on argparse, and every command's code is imported when it is called, so that help costs nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from flows.output import lasting

PRINTING = ("plan", "stages", "runs", "show", "verify")
"""Commands that do nothing but print: they fail where it cannot be written. What the others did is done all the same."""

STAGE_NAMES = "collect, targets, critic, refine, distill, evaluate, ..."


class _Parser(argparse.ArgumentParser):
    """Names the nearest help along with a usage error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"turnwise: {message}. See: {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="turnwise",
        description="Train LLM agents over many turns with critics that write language, stage by stage.",
        epilog="example: turnwise run demo",
    )
    parser.add_argument("--version", action="version", version=f"turnwise {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    _add_running(commands)
    _add_looking(commands)
    _add_serving(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    outlets = lasting()
    args = build_parser().parse_args(argv)
    status = _done(args)
    sys.stdout.flush()
    for lost in (outlet.lost for outlet in outlets):
        if lost is not None and not isinstance(
            lost, BrokenPipeError
        ):  # as in `turnwise runs | head`: whoever read has read enough
            print(f"turnwise: what was printed could not be written ({lost.strerror}).", file=sys.stderr)
            status = status or int(args.command in PRINTING)
    return status


def _done(args: argparse.Namespace) -> int:
    """Do what the command says; its exit status, after a sentence where it failed."""
    # Threads that wait spin for a moment only: for ever takes a shared core from its neighbours, not at all loses a
    # third of the speed.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    os.environ.setdefault("DO_NOT_TRACK", "1")  # neither Prefect nor MLflow reports anything to anybody
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the bars here are our own
    before = signal.signal(signal.SIGTERM, _terminated)
    from stages.frame.types import TurnwiseError, UsageError

    module, _, function = args.function.partition(":")
    try:
        return int(getattr(importlib.import_module(module), function)(args))
    except UsageError as error:
        print(f"turnwise: {error}", file=sys.stderr)
        return 2
    except TurnwiseError as error:
        print(f"turnwise: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "turnwise: interrupted; nothing is half-written, and the same command goes on from the last finished stage.",
            file=sys.stderr,
        )
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


def _add_running(commands: Any) -> None:
    run = _command(
        commands,
        "run",
        "Run a preset: every stage, over its iterations; finished stages are reused.",
        "turnwise run demo --set seed=1",
    )
    run.add_argument(
        "preset", metavar="PRESET", help="name of a preset (demo, tiny, ...), or a path that ends in .toml"
    )
    _add_set(run)
    _add_run_options(run)
    what = "Estimate a run before it runs: steps, tokens, memory and hours of every stage, disk, and whether it fits."
    plan = _command(commands, "plan", what, "turnwise plan demo --device h100", module="cost.plan")
    plan.add_argument("preset", metavar="PRESET", help="name of a preset, or a path that ends in .toml")
    _add_set(plan)
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
    rerun = _command(commands, "rerun", what, "turnwise rerun critic --of 3f9c --set critic.lr=1e-4 --through evaluate")
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
    _add_set(rerun)
    _add_run_options(rerun)
    what = "Run methods over tasks and seeds, tuned alike, and report them with intervals; finished runs are reused."
    study = _command(commands, "study", what, "turnwise study studies/ladder.toml --jobs 2", module="commands.study")
    study.add_argument("file", metavar="FILE", type=Path, help="the study, a TOML file such as studies/ladder.toml")
    study.add_argument("--jobs", type=int, metavar="N", help="runs at once (default: one a core; one on a GPU)")
    only = "run these only, by names or patterns of them (repeatable); all that is finished is reported"
    study.add_argument("--only", action="append", default=[], metavar="METHOD/TASK", help=only)
    study.add_argument("--out", type=Path, metavar="FOLDER", help="also write report.html, table.md and the rows there")
    study.add_argument("--plain", action="store_true", help="without Prefect")
    study.add_argument("--dry-run", action="store_true", help="list the runs with their state, and stop")
    what = "Put the sources' claims to the test: what was seen, its control, and whether each holds; finished runs are reused."
    claims = _command(commands, "claims", what, "turnwise claims --jobs 2", module="commands.claims")
    claims.add_argument("--jobs", type=int, metavar="N", help="runs at once (default: one a core; one on a GPU)")
    claims.add_argument(
        "--only", action="append", default=[], type=int, metavar="N", help="this claim only (repeatable)"
    )
    claims.add_argument("--study", type=Path, metavar="FILE", help="the runs (default: studies/claims.toml)")
    claims.add_argument("--out", type=Path, metavar="FOLDER", help="also write claims.md there")
    claims.add_argument("--plain", action="store_true", help="without Prefect")
    pretrain = _command(
        commands,
        "pretrain",
        "Make the base model that ships with the project.",
        "turnwise pretrain --set pretrain.steps=2000",
    )
    pretrain.add_argument("--out", type=Path, metavar="FOLDER", help="where the model goes (default: data/base)")
    pretrain.add_argument("--force", action="store_true", help="make it again even if a finished run made the same")
    _add_set(pretrain)


def _add_looking(commands: Any) -> None:
    stages = _command(
        commands,
        "stages",
        "List the stages: inputs, outputs, config with defaults, units and sources.",
        "turnwise stages critic",
    )
    stages.add_argument("name", metavar="STAGE", nargs="?", help="this one only")
    runs = _command(commands, "runs", "List pipeline runs, newest first.", "turnwise runs --limit 5")
    runs.add_argument("--limit", type=int, default=20, metavar="N", help="how many (default: 20)")
    runs.add_argument("--stage", default="pipeline", metavar="STAGE", help="runs of this stage instead")
    what = "Show a run, or an episode with futures, critiques and refinements beside it."
    show = _command(commands, "show", what, "turnwise show 3f9c", module="commands.show")
    show.add_argument("what", metavar="RUN|EPISODE", help="the start of its id is enough")
    ledger = "of a run of self_ac: what each turn of an episode of its first step earned, and its share of the loss"
    show.add_argument("--ledger", metavar="EPISODE", help=ledger)
    export = _command(
        commands,
        "export",
        "Write a run's rows, adapter, merged model or critic to a folder.",
        "turnwise export 3f9c out --what adapter",
    )
    export.add_argument("run", metavar="RUN", help="pipeline or stage run; the start of its id is enough")
    export.add_argument("folder", metavar="FOLDER", type=Path, help="a new folder")
    kinds = "rows as Parquet; the best adapter; the base model with it merged in; that model with its value head, of self_ac (default: rows)"
    export.add_argument("--what", choices=("rows", "adapter", "merged", "critic"), default="rows", help=kinds)
    what = "Fetch the published data of a task into a folder, or list what there is."
    data = _command(commands, "data", what, "turnwise data fetch game24", module="commands.data")
    data.add_argument("action", choices=("fetch", "list"), help="fetch one task's data, or list all tasks")
    data.add_argument("task", metavar="TASK", nargs="?", help="which task, to fetch")
    data.add_argument(
        "--from", dest="source", type=Path, metavar="PATH", help="a folder that holds the files, instead of the network"
    )
    data.add_argument(
        "--into", type=Path, metavar="FOLDER", help="where a folder of the task's name is made (default: data/tasks)"
    )
    what = (
        "Say which weights of older iterations no run needs any more; delete them with --yes. They can be made again."
    )
    gc = _command(commands, "gc", what, "turnwise gc --keep 3 --yes", module="commands.gc")
    gc.add_argument(
        "--keep",
        type=int,
        default=2,
        metavar="N",
        help="newest iterations of each pipeline run that are kept (default: 2)",
    )
    gc.add_argument("--yes", action="store_true", help="delete; without it nothing is changed")
    what = "List stored rows that belong to no finished run, which are never read, and artifacts that are not what their run wrote."
    verify = _command(commands, "verify", what, "turnwise verify --mend")
    verify.add_argument(
        "--mend", action="store_true", help="let what has changed be made again by the next command that needs it"
    )


def _add_serving(commands: Any) -> None:
    ui = _command(
        commands,
        "ui",
        "Serve MLflow's page and a Prefect server on loopback until Ctrl-C.",
        "turnwise ui --port 5001",
        module="orchestration.services",
    )
    ui.add_argument(
        "--port", type=int, default=5000, metavar="N", help="port of MLflow's page; 0 for any free one (default: 5000)"
    )
    what = "Serve the presets as Prefect deployments, with their schedules, until Ctrl-C."
    serve = _command(
        commands,
        "serve",
        what,
        "turnwise serve --preset demo --preset my/nightly.toml",
        module="orchestration.services",
    )
    which = "only these (repeatable; default: all); their keys `cron` and `each_run` say when they run, and whether each run is new_seed, further or force"
    serve.add_argument("--preset", action="append", metavar="PRESET", help=which)
    serve.add_argument(
        "--limit", type=int, default=1, metavar="N", help="runs at once on this machine; the others wait (default: 1)"
    )
    _command(commands, "init", "Create the stores of this folder; what is there stays.", "turnwise init")


def _command(
    commands: Any, name: str, sentence: str, example: str, *, module: str = "commands.runs"
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=sentence, description=sentence, epilog=f"example: {example}"
    )
    parser.set_defaults(function=f"flows.{module}:{name}")
    parser.add_argument(
        "--home", type=Path, metavar="FOLDER", help="project folder (default: the nearest one with data/ and mlflow/)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change a config key (repeatable)"
    )


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plain", action="store_true", help="without Prefect")
    parser.add_argument("--force", action="store_true", help="run even what a finished run could be reused for")
    parser.add_argument("--dry-run", action="store_true", help="print what would run or be reused, and stop")


def _version() -> str:
    try:
        return version("turnwise")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "(not installed)"


def _terminated(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
