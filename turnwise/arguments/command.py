"""A command of the command line: its help, its example, and the options that several have.

Built on argparse. The code of a command is named here and imported when it is called, so that help costs nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

RUNS = "turnwise.commands.runs"


def command(commands: Any, name: str, sentence: str, example: str, *, module: str = "") -> argparse.ArgumentParser:
    """The parser of one command; it calls the function of this name in `module`, by default `turnwise.commands.NAME`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=sentence, description=sentence, epilog=f"example: {example}"
    )
    parser.set_defaults(function=f"{module or f'turnwise.commands.{name}'}:{name}")
    home = "project folder (default: the nearest folder with data/ and mlflow/)"
    parser.add_argument("--home", type=Path, metavar="FOLDER", help=home)
    flag(parser, "--json", "print one JSON value")
    flag(parser, "--quiet", "no progress lines")
    return parser


def flag(parser: Any, name: str, text: str) -> None:
    """An option without a value."""
    parser.add_argument(name, action="store_true", help=text)


def number(parser: Any, name: str, text: str, default: int | None = None) -> None:
    """An option with a whole number."""
    parser.add_argument(name, type=int, default=default, metavar="N", help=text)


def several(parser: Any, name: str, metavar: str, text: str, kind: Any = None) -> None:
    """An option that may be repeated. Its values are a list."""
    parser.add_argument(name, action="append", default=[], type=kind, metavar=metavar, help=text)


def add_set(parser: Any) -> None:
    """--set."""
    several(parser, "--set", "SECTION.KEY=VALUE", "change a config key (repeatable)")


def add_run_options(parser: Any) -> None:
    """--plain, --force, --dry-run."""
    add_plain(parser)
    flag(parser, "--force", "run every stage again, also where a finished one could be reused")
    flag(parser, "--dry-run", "print the config and which stages would run, and stop")


def add_plain(parser: Any) -> None:
    """--plain."""
    flag(parser, "--plain", "run without Prefect")


def add_stored(parser: Any) -> None:
    """STAGE, --of and --iteration: a stage run that is stored."""
    parser.add_argument("stage", metavar="STAGE", help="collect, targets, critic, refine, distill, evaluate, ...")
    which = "a pipeline run or a run of the stage; the start of the id is enough"
    parser.add_argument("--of", metavar="RUN", required=True, help=which)
    number(parser, "--iteration", "the iteration of a pipeline run (default: the last)")


def add_rows(parser: Any, more: str = "") -> None:
    """--rows; more: what its help says besides."""
    what = "reuse the finished runs of a study in another folder, from its cells.jsonl (repeatable)"
    several(parser, "--rows", "FILE", what + more, Path)
