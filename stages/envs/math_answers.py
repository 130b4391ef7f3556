"""Where the answer of a free-text reply stands: in a box, else at the end. Linear in the length of the reply."""

from __future__ import annotations

import re
from fractions import Fraction

_TOKEN = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?"
# A minus belongs to the number where nothing stands before it that it could be taken from.
_NUMBER = re.compile(rf"(?:(?<![\w)\]}}.])[-−])?(?<![\w.]){_UNSIGNED}")
_LONGEST = 40  # characters of a number that is read; int() itself refuses 4,300 digits


def boxes(text: str) -> list[str]:
    r"""Contents of each \boxed{...}, the outermost of nested ones; a box that is not closed is none."""
    found: list[str] = []
    starts: list[int] = []  # of each brace that is open: where its box's content starts, or -1
    open_boxes = 0
    for token in _TOKEN.finditer(text):
        if token[0] == "}" and starts:
            start = starts.pop()
            open_boxes -= start >= 0
            if start >= 0 and not open_boxes:
                found.append(text[start : token.start()])
        elif token[0] == "{" or token[0].startswith(r"\boxed"):
            starts.append(token.end() if len(token[0]) > 1 else -1)
            open_boxes += len(token[0]) > 1
    return found


def whole_answer(reply: str, *, boxed_only: bool) -> Fraction | None:
    """The number that a reply gives as its answer: that in its boxes, which must agree, else (not with boxed_only) the
    last one.
    """
    if inside := boxes(reply):
        values = {_number(box.strip(" $")) for box in inside}
        return values.pop() if len(values) == 1 else None
    last = None if boxed_only else next(iter(reversed(_NUMBER.findall(reply))), None)
    return _number(last) if last else None


def _number(text: str) -> Fraction | None:
    if len(text) > _LONGEST or not _NUMBER.fullmatch(text):
        return None
    whole, _, below = text.replace(",", "").replace("−", "-").partition("/")
    return Fraction(whole) / int(below or 1) if int(below or 1) else None
