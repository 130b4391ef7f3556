"""Find long runs of words in a text that come from what its writer should not have known. Ours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

_WORD = re.compile(r"\w+")


def leaked_piece(text: str, privileged: Iterable[str], known: str, *, words: int) -> str:
    """The longest run of `words` or more words that the text shares with privileged texts and not with `known`, or "".

    Case, punctuation and white space count for nothing. Every stretch of `words` words in the run is in a privileged
    text, and none is in `known`. A stretch in `known` could come from there. A paraphrase is missed. Raises ValueError
    if words < 1.
    """
    if words < 1:
        raise ValueError(f"words must be >= 1, found {words}")
    said = _words(text)
    secret = {run for other in privileged for run in _runs(_words(other), words)} - set(_runs(_words(known), words))
    leaks = groupby(enumerate(run in secret for run in _runs(said, words)), key=lambda found: found[1])
    spans = [[i for i, _ in group] for leaked, group in leaks if leaked]
    longest = max(spans, key=len, default=None)
    return " ".join(said[longest[0] : longest[-1] + words]) if longest else ""


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _runs(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
