"""Episodes of the policy in math, game24 and wiki_search, from which the base model of these tasks is made.

They teach form and basics: a problem's steps with right and wrong results, legal moves, well-formed tool use. They do
not teach what wins an episode. [ours]
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from stages.corpora import Example, by_share, game24_trees, math_chains, wiki_walks
from stages.frame.types import Message
from stages.llm.roles import Roles, load_roles

SHARE = {"math": 0.5, "game24": 0.25, "wiki_search": 0.25}
"""Of the episodes; those of math are the shortest."""

MAKERS: dict[str, Callable[[random.Random, Roles], Example]] = {
    "math": math_chains.example, "game24": game24_trees.example, "wiki_search": wiki_walks.example,
}  # fmt: skip


def prompts() -> dict[str, Roles]:
    """The prompt folder of each task."""
    return {task: load_roles(task) for task in SHARE}


def example(rng: random.Random, prompts: Mapping[str, Roles], task: str | None = None) -> Example:
    """One episode, of the given task or of a random one by SHARE."""
    chosen = task or by_share(rng, SHARE)
    return MAKERS[chosen](rng, prompts[chosen])


def transcript(e: Example) -> list[Message]:
    return [*e.messages, {"role": "assistant", "content": e.reply}]


def texts(prompts: Mapping[str, Roles], n: int = 3000) -> list[str]:
    """What the tokenizer is learned from: all that n random episodes say."""
    rng = random.Random("vocabulary")
    return [str(message["content"]) for _ in range(n) for message in transcript(example(rng, prompts))]
