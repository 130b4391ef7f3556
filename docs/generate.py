"""Writes docs/cli.md, the reference of the command line, from the parser, and docs/rooms.md from the docstrings of the folders.

    python docs/generate.py            write them
    python docs/generate.py --check    exit 1 if what is there is not what would be written

The reference is built from the parser's arguments, not from `--help`, whose wrapping differs between Python versions and
terminals.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
# From the top of the picture in architecture.md down.
ROOMS = (
    *(
        "turnwise",
        "turnwise/arguments",
        "turnwise/commands",
        "flows",
        "flows/evidence",
        "flows/evidence/study",
        "flows/orchestration",
        "flows/cost",
        "flows/look",
        "flows/look/view",
        "flows/keep",
        "flows/keep/recompute",
        "flows/keep/bundle",
        "stages",
        "stages/train",
        "stages/judge",
        "stages/corpora",
    ),
    *(
        "stages/play",
        "stages/store",
        "stages/sources",
        "stages/llm",
        "stages/learn",
        "stages/envs",
        "stages/adapters",
        "stages/frame",
    ),
)
HEAD = """<!-- Written by `make docs` from turnwise/cli.py. Do not edit: a test compares it with the parser. -->
# Command line

{description}

Results go to stdout, progress to stderr. Exit status: 0 done or reused, 1 failed, 2 wrong usage. A run, a stage run or an
episode is named by the start of its id, as long as that start fits only one. What can be set, with default, meaning and
source of every key, is printed by `turnwise stages`.

Every command takes these options:

{common}
"""


def reference(parser: argparse.ArgumentParser) -> str:
    """The whole page as Markdown."""
    commands = subcommands(parser)
    everywhere = [
        action
        for action in arguments(next(iter(commands.values())))
        if all(has(command, action) for command in commands.values())
    ]
    shared = {name for action in everywhere for name in action.option_strings}
    parts = [HEAD.format(description=parser.description, common=table(everywhere))]
    for name, command in commands.items():
        own = [action for action in arguments(command) if not shared.intersection(action.option_strings)]
        usage = " ".join(["turnwise", name, *map(usage_of, own)])
        example = (command.epilog or "").removeprefix("example: ")
        parts.append(f"## turnwise {name}\n\n{command.description}\n\n    {usage}\n")
        parts += [table(own)] if own else []
        parts.append(f"Example: `{example}`\n")
    return "\n".join(parts)


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(found.choices)


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """All but --help."""
    return [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]


def has(parser: argparse.ArgumentParser, wanted: argparse.Action) -> bool:
    """Whether the parser has the same option, with the same help."""
    return any(
        action.option_strings and (action.option_strings, action.help) == (wanted.option_strings, wanted.help)
        for action in arguments(parser)
    )


def name_of(action: argparse.Action) -> str:
    """`--of RUN`, `PRESET`; a choice is shown with its values."""
    value = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else str(action.metavar or action.dest)
    if not action.option_strings:
        return value
    return action.option_strings[-1] if action.nargs == 0 else f"{action.option_strings[-1]} {value}"


def usage_of(action: argparse.Action) -> str:
    name = name_of(action)
    needed = action.required if action.option_strings else action.nargs != "?"
    return name if needed else f"[{name}]"


def table(actions: Iterable[argparse.Action]) -> str:
    rows = [
        f"| `{name_of(action).replace('|', chr(92) + '|')}` | {(action.help or '').replace('|', chr(92) + '|')} |"
        for action in actions
    ]
    return "\n".join(["| argument | meaning |", "|---|---|", *rows, ""])


def rooms() -> str:
    """The page of rooms: each folder's docstring under its name. An indented list of files is a code block in Markdown, too."""
    parts = [
        "<!-- Written by `make docs` from the docstrings of the folders. Do not edit. -->\n# Rooms, file by file\n"
    ]
    for room in ROOMS:
        tree = ast.parse((HERE.parent / room / "__init__.py").read_text(encoding="utf-8"))
        parts.append(f"## {room}/\n\n{(ast.get_docstring(tree, clean=False) or '').rstrip()}\n")
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    from turnwise.cli import build_parser

    pages = {HERE / "cli.md": reference(build_parser()), HERE / "rooms.md": rooms()}
    if arguments == ["--check"]:
        stale = [
            path.name for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
        ]
        if stale:
            print(f"docs/{', docs/'.join(stale)}: not what the code says. Run: make docs", file=sys.stderr)
        return 1 if stale else 0
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))  # also from a checkout that was never installed
    sys.exit(main(sys.argv[1:]))
