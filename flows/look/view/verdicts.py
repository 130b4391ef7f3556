"""The outcome of an episode, and where the critic disagrees with it. Ours, as the audit counts it.

Only judgements of the action that the episode took are compared: the audit's, or one of an equal fresh action. A
disagreement is no proof: an action may be right in an episode that is lost later.
"""

from __future__ import annotations

from stages.frame.react import parse_react
from stages.frame.types import Malformed, Outcome, Row

WRONG = {"yes_lost": "said Yes, and the episode was lost", "no_won": "said No, and the episode was won"}
"""How critic and outcome can disagree."""
_KINDS = {("yes", "lost"): "yes_lost", ("no", "won"): "no_won"}


def result(episode: Row) -> str:
    """ "won" | "lost" | "failed": an infrastructure failure says nothing of the policy."""
    if not Outcome(episode["outcome"]).trainable:
        return "failed"
    return "won" if episode["total_reward"] >= 1 else "lost"


def is_taken(judgement: Row, action: str) -> bool:
    """Whether the judged action is the one that the episode took in this turn, `action`."""
    own = judgement["info"].get("own")
    return bool(own) if own is not None else read_action(judgement["action"]) == action


def disagreement(judgement: Row, action: str, became: str) -> str:
    """A key of WRONG; "" where critic and outcome agree or cannot be compared. action: the one that the episode took."""
    kind = _KINDS.get((judgement["verdict"], became), "")
    return kind if kind and is_taken(judgement, action) else ""


def read_action(text: str) -> str:
    """The action of a reply. A text that is no reply is itself the action."""
    try:
        return parse_react(text)[1]
    except Malformed:
        return text.strip()
