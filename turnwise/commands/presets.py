"""`turnwise presets`: the tasks, methods and models, a line each: the first sentence of the file."""

from __future__ import annotations

import re
from argparse import Namespace
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from flows import parts
from flows import presets as shipped
from flows.report import answer

EXAMPLE = "turnwise run tau_retail+grpo+qwen7b"
HOW = f"A run is task+method+model, in any order: {EXAMPLE}\nWhere none is named: {parts.METHOD}, or the task's own method, and the task's own model."


def presets(args: Namespace) -> int:
    """turnwise presets"""
    if args.preset:
        named = [told(one) for one in args.preset]
        return answer(args, named, _lines(named))
    lists = {f"{kind}s": [_part(name, path) for name, path in parts.files(kind).items()] for kind in parts.KINDS}
    width = max(len(one["name"]) for found in lists.values() for one in found)
    shown = [[title, *(f"  {line}" for line in _lines(found, width)), ""] for title, found in lists.items()]
    value = {**lists, "tested": shipped.names(), "example": EXAMPLE}
    return answer(args, value, [*chain(*shown), HOW])


def told(preset: str) -> dict[str, Any]:
    """The description of a preset; for a combination, the sentences of its parts. Raises UsageError for an unknown name."""
    name = shipped.name_of(preset)
    if preset.endswith(".toml"):
        return _part(preset, Path(preset))
    found = [parts.files(parts.kinds()[word])[word] for word in name.split("+")]
    return {"name": name, "about": " ".join(map(about, found)), "file": ", ".join(map(str, found))}


def _part(name: str, path: Path) -> dict[str, Any]:
    return {"name": name, "about": about(path), "file": str(path)}


def _lines(found: list[dict[str, Any]], width: int = 0) -> list[str]:
    width = width or max(len(one["name"]) for one in found)
    return [f"{one['name']:<{width}}  {one['about']}".rstrip() for one in found]


def about(path: Path) -> str:
    """The first sentence of the comment that a preset file begins with; "" where there is none."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    text = " ".join(line.lstrip("# ") for line in lines)
    return re.split(r"(?<=[.!?]) (?=[A-Z])|; ", text, maxsplit=1)[0]
