"""Read a ReAct reply: a thought, which never reaches the environment, and an action, which does.

    Thought: ... Action: ...                             ReAct, arXiv 2210.03629
    <think>...</think><action>TOOL(args)</action>        Self-AC slides

Any case is accepted, and spaces before the colon: small models write both. A reply with an <action> tag is read by its
tags, every other one by "Action:". Text inside <think> is never an action. [ours]
"""

from __future__ import annotations

import re
from functools import lru_cache

from stages.frame.types import Malformed

_ACTION = re.compile(r"\baction\s*:", re.IGNORECASE)
_THOUGHT = re.compile(r"\bthought\s*:", re.IGNORECASE)
# A model may go on and invent the answer to its own action; nothing of that was done.
_INVENTED = re.compile(r"^\s*(?:observation|thought)\s*:", re.IGNORECASE | re.MULTILINE)
_TAGGED = re.compile(
    r"<think>(?P<thought>.*?)</think>|<action>(?P<action>(?:(?!</?action>).)*)</action>|(?P<unclosed><think>|<action>)",
    re.IGNORECASE | re.DOTALL,
)
_THINK = re.compile(r"</?think>", re.IGNORECASE)
_OPENED = re.compile(r"<think>\s*\Z", re.IGNORECASE)


@lru_cache(maxsize=1024)  # a reply is read by the rollout and by its environment
def parse_react(text: str) -> tuple[str, str]:
    """(thought, action) of 'Thought: ... Action: ...' or '<think>...</think><action>...</action>'; of several actions
    the last one counts.

    The thought is what stands in the last <think>, or after the last 'Thought:', before that action; it may be empty.
    The action stands between its tags; without tags it is the rest, up to an invented observation or thought.
    Raises Malformed where there is no action, nothing in it, or a tag that is never closed.
    """
    first = _THINK.search(text)
    if first and first[0].startswith("</"):
        text = f"<think>{text}"  # a chat template opened it in the prompt
    found: tuple[str, str] | None = None
    thought, outside, unclosed, end = "", "", "", 0
    for item in _TAGGED.finditer(text):
        outside, end = outside + text[end : item.start()], item.end()
        if item["thought"] is not None:
            thought = item["thought"].strip()
        elif item["action"] is not None:
            found = thought or outside.strip(), item["action"].strip()
            thought = outside = ""
        else:
            unclosed = item["unclosed"].lower()
            if unclosed == "<think>":
                break  # all that follows is thought
    if found and not found[1]:
        raise Malformed("nothing between <action> and </action> in the reply")
    if found:
        return found  # what is open behind it was invented, like an observation
    if unclosed:
        raise Malformed(f"the tag {unclosed} is not closed in the reply; end it with </{unclosed[1:]}")
    said, action = _by_words(outside + text[end:])
    return said or thought, action


def opened_thought(prompt: str) -> str:
    """The <think> that a chat template opens at the end of a prompt, with the white space behind it; "" = none."""
    found = _OPENED.search(prompt)
    return found[0] if found else ""


def without_thought(text: str) -> str:
    """A reply without the <think> part in front of it. Raises Malformed where that is never closed.

    A part that the prompt opened may begin without its tag. Text with none in front is given back as it is.
    """
    first = _THINK.search(text)
    if first is None or (not first[0].startswith("</") and text[: first.start()].strip()):
        return text
    closed = next((tag for tag in _THINK.finditer(text) if tag[0].startswith("</")), None)
    if closed is None:
        raise Malformed(
            "the tag <think> is not closed in the reply; end it with </think>, within roles.max_thought_tokens"
        )
    return text[closed.end() :].lstrip()


def thought_of(text: str) -> str:
    """What stands in the <think> part in front of a reply; "" where it is missing, empty or without an end."""
    try:
        return _THINK.sub("", text.removesuffix(without_thought(text))).strip()
    except Malformed:
        return ""


def _by_words(text: str) -> tuple[str, str]:
    actions = list(_ACTION.finditer(text))
    if not actions:
        raise Malformed("no 'Action:' in the reply")
    action = _INVENTED.split(text[actions[-1].end() :], maxsplit=1)[0].strip()
    if not action:
        raise Malformed("nothing after 'Action:' in the reply")
    return _THOUGHT.split(text[: actions[-1].start()])[-1].strip(), action
