"""Reading of a ReAct reply: a thought, which never touches the environment, and an action, which does.

Source: ReAct, arXiv 2210.03629. Spaces before the colon and any case are accepted: small models write both.
"""

from __future__ import annotations

import re

from stages.types import Malformed

_ACTION = re.compile(r"\baction\s*:", re.IGNORECASE)
_THOUGHT = re.compile(r"\bthought\s*:", re.IGNORECASE)
# A model may go on and invent the answer to its own action; nothing of that was done.
_INVENTED = re.compile(r"^\s*(?:observation|thought)\s*:", re.IGNORECASE | re.MULTILINE)


def parse_react(text: str) -> tuple[str, str]:
    """(thought, action) of 'Thought: ... Action: ...'; of several actions the last one counts.

    The thought is what stands between the last 'Thought:' before that action and the action; it may be empty.
    The action is the rest, up to a line that begins an invented observation or thought.
    Raises Malformed where there is no 'Action:' or nothing after it.
    """
    actions = list(_ACTION.finditer(text))
    if not actions:
        raise Malformed("no 'Action:' in the reply")
    action = _INVENTED.split(text[actions[-1].end() :], maxsplit=1)[0].strip()
    if not action:
        raise Malformed("nothing after 'Action:' in the reply")
    return _THOUGHT.split(text[: actions[-1].start()])[-1].strip(), action
