"""Tools of another library's environment for a policy that reads and writes only text. The system message lists them;
the action of a ReAct reply calls them. Ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stages.frame.border import At, text_of
from stages.frame.react import parse_react
from stages.frame.types import Malformed, Message

FORM = '{"name": "<tool>", "arguments": {<arguments>}}'

_TOLD = """# Available tools
{tools}

To call one, end your reply with:
Action: {form}
The action must be valid JSON. What the tool gives back follows as "Tool output: ...". A reply without such an action calls no tool."""


def with_tools(system: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """The system message, and what tools there are (OpenAI's form) where there are any."""
    if not tools:
        return system
    listed = "\n".join(_rendered(tool.get("function", tool)) for tool in tools)
    return "\n\n".join(filter(None, [system, _TOLD.format(tools=listed, form=FORM)]))


def _rendered(function: Mapping[str, Any]) -> str:
    arguments = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
    return f"{function['name']}: {function.get('description') or ''}\n  arguments: {arguments}"


def spoken(reply: str, tools: Sequence[Mapping[str, Any]], call_id: str) -> Message:
    """A reply as an assistant's message: with a tool call where there are tools and its action is a JSON object.
    Raises Malformed where that object is none, or no call.
    """
    message: Message = {"role": "assistant", "content": reply}
    if not tools:
        return message
    try:
        action = parse_react(reply)[1]
    except Malformed:
        return message  # said, not done: what comes of it is the environment's affair
    if not action.startswith("{"):
        return message
    try:
        call = json.loads(action)
    except (ValueError, RecursionError):
        raise Malformed(f"the action is not valid JSON; wanted {FORM}") from None
    if not isinstance(call.get("name"), str) or not isinstance(call.get("arguments"), dict):
        raise Malformed(f"the action is no call of a tool; wanted {FORM}")
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    return {**message, "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def observed(message: Mapping[str, Any]) -> Message:
    """An environment's message as the policy sees it. A tool's output comes from a user, because the policy's call is
    text for its chat template. Raises BrokenEnvironment for what is no text.
    """
    at, content = At("verifiers", "an observation"), message.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
            raise at.broken("texts", "another kind of content", "wrap the environment in one that describes it")
        content = "\n".join(text_of(at, "part", part.get("text")) for part in content)
    text = text_of(at, "content", content or "(nothing)")
    return {"role": "user", "content": f"Tool output: {text}" if message.get("role") == "tool" else text}
