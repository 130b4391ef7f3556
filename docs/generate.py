"""Writes the generated pages of docs/reference/, and the pictures of docs/pictures/ that are drawn from data.

    cli.md      every command, from the parser
    config.md   every config key, from the stages and environments
    tables.md   every table and column, from the schema
    rooms.md    every folder and file, from the docstrings of folders and files

    python docs/generate.py            write them
    python docs/generate.py --check    exit 1 if what is there is not what would be written

The command line is read from the parser's arguments, not from `--help`: its wrapping differs between Python versions and
terminals.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from curves import curves
from pictures import pictures

HERE = Path(__file__).resolve().parent
# From the top of the picture in architecture.md down; a room below another one stands after it, and one that is not named here after its parent.
ORDER = ("turnwise", "flows", "stages", *(f"stages/{name}" for name in (
    "train", "judge", "corpora", "play", "store", "sources", "llm", "learn", "envs", "adapters", "frame"
)))  # fmt: skip
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
    return grid(("argument", "meaning"), ((f"`{name_of(action)}`", action.help or "") for action in actions))


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    cells = (" | ".join(tags(cell).replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows)
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {row} |" for row in cells), ""])


def tags(cell: str) -> str:
    """A tag such as <think> as code, or a browser would swallow it."""
    return re.sub(r"(?<!`)(<\w+>)(?!`)", r"`\1`", cell)


def rooms() -> str:
    """The page of rooms: a table of files for each folder, from their docstrings."""
    parts = [
        "<!-- Written by `make docs` from the docstrings of folders and files. Do not edit. -->\n# Rooms, file by file\n",
        "Every folder of the code, and what is in each of its files. [Architecture](../explanation/architecture.md) has the "
        "picture, and eight files to read first.\n",
    ]
    root = HERE.parent
    found = [
        path.parent.relative_to(root).as_posix() for top in ORDER[:3] for path in (root / top).rglob("__init__.py")
    ]
    for room in sorted(found, key=place):
        tree = ast.parse((root / room / "__init__.py").read_text(encoding="utf-8"))
        parts.append(f"## {room}/\n\n{room_text(ast.get_docstring(tree) or '', said_of_files(root / room))}")
    return "\n".join(parts)


def place(room: str) -> tuple[int, str]:
    """By this rooms are sorted."""
    above = max((i for i, name in enumerate(ORDER) if room == name or room.startswith(f"{name}/")), default=len(ORDER))
    return above, room


def said_of_files(room: Path) -> list[tuple[str, str]]:
    """Each file of a folder with the first sentence of its docstring."""
    found = []
    for path in sorted(room.glob("*.py")):
        text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
        found.append((path.stem, re.split(r"(?<=[.!?]) +(?=[A-Z`])", text)[0].rstrip(".")))
    return [(name, said) for name, said in found if name != "__init__"]


def room_text(docstring: str, said: Sequence[tuple[str, str]] = ()) -> str:
    """A folder's docstring as Markdown: indented blocks as code, then a table of files. said: of each file, unless the
    docstring has a list of its modules.
    """
    text, _, modules = docstring.partition("Modules:\n")
    text = re.sub(r"^(\S.*)\n(?= {4})", r"\1\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^( {4}.*)\n(?=\S)", r"\1\n\n", text, flags=re.MULTILINE)
    # A name alone would be a command, a list or a link to the reader of Markdown.
    files = re.findall(r"^ {4}(\S+) +(.+)$", modules, re.MULTILINE) or said
    return f"{text.rstrip()}\n\n" + (
        grid(("file", "what is in it"), ((f"`{n}.py`", what) for n, what in files)) if files else ""
    )


CONFIG_HEAD = """<!-- Written by `make docs` from the configs of stages and environments. Do not edit. -->
# Config keys

Every key that a preset or `--set` can change. `turnwise stages critic` prints the same for one stage.

    turnwise run demo --set critic.lr=1e-3 --set task.options.steps=4

- A preset is a TOML file: the keys of a run stand at its top, and each section below is a table of it.
- Lists are written as in TOML: `--set evaluate.win_words=["pass"]`.
- The last column says who chose the default: the paper, the Self-AC slides, or this project ("ours").
"""


def config() -> str:
    """The page of config keys: a table for each section."""
    from stages import envs
    from turnwise.commands.describe import describe, fields_of

    found = describe()
    parts = [CONFIG_HEAD]
    for name, fields in found["shared"].items():
        title = "The run itself" if name == "run" else f"Section {name}"
        parts += [f"## {title}\n", keys("" if name == "run" else name, fields)]
    for name, stage in found["stages"].items():
        parts += [f"## Section {name}\n", f"Stage `{name}`: {stage['what']}\n", keys(name, stage["config"])]
    for name in envs.environments():
        fields = list(fields_of(sys.modules[envs.module_name(name)].OPTIONS))
        parts += [f"## Options of {name}\n", f"With `task.env={name}`.\n", keys("task.options", fields)]
    return "\n".join(parts)


def keys(section: str, fields: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        (
            f"`{section}.{one['key']}`" if section else f"`{one['key']}`",
            kind(one["type"]),
            f"`{json.dumps(one['default'], ensure_ascii=False)}`",
            one["what"],
            one["source"],
        )
        for one in fields
    ]
    return grid(("key", "type", "default", "meaning", "source"), rows) if rows else "No keys.\n"


def kind(shape: Mapping[str, Any]) -> str:
    """A JSON schema in words: "integer, at least 1"."""
    if "anyOf" in shape:
        return " or ".join(map(kind, shape["anyOf"]))
    if "enum" in shape or "const" in shape:
        return ", ".join(f"`{value}`" for value in shape.get("enum", [shape.get("const")]))
    if shape.get("type") == "array":
        inner = shape.get("items", {})
        return "list of " + {"string": "texts", "integer": "integers", "number": "numbers"}.get(
            inner.get("type"), "values"
        )
    words = {"string": "text", "boolean": "true, false", "object": "table", "null": "none"}
    return ", ".join([words.get(str(shape.get("type")), str(shape.get("type", "any"))), *bounds(shape)])


def bounds(shape: Mapping[str, Any]) -> Iterator[str]:
    for key, words in (
        ("minimum", "at least"),
        ("exclusiveMinimum", "above"),
        ("maximum", "at most"),
        ("exclusiveMaximum", "below"),
    ):
        if key in shape:
            yield f"{words} {shape[key]:g}"


TABLES_HEAD = """<!-- Written by `make docs` from stages/store/tables.py and stages/store/columns.py. Do not edit. -->
# Tables

All rows of all runs are in one DuckDB file, `data/turnwise.duckdb`. `turnwise sql` asks it;
[ten queries](../how-to/sql.md) are a start. Tables only grow.

    turnwise sql "select outcome, count(*) from episodes join runs using (run_id) group by all" --of RUN

Always join `runs`, as here: rows of a killed run stay in the tables, and `runs` has the finished runs only.
"""


def tables() -> str:
    """The page of tables: a table for each, with its columns."""
    from stages.store.columns import SHARED, WHAT
    from stages.store.tables import TABLES

    parts = [TABLES_HEAD]
    for name, columns in TABLES.items():
        what, meanings = WHAT[name]
        rows = [(f"`{column}`", f"`{kind}`", {**SHARED, **meanings}[column]) for column, kind in columns.items()]
        parts += [f"## {name}\n", f"{what}\n", grid(("column", "type", "meaning"), rows)]
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    from turnwise.cli import build_parser

    made = {"cli": reference(build_parser()), "config": config(), "tables": tables(), "rooms": rooms()}
    pages = {HERE / "reference" / f"{name}.md": text for name, text in made.items()}
    drawn = {"curves.svg": curves(), **pictures()}
    pages |= {HERE / "pictures" / name: picture for name, picture in drawn.items()}
    if arguments == ["--check"]:
        stale = [
            path.relative_to(HERE.parent).as_posix()
            for path, text in pages.items()
            if not path.is_file() or path.read_text(encoding="utf-8") != text
        ]
        if stale:
            print(f"{', '.join(stale)}: not what the code says. Run: make docs", file=sys.stderr)
        return 1 if stale else 0
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))  # also from a checkout that was never installed
    sys.exit(main(sys.argv[1:]))
