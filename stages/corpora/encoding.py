"""Which tokens of an example are learned: its reply, or more. Ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stages.corpora import Example, agents

Ids = tuple[list[int], list[bool]]
"""A row's token ids, and which of them are learned."""


def encode_episode(tokenizer: Any, example: Example) -> Ids:
    """All behind the system message is learned, observations too: a small model learns sooner to copy and to count."""
    ids = tokenizer.apply_chat_template(agents.transcript(example), tokenize=True, return_dict=False)
    start = ids.index(tokenizer.convert_tokens_to_ids("<|user|>"))
    return ids, [t > start for t in range(len(ids))]


def encode_reply(tokenizer: Any, example: Example) -> Ids:
    """The last reply and its end token are learned."""
    ids = tokenizer.apply_chat_template(agents.transcript(example), tokenize=True, return_dict=False)
    start = _last(ids, tokenizer.convert_tokens_to_ids("<|assistant|>"))
    return ids, [t > start for t in range(len(ids))]


def encode_turns(tokenizer: Any, example: Example) -> Ids:
    """Earlier replies and what came of them, too; not the opening and the last message, which are drawn at random."""
    ids, learned = encode_reply(tokenizer, example)
    user, assistant = (tokenizer.convert_tokens_to_ids(f"<|{role}|>") for role in ("user", "assistant"))
    start, end = ids.index(assistant), _last(ids, user)
    return ids, [last or start < t <= end for t, last in enumerate(learned)]


def encode_thoughts(tokenizer: Any, example: Example) -> Ids:
    """Of earlier turns the objects thought of and the answers, too; not the questions, which are drawn at random."""
    ids, learned = encode_reply(tokenizer, example)
    user, assistant, thought = (
        tokenizer.convert_tokens_to_ids(token) for token in ("<|user|>", "<|assistant|>", "Thought:")
    )
    end, answered = _last(ids, user), False
    for t in range(ids.index(assistant), end):
        answered = ids[t] != assistant and (answered or ids[t - 1] == user)
        learned[t] = answered or ids[t - 1] == thought
    return ids, learned


def _last(ids: Sequence[int], token: int) -> int:
    return len(ids) - 1 - ids[::-1].index(token)
