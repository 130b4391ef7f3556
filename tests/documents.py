"""What the documents speak of, looked up in the code: names, config keys, commands, tests. Used by test_docs.py."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stages.frame.types import UsageError

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))) if path.is_file()]
# Every word in backticks of these must be something that can be looked up.
CHECKED = (
    "explanation/architecture.md",
    "reference/paper-map.md",
    "tutorial/environment.md",
    *(
        f"how-to/{name}.md"
        for name in ("adapters", "engine", "environment-options", "method", "preset", "prompts", "small-model", "stage")
    ),
)
CODE = [path for folder in ("turnwise", "flows", "stages") for path in sorted((ROOT / folder).rglob("*.py"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The fenced code of a page of docs/, in order."""
    return [code for kind, code in FENCE.findall(text_of(DOCS / page)) if kind == language]


def spans(page: Path) -> list[str]:
    """What stands in backticks outside of code blocks."""
    return [" ".join(span.split()) for span in SPAN.findall(FENCE.sub("", text_of(page)))]


def commands(page: Path) -> list[str]:
    """Command lines: in code blocks, fenced or indented, and in backticks. A synopsis, which has brackets, is none."""
    text = text_of(page).replace("\\\n", " ")
    code = [line for _, block in FENCE.findall(text) for line in block.splitlines()] + re.findall(
        r"^ {4,}(\S.*)$", text, re.MULTILINE
    )
    lines = [line.strip().removeprefix("$ ") for line in [*code, *spans(page)]]
    return [line for line in lines if re.match(r"turnwise [a-z]|make [a-z]", line) and "[" not in line]


@cache
def words_of_the_code() -> frozenset[str]:
    """Every identifier of flows and stages, and every word of a string in them (table names, metrics, artifact paths)."""
    found: set[str] = set()
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in ("name", "id", "attr", "arg", "asname", "module"):
                if isinstance(value := getattr(node, name, None), str):
                    found.update(value.split("."))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
                found.update(IDENTIFIER.findall(node.value))
    return frozenset(found)


@cache
def functions_of(path: Path) -> frozenset[str]:
    return frozenset(
        node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)
    )


@cache
def definitions(path: Path) -> frozenset[str]:
    """Names that a module defines, and Class.name of what its classes hold."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        found.update(_defined(node))
        if isinstance(node, ast.ClassDef):
            found.update(f"{node.name}.{inner}" for part in node.body for inner in _defined(part))
    return frozenset(found)


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    for target in (
        [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
    ):
        yield from (one.id for one in ast.walk(target) if isinstance(one, ast.Name))


@cache
def config_keys() -> dict[str, Any]:
    """Every dotted key of a run's config, with its field."""
    from flows.presets import run_config
    from stages.frame.contract import Config

    found: dict[str, Any] = {}
    for name, field in run_config().model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Config):
            found |= {name: field, **{f"{name}.{key}": one for key, one in inner.model_fields.items()}}
        else:
            found[name] = field
    return found


def in_module(name: str) -> bool:
    """`targets.draw`, `learn.ema.ema_update` (below stages/), `flows.pipeline.best_of`: a module of ours and what it
    defines.
    """
    parts = name.split(".")
    for base in (ROOT, ROOT / "stages"):
        for n in range(len(parts), 0, -1):
            module = base.joinpath(*parts[:n]).with_suffix(".py")
            if module.is_file():
                return n == len(parts) or ".".join(parts[n:]) in definitions(module)
    return False


def problem(span: str, page: str = "") -> str:
    """What is wrong with something in backticks; "" if it exists. page: its text, whose own code blocks count, too."""
    if span.startswith(("turnwise ", "make ")):
        return command_problem(span)
    if "::" in span:
        file, _, test = span.partition("::")
        return "" if (ROOT / file).is_file() and test in functions_of(ROOT / file) else "no such test"
    if span.startswith("--"):
        return "" if f"`{span.split('=')[0].split()[0]}" in text_of(DOCS / "reference/cli.md") else "no such option"
    key, equals, _ = span.partition("=")
    if equals:
        return set_problem(span.replace(" ", "")) if key.strip() in config_keys() else "no such config key"
    if span in config_keys() or (ROOT / span).exists() or in_module(span):
        return ""
    own = " ".join(code for _, code in FENCE.findall(page))
    if "/" in span and span.endswith((".py", ".md", ".toml")):
        return "" if Path(span).stem in own else "no such file"
    head, dot, rest = span.partition(".")
    if dot and rest.isidentifier() and (head in config_keys() or any(path.stem == head for path in CODE)):
        return f"{head} has no {rest}"
    if dot and head[0].isupper():
        return "" if any(span in definitions(path) for path in CODE) else "no class has it"
    # A name, a call, a table or a metric (`refine/dropped`): all its words are words of the code.
    unknown = set(IDENTIFIER.findall(span)) - words_of_the_code() - set(IDENTIFIER.findall(own))
    if unknown or not re.fullmatch(r"[\w./]+(?:\([\w, ]*\))?", span):
        return f"the code knows no {', '.join(sorted(unknown)) or 'such thing; write it without backticks'}"
    return ""


def command_problem(line: str) -> str:
    """What is wrong with a command; upper-case words stand for what the reader fills in."""
    if line.startswith("make "):
        makefile = ROOT / "Makefile"
        targets = re.findall(r"^([\w-]+):", makefile.read_text(), re.MULTILINE) if makefile.is_file() else []
        missing = [word for word in shlex.split(line, comments=True)[1:] if "=" not in word and word not in targets]
        return f"no target {missing[0]} in the Makefile" if missing else ""
    from flows import presets
    from flows.evidence.study.sweep import study_text
    from turnwise import cli

    words = shlex.split(line, comments=True)[1:]
    if words[-1:] == ["..."]:
        words = words[:-1]
    if len(words) == 1 and words[0] in cli_commands():
        return ""  # the command itself is spoken of
    try:
        args = cli.build_parser().parse_args(words)
        if args.command == "run" and not args.preset.isupper() and not args.preset.endswith(".toml"):
            swept = tomllib.loads(study_text(args.preset, args.set, args.seeds))
            for method in swept["methods"].values():
                presets.load(args.preset, [*swept["sets"], *method["sets"]])
        elif args.command == "plan" and not args.preset.isupper() and not args.preset.endswith(".toml"):
            presets.load(args.preset, args.set)
        elif args.command in ("run", "rerun", "pretrain"):
            presets.resolve({}, args.set)
    except SystemExit:
        return "the command line does not take it"
    except UsageError as error:
        return str(error)
    return ""


@cache
def cli_commands() -> frozenset[str]:
    from turnwise.cli import build_parser

    return frozenset(generator().subcommands(build_parser()))


def set_problem(item: str) -> str:
    from flows import presets

    try:
        presets.resolve({}, [item])
    except UsageError as error:
        return str(error)
    return ""


def load_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def generator() -> ModuleType:
    return load_file(DOCS / "generate.py", "docs_generate")


@contextmanager
def own_module(folder: Path, name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of one's own in a project folder, in which the process works; forgotten afterwards. Its name."""
    from stages.frame import own

    package, _, module = name.partition(".")
    (folder / package).mkdir()
    (folder / package / f"{module}.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        yield name
    finally:
        for one in (name, package):
            sys.modules.pop(one, None)
        own._imported.cache_clear()
