"""HTML pages that need no other file: style, templates, and safely embedded data. Ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Table:
    """Text in rows and columns, as Markdown and HTML alike show it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


STYLE = Path(__file__).parent / "pages.css"
_ESCAPED = str.maketrans({sign: f"\\u{ord(sign):04x}" for sign in "<>&"})


def render(template: Path, **values: Any) -> str:
    """The filled template. Values that are not marked as safe are escaped. `style` is the style of all pages."""
    from jinja2 import Environment, StrictUndefined

    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = template.read_text(encoding="utf-8")
    return page.from_string(text).render(style=STYLE.read_text(encoding="utf-8"), **values)


def data_block(value: Any) -> str:
    """JSON as the content of a <script type="application/json">. No character in it begins a tag or an entity. Raises
    ValueError for a number that JSON lacks.
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_ESCAPED)
