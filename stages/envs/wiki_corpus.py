"""Pages cut into numbered lines, searched by SQLite's FTS5 (BM25, in memory), and questions about them.

A page is {title, text, links}, links being titles or {title}; a question {question, answer}, and where they are known
split, id and evidence (or support): titles, or {title, line}. All of a corpus is held in memory: some 100,000 pages a
GB. Ours.
"""

from __future__ import annotations

import functools
import re
import sqlite3
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.envs.files import bad_file, read_rows, text_of
from stages.envs.splits import SPLITS, digest
from stages.envs.squad import normalise
from stages.frame.types import TurnwiseError

PAGES_WANTED = "Give pages as JSONL or Parquet with a text 'title', a text 'text' and a list 'links' of titles."
QUESTIONS_WANTED = "Give questions as JSONL with a text 'question', a text 'answer' and, if known, 'evidence'."

_LONGEST_LINE = 400
# The end of a sentence, if no abbreviation or initial stands before the full stop.
_GAP = re.compile(r"[.!?][\"'”’)\]]*\s+(?=[^a-z\s])")
_ABBREVIATED = re.compile(
    r"\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Jr|Sr|Prof|Gen|Col|Capt|Lt|Sgt|Rev|Hon|No|vs|ca?|Inc|Ltd|Co|Bros)$"
)

Evidence = tuple[str, int | None]
"""(title, number of the line, or None for any line of the page)."""


@dataclass(frozen=True)
class Page:
    """Lines are numbered from 1; links are titles of other pages of the corpus."""

    title: str
    lines: tuple[str, ...]
    links: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """split "" where the file says none."""

    id: str
    split: str
    question: str
    answer: str
    evidence: tuple[Evidence, ...]


def sentences(text: str) -> tuple[str, ...]:
    """The text as lines: one a sentence, long ones folded."""
    found: list[str] = []
    for paragraph in text.splitlines():
        start = 0
        for gap in _GAP.finditer(paragraph):
            if not (paragraph[gap.start()] == "." and _ABBREVIATED.search(paragraph, start, gap.start())):
                found.append(paragraph[start : gap.end()])
                start = gap.end()
        found.append(paragraph[start:])
    return tuple(line for sentence in found for line in textwrap.wrap(sentence, _LONGEST_LINE))


def folded(title: str) -> str:
    """A title for comparison: case, spaces and quotation marks around it do not count."""
    return " ".join(title.casefold().split()).strip("\"'“”")


class Corpus:
    """All pages, by title, and their index."""

    def __init__(self, pages: Iterable[Page]) -> None:
        self.pages = {page.title: page for page in pages}
        self._folded = {folded(title): title for title in reversed(self.pages)}  # of equal ones the first
        # Several threads may read; SQLite serialises them.
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self._index.execute(
                "create virtual table page using fts5 (title, text, tokenize = 'unicode61 remove_diacritics 2')"
            )
        except sqlite3.OperationalError as error:
            raise TurnwiseError(
                f"wiki_search needs SQLite with FTS5, found {sqlite3.sqlite_version} without it. Use another build of Python."
            ) from error
        rows = ((page.title, "\n".join(page.lines)) for page in self.pages.values())
        self._index.executemany("insert into page values (?, ?)", rows)

    def page(self, title: str) -> Page | None:
        return self.pages.get(title) or self.pages.get(self._folded.get(folded(title), ""))

    def nearest(self, text: str, n: int) -> list[str]:
        """Titles of the pages that go best with the words of a text, the best first; a word in the title counts ten
        times.
        """
        # Quoted, a word is nothing but a word to FTS5, whatever it is.
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", text)[:16])
        if not words:
            return []
        query = "select title from page where page match ? order by bm25(page, 10.0, 1.0), rowid limit ?"
        return [str(title) for (title,) in self._index.execute(query, (words, n))]


@functools.lru_cache(maxsize=2)
def load_corpus(path: Path) -> Corpus:
    """Pages of a file, or of the files pages*.jsonl and pages*.parquet of a folder. Raises UsageError."""
    files = sorted([*path.glob("pages*.jsonl"), *path.glob("pages*.parquet")]) if path.is_dir() else [path]
    found: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for file in files:
        for where, row in read_rows(file, PAGES_WANTED):
            title, text = (text_of(row, key, file, where, PAGES_WANTED) for key in ("title", "text"))
            if title in found:
                raise bad_file(file, f"{where} has the title {title!r} again", PAGES_WANTED)
            found[title] = sentences(text), tuple(_links(row.get("links"), file, where))
    if not found:
        raise bad_file(path, "there is no page", PAGES_WANTED)
    # A link that leads nowhere is not shown.
    kept = {
        title: tuple(dict.fromkeys(link for link in links if link in found and link != title))
        for title, (_, links) in found.items()
    }
    return Corpus(Page(title, lines, kept[title]) for title, (lines, _) in found.items())


def _links(value: Any, path: Path, where: str) -> list[str]:
    links = [link.get("title") if isinstance(link, dict) else link for link in value] if isinstance(value, list) else []
    titles = [link for link in links if isinstance(link, str)]
    if len(titles) < len(links) or not isinstance(value, list | None):
        raise bad_file(path, f"{where} has 'links' that are no list of titles", PAGES_WANTED)
    return titles


@functools.lru_cache(maxsize=2)
def load_questions(path: Path, corpus_path: Path) -> tuple[Question, ...]:
    """Questions of a JSONL file about the corpus of the other path. Raises UsageError."""
    corpus = load_corpus(corpus_path)
    found: dict[str, Question] = {}
    for where, row in read_rows(path, QUESTIONS_WANTED):
        question, answer = (text_of(row, key, path, where, QUESTIONS_WANTED) for key in ("question", "answer"))
        if not normalise(answer):
            raise bad_file(
                path,
                f"{where} has the answer {answer!r}, of which nothing is left without articles and punctuation",
                QUESTIONS_WANTED,
            )
        split = row.get("split") or ""
        if split not in ("", *SPLITS):
            raise bad_file(path, f"{where} has a 'split' other than {', '.join(SPLITS)}", QUESTIONS_WANTED)
        name = str(row.get("id") or digest(question))
        if name in found:
            raise bad_file(path, f"{where} has the id {name!r} again", QUESTIONS_WANTED)
        evidence = row.get("evidence", row.get("support")) or []
        found[name] = Question(
            name, split, question, answer, tuple(_evidence(item, corpus, path, where) for item in evidence)
        )
    if not found:
        raise bad_file(path, "there is no question", QUESTIONS_WANTED)
    return tuple(found.values())


def _evidence(item: Any, corpus: Corpus, path: Path, where: str) -> Evidence:
    title, line = (item.get("title"), item.get("line")) if isinstance(item, dict) else (item, None)
    page = corpus.pages.get(title) if isinstance(title, str) else None
    if page is None or not (line is None or (isinstance(line, int) and 1 <= line <= len(page.lines))):
        raise bad_file(path, f"{where} has evidence {str(item)[:80]} that is not in the corpus", QUESTIONS_WANTED)
    return page.title, line


def evidence_f1(saved: Sequence[tuple[str, int]], wanted: Sequence[Evidence]) -> float:
    """Harmonic mean of the share of saved lines that are wanted and the share of wanted ones that are saved, in [0, 1]."""

    def fits(line: tuple[str, int], want: Evidence) -> bool:
        return line[0] == want[0] and want[1] in (None, line[1])

    right = sum(any(fits(line, want) for want in wanted) for line in saved)
    found = sum(any(fits(line, want) for line in saved) for want in wanted)
    if not right:
        return 0.0
    precision, recall = right / len(saved), found / len(wanted)
    return 2 * precision * recall / (precision + recall)
