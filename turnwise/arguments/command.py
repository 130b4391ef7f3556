"""A command of the command line: its help, its example, and the options that several have.

Built on argparse. The code of a command is named here and imported when it is called, so that help costs nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def command(
    commands: Any, name: str, sentence: str, example: str, *, module: str = "turnwise.commands.runs"
) -> argparse.ArgumentParser:
    """The parser of one command; it calls the function of this name in `module`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=sentence, description=sentence, epilog=f"example: {example}"
    )
    parser.set_defaults(function=f"{module}:{name}")
    parser.add_argument(
        "--home",
        type=Path,
        metavar="FOLDER",
        help="project folder (default: the nearest folder with data/ and mlflow/)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    parser.add_argument("--quiet", action="store_true", help="no progress lines")
    return parser


def add_set(parser: argparse.ArgumentParser) -> None:
    """--set."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change a config key (repeatable)"
    )


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """--plain, --force, --dry-run."""
    parser.add_argument("--plain", action="store_true", help="run without Prefect")
    parser.add_argument(
        "--force", action="store_true", help="run every stage again, also where a finished one could be reused"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the config and which stages would run, and stop")
