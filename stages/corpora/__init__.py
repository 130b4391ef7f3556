"""Training text of the small base models, made by code, one module for each kind. Ours."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from stages.frame.types import Message

if TYPE_CHECKING:
    from stages.llm.roles import Roles

T = TypeVar("T")


@dataclass(frozen=True)
class Example:
    """A prompt and a reply to it.

    Of policy and successor the reply is one of many right ones. An agent's episode has its environment's name as role.
    """

    role: str
    messages: tuple[Message, ...]
    reply: str


def by_share(rng: random.Random, share: Mapping[T, float]) -> T:
    """One of the keys, drawn by their weights."""
    return rng.choices(list(share), weights=list(share.values()))[0]


def scene(corpus: Any, rng: random.Random, roles: Roles, n: int) -> list[Example]:
    """Examples of n roles, drawn by the corpus's SHARE, each with the same seed. In a corpus that draws its world first
    they speak of one world, and their prompts begin alike. n: at most the number of roles.
    """
    left, seed, found = dict(corpus.SHARE), rng.getrandbits(64), []
    for _ in range(n):
        role = by_share(rng, left)
        del left[role]
        found.append(corpus.example(random.Random(seed), roles, role))
    return found


def vocabulary(examples: Iterable[Example], more: Iterable[str]) -> list[str]:
    """Every word of the examples and of further texts; "." and "," are words."""
    texts = [str(m["content"]) for e in examples for m in [*e.messages, {"content": e.reply}]]
    return sorted({word for text in [*texts, *more] for word in text.replace(".", " . ").replace(",", " , ").split()})
