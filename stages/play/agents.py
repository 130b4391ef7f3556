"""How a reply of the policy becomes turns: one (ReAct), or one for each thought of a chain (CoT).

    react   a turn is a thought and an action; the environment gets the reply and reads the action in it
    cot     the whole reply is the action. The parts between its blank lines are its thought factors, a turn each. Only
            the last has an observation: it ends with the end token and carries the environment's answer to the reply

Source: Self-AC slides, the three agents. The third, ToT, is ReAct on a tree (envs/game24.py).
A factor is tokens of the reply as the engine produced them: nothing is encoded again. [ours]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

from stages.frame.react import parse_react
from stages.frame.sections import Agent
from stages.frame.types import Completion, Turn

_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")


def read_reply(agent: Agent, text: str) -> tuple[str, str]:
    """(thought, action) of a reply; of a chain of thought all is action. Raises Malformed where it cannot be read."""
    return parse_react(text) if agent == "react" else ("", text.strip())


def turns_of(agent: Agent, reply: Turn, decode: Callable[[Sequence[int]], str]) -> list[Turn]:
    """The turns that record a reply: one turn, or one for each factor. `reply`: the turn of the whole reply, with its
    answer.

    Factor k's prompt is the reply's prompt with the factors before it. `index` counts on; `state_len` stays, because no
    message holds a part of a reply. All but the last have reward 0, no observation, and end nothing. A malformed reply
    stays one turn, like one without token ids.
    """
    whole = reply.completion
    if agent == "react" or reply.malformed or not whole.token_ids:
        return [reply]
    text_of = cache(lambda token: decode([token]))
    spans = cut_at_blank_lines(whole.token_ids, [text_of(token) for token in whole.token_ids])
    found = []
    for k, (start, end) in enumerate(spans):
        last = end == len(whole.token_ids)
        ids = whole.token_ids[start:end]
        text = decode(ids)
        done = Completion(text, ids, whole.log_probs[start:end], whole.finish_reason if last else "cut")
        share = replace(
            reply, index=reply.index + k, prompt_ids=(*reply.prompt_ids, *whole.token_ids[:start]), completion=done, action=text.strip(),
            seconds=reply.seconds * len(ids) / len(whole.token_ids),
        )  # fmt: skip
        found.append(share if last else replace(share, reward=0.0, observation="", terminated=False, truncated=False))
    return found


def cut_at_blank_lines(token_ids: Sequence[int], texts: Sequence[str]) -> list[tuple[int, int]]:
    """(start, end) of every factor of a reply, end exclusive: all of its tokens, in order. None of an empty one.

    A factor ends with the token that completes a blank line behind something said, and with all tokens of white space
    directly after. So no factor is empty unless the reply is. If a token contains a blank line and text after it, all
    of it belongs to the factor that it ends.
    texts: each token's own, "" for one that is not said, like the end token. Raises ValueError without one a token.
    """
    if len(texts) != len(token_ids):
        raise ValueError(f"wanted the text of each of {len(token_ids)} tokens, found {len(texts)}")
    starts = [0]
    # the factor from its last character that is no white space on; whether it has its blank line
    tail = ""
    complete = False
    for i, text in enumerate(texts):
        if complete and text.strip():
            starts.append(i)
            tail, complete = "", False
        tail = tail + text if tail else text.lstrip()
        complete = complete or _BLANK_LINE.search(tail) is not None
        tail = tail[max(len(tail.rstrip()) - 1, 0) :]
    return list(pairwise([*starts, len(texts)])) if texts else []
