"""The message behind a policy's own prompt that tells it what came of an earlier attempt.

`stages/sdpo.py` teaches by it, and a base model of its own can be made to read it (`stages/corpora/wide.py`). Source of
the form: arXiv 2601.20802. [ours]
"""

from __future__ import annotations

FEEDBACK = "An earlier attempt failed. This is what was said of it:"
WIN = "These replies of another attempt at the same task were right:"
REQUEST = "Now give the right reply."


def message(
    win: str, feedback: str, *, feedback_intro: str = FEEDBACK, win_intro: str = WIN, request: str = REQUEST
) -> str:
    """win: the replies of a won attempt; feedback: what was said of a lost one; either may be empty.

    What the environment said is put in as it is, and never read as a template.
    """
    parts = [(win_intro, win), (feedback_intro, feedback)]
    found = ["\n".join(filter(None, [intro, text.strip()])) for intro, text in parts if text.strip()]
    return "\n\n".join(filter(None, [*found, request]))
