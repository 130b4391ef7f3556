"""When two short answers are the same: exact match and F1 after SQuAD's normalisation, with dates in either order.

Source: SQuAD's evaluation (arXiv 1606.05250): lower case, no punctuation, no articles, single spaces. Departure: "17
March 1962" and "March 17, 1962" are one date.
"""

from __future__ import annotations

import re
import string
from collections import Counter

_MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december"
_MONTH_FIRST = re.compile(rf"\b({_MONTHS}) ([0-9]{{1,2}}) ([0-9]{{4}})\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(answer: str) -> str:
    """The answer as it is compared."""
    text = re.sub(r"\b(a|an|the)\b", " ", answer.lower().translate(_PUNCTUATION))
    return _MONTH_FIRST.sub(r"\2 \1 \3", " ".join(text.split()))


def exact_match(answer: str, gold: str) -> bool:
    """Nothing equals an answer of which nothing is left, such as "the"."""
    return bool(normalise(answer)) and normalise(answer) == normalise(gold)


def f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall over words, in [0, 1]."""
    given, wanted = normalise(answer).split(), normalise(gold).split()
    shared = (Counter(given) & Counter(wanted)).total()
    return 2 * shared / (len(given) + len(wanted)) if shared else 0.0
