"""Pages of the site that are files of the root: README and its like have one home, and their links lead to pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    "index.md": "README.md",
    "explanation/security.md": "SECURITY.md",
    "reference/changelog.md": "CHANGELOG.md",
    "how-to/contribute.md": "CONTRIBUTING.md",
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of the file of the root, where the page is one."""
    at = page.file.src_uri
    return from_root(at) if at in FILES else markdown


def from_root(at: str) -> str:
    """The text of a page that is a file of the root, with links as they are seen from the page."""
    up = "../" * at.count("/")
    pages = {file: page for page, file in FILES.items()}

    def seen(found: re.Match[str]) -> str:
        target, hash_, anchor = found[1].partition("#")
        return f"]({up}{pages.get(target) or target.removeprefix('docs/')}{hash_}{anchor})"

    return re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", seen, (ROOT / FILES[at]).read_text(encoding="utf-8"))
