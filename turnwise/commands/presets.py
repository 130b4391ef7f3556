"""`turnwise presets`: a line a preset, from the first sentence of its file."""

from __future__ import annotations

import re
from argparse import Namespace
from itertools import takewhile
from pathlib import Path

from flows import presets as shipped
from flows.report import emit


def presets(args: Namespace) -> int:
    """turnwise presets"""
    files = {one: shipped.check_exists(one) for one in args.preset} or shipped.files()
    found = [{"name": name, "about": about(path), "file": str(path)} for name, path in files.items()]
    if args.json:
        emit(found)
        return 0
    width = max(len(one["name"]) for one in found)
    print("\n".join(f"{one['name']:<{width}}  {one['about']}" for one in found))
    return 0


def about(path: Path) -> str:
    """The first sentence of the comment that a preset file begins with; "" where there is none."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    text = " ".join(line.lstrip("# ") for line in lines)
    return re.split(r"(?<=[.!?]) (?=[A-Z])|; ", text, maxsplit=1)[0]
