"""Writes docs/reference.md: every command, every stage and every config key, from the code that has them.

make docs        (python -m flows.reference; with --check it only tells whether the file is stale)
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flows import presets
from flows.cli import build_parser
from flows.describe import describe
from flows.registry import METHODS

PATH = Path(__file__).parents[1] / "docs" / "reference.md"
COMMON = ("help", "home", "json", "quiet")


def reference() -> str:
    """The whole document."""
    described = describe()
    lines = ["# Reference", "", "Written by `make docs` from the code; `make check` fails where it is stale.", "", "## Commands", ""]
    lines += ["Every command also takes `--home FOLDER` (project folder), `--json` (print one JSON value) and `--quiet` (no progress).", ""]
    for name, parser in _commands(build_parser()):
        lines += [f"### turnwise {name}", "", str(parser.description), "", f"    {str(parser.epilog).removeprefix('example: ')}", ""]
        lines += [*_arguments(parser), ""]
    lines += ["## Presets", "", *(f"- `{name}`: {_first_comment(name)}" for name in presets.names()), ""]
    lines += ["## Methods", "", *(f"- `{name}`: {' -> '.join(stages)} -> evaluate" for name, stages in METHODS.items()), ""]
    lines += ["## Stages", ""]
    for name, stage in described["stages"].items():
        lines += [f"### {name}", "", stage["what"], ""]
        lines += [f"- {title}: {', '.join(f'`{one}`' for one in stage[title]) or 'none'}" for title in ("inputs", "outputs", "roles", "shared")]
        lines += ["", *_table(name, stage["config"]), ""]
    lines += ["## Shared sections", ""]
    for name, fields in described["shared"].items():
        section = "" if name == "run" else name
        lines += ["### keys of a run" if name == "run" else f"### {name}", "", *_table(section, fields), ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Write the file, or check it; 1 where it is stale."""
    text = reference()
    if "--check" not in sys.argv:
        PATH.parent.mkdir(exist_ok=True)
        PATH.write_text(text, encoding="utf-8")
        return 0
    if PATH.is_file() and PATH.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PATH.name} is stale: the code has other commands or config keys. Run: make docs", file=sys.stderr)
    return 1


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if action.dest not in COMMON:
            metavar = action.metavar if isinstance(action.metavar, str) else "|".join(map(str, action.choices or ()))
            name = f"{action.option_strings[0]} {metavar}".strip() if action.option_strings else metavar
            yield f"- `{name}`: {action.help}"


def _table(section: str, fields: list[dict[str, Any]]) -> list[str]:
    rows = ["| key | default | meaning | source |", "|---|---|---|---|"]
    for one in fields:
        key = f"{section}.{one['key']}" if section else one["key"]
        rows.append(f"| `{key}` | `{json.dumps(one['default'])}` | {_cell(one['what'])} | {_cell(one['source'])} |")
    return rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _first_comment(preset: str) -> str:
    return (presets.FOLDER / f"{preset}.toml").read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


if __name__ == "__main__":
    sys.exit(main())
