"""Your own corpus, a module of the project folder: `pretrain.corpus = "my.words"` is my/words.py. It exports

    SHARE                      role -> its share of the examples
    example(rng, roles, role)  -> an `Example` of the role, or, where it is None, of a random one by SHARE
    right(row, said)           optional: whether a reply to a row of the probe is right, by the name of a score

Its texts have single spaces between words: the model has one token a word. Ours; docs/how-to/small-model.md has a full
example.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from stages.corpora import vocabulary
from stages.frame.own import own_module
from stages.frame.react import parse_react
from stages.frame.types import Malformed
from stages.llm.roles import Roles, parse_evaluation, parse_future

EXPORTS = ("SHARE", "example")
READ: dict[str, Callable[[str], Any]] = {
    "policy": parse_react, "refiner": parse_react, "successor": parse_future, "combine": parse_future, "evaluator": parse_evaluation,
}  # fmt: skip


def load(name: str) -> Any:
    """The module. Raises UsageError as `own_module`."""
    return own_module("pretrain.corpus", name, EXPORTS)


def words(corpus: Any, roles: Roles, n: int = 5000) -> list[str]:
    """The vocabulary: every word of n examples, of the value prompt, and what stands for nothing in a prompt."""
    rng = random.Random("vocabulary")
    made = [corpus.example(rng, roles, None) for _ in range(n)]
    return vocabulary(made, [roles.templates["value"], "none unreadable"])


def readable(row: Mapping[str, Any], said: str) -> dict[str, bool]:
    """Whether a reply can be read as one of its role; of a role without a form, whether it is the expected one."""
    role = str(row["role"])
    if role not in READ:
        return {role: said == row["reply"]}
    try:
        READ[role](said)
    except Malformed:
        return {role: False}
    return {role: True}
