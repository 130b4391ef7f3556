"""Passages of 2WikiMultihopQA as pages with links, and two-hop questions about directors' birthdays. Ours.

    link        a page's text mentions another page's title (without its sense in brackets), and only one page has it
    question    "When was the director of X born?": the page X says "directed by N", N is one of its links, and N's page
        has a date in brackets

Links come from names only, so one can lead to a namesake. The answer of a question is what the linked page says.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from stages.envs.splits import digest, place
from stages.sources.convert import json_lines

TEST_QUESTIONS = 100

_SENSE = re.compile(r"\s*\([^)]*\)\s*$")
_WORD = re.compile(r"\b[A-Z0-9][\w'-]*")
# A name of one word is often a common word, a part of a name or of a title: it must be long and stand free.
_ONE_WORD, _ANY_NAME = 7, 5
_FREE, _END = re.compile(r"[ ,.(]|$"), re.compile(r"\W|$")
# A name goes on while words begin with a capital, so that "N. It" is no name, and neither is "N. The".
_DIRECTED = re.compile(r"directed by ((?:[A-Z][\w.'\-]+\s?)+)")
_BORN = re.compile(r"\([^)]*?((?:\d{1,2} [A-Z][a-z]+|[A-Z][a-z]+ \d{1,2},) \d{4})")

Link = tuple[str, str]
"""(anchor, title)."""


def pages(raw: bytes) -> bytes:
    """The corpus as title, text, links [{anchor, title}]."""
    return json_lines(
        {"title": title, "text": text, "links": [{"anchor": anchor, "title": to} for anchor, to in links]}
        for title, (text, links) in _linked(raw).items()
    )


def questions(raw: bytes) -> bytes:
    """Questions as id, split, question, answer, start, support; a fixed hundred of them are the test split."""
    found = sorted(_questions(raw), key=lambda row: place(row["id"], 0))
    return json_lines(
        {"id": row["id"], "split": "test" if i < TEST_QUESTIONS else "train", **row} for i, row in enumerate(found)
    )


def _questions(raw: bytes) -> Iterator[dict[str, Any]]:
    corpus = _linked(raw)
    for title, (text, links) in corpus.items():
        named = _DIRECTED.search(text)
        director = dict(links).get(named[1].strip(" .")) if named else None
        born = _BORN.search(corpus[director][0]) if director else None
        if born:
            question = f'When was the director of "{title}" born?'
            yield {
                "id": digest(question),
                "question": question,
                "answer": born[1],
                "start": title,
                "support": [title, director],
            }


@lru_cache(maxsize=1)
def _linked(raw: bytes) -> dict[str, tuple[str, list[Link]]]:
    """title -> (text, links sorted by anchor)."""
    texts = {row["title"]: row["text"] for row in json.loads(raw)}
    anchors = _anchors(list(texts))
    by_word: dict[str, list[str]] = defaultdict(list)
    for anchor in anchors:
        by_word[anchor.split()[0]].append(anchor)
    return {
        title: (text, sorted((a, anchors[a]) for a in _mentions(text, by_word) if anchors[a] != title))
        for title, text in texts.items()
    }


def _anchors(titles: list[str]) -> dict[str, str]:
    """Names that only one page has -> its title."""
    names = {title: _SENSE.sub("", title).strip() for title in titles}
    count = Counter(names.values())
    return {name: title for title, name in names.items() if count[name] == 1 and _can_be_anchor(name)}


def _can_be_anchor(name: str) -> bool:
    first = _WORD.match(name)
    if first is None or len(name) < _ANY_NAME:
        return False
    return len(name) >= _ONE_WORD if " " not in name else name[first.end()] == " "


def _mentions(text: str, by_word: dict[str, list[str]]) -> set[str]:
    """The names that stand in the text, one within another too."""
    found = set()
    for word in _WORD.finditer(text):
        for name in by_word.get(word[0], ()):
            end = word.start() + len(name)
            if text.startswith(name, word.start()) and (_END if " " in name else _FREE).match(text, end):
                found.add(name)
    return found
