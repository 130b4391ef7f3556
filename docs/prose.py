"""Are the sentences short? Counts the words of each sentence of README and docs; tables, headings and code are left out.

    python docs/prose.py             exit 1 if a page has a mean above 18 words, or a sentence above 35
    python docs/prose.py PAGE ...    only these pages, with every sentence above 30

A word is what stands between blanks and has a letter or a digit; code in backticks is one word. An item of a list ends its
sentence. docs/archive/ keeps what was written before, and reference/cli.md is made from the parser.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEAN, LONGEST, SHOWN = 18, 35, 30
LEFT_OUT = ("docs/archive/", "docs/reference/cli.md")
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2[^\n]*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->|<[^<>\n]+>", re.DOTALL)
CODE = re.compile(r"`[^`]+`", re.DOTALL)
FORMULA = re.compile(r"\$\$.*?\$\$|\$[^$\n]+\$", re.DOTALL)
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\([^)]*\)")
ITEM = re.compile(r"^ *(?:[-*+]|\d+\.) +")
END = re.compile(r"(?<=[.!?])[\"')*_\]]*\s+(?=[\"'(*_\[]*[A-Z0-9`$])")
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|cf|vs|etc|Eq|Fig|Sec|No|al|approx)\.", re.IGNORECASE)


def sentences(text: str) -> list[str]:
    """The sentences of a page of Markdown, without code, tables, headings and links' targets."""
    parts = (part.strip() for block in _blocks(text) for part in END.split(block))
    return [part.replace("`code`", "code") for part in parts if _words(part)]


def pages() -> list[Path]:
    found = [
        ROOT / "README.md",
        ROOT / "SECURITY.md",
        *sorted(ROOT.glob("CONTRIBUTING.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    return [path for path in found if not path.relative_to(ROOT).as_posix().startswith(LEFT_OUT)]


def too_long(text: str) -> tuple[float, list[tuple[int, str]]]:
    """The mean number of words, and the sentences above SHOWN with theirs, longest first."""
    counted = sorted(((_words(one), one) for one in sentences(text)), reverse=True)
    mean = sum(n for n, _ in counted) / max(len(counted), 1)
    return mean, [(n, one) for n, one in counted if n > SHOWN]


def main(names: list[str]) -> int:
    bad = 0
    for path in [Path(name) for name in names] or pages():
        mean, found = too_long(path.read_text(encoding="utf-8"))
        over = [(n, one) for n, one in found if n > LONGEST]
        bad += mean > MEAN or bool(over)
        if names or mean > MEAN or over:
            print(f"{path}: mean {mean:.1f} words (at most {MEAN}), {len(over)} sentences above {LONGEST}")
            print("".join(f"    {n}: {one[:160]}\n" for n, one in (found if names else over[:3])), end="")
    return 1 if bad else 0


def _words(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def _blocks(text: str) -> Iterator[str]:
    """Paragraphs and items of lists, each as one line."""
    text = FORMULA.sub("formula", CODE.sub("`code`", COMMENT.sub("", FENCE.sub("\n", text))))
    text = ABBREVIATIONS.sub(r"\1", LINK.sub(r"\1", text))
    block: list[str] = []
    code = False
    for line in [*text.splitlines(), ""]:
        code = line.startswith("    ") and (code or not block)
        item = ITEM.match(line)
        if code or item or not line.strip() or line.lstrip().startswith(("#", "|", "!!!", "???")):
            yield " ".join(block)
            block = []
        if item:
            block = [line[item.end() :].strip()]
        elif line.strip() and not code and not line.lstrip().startswith(("#", "|", "!!!", "???")):
            block.append(line.strip())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
