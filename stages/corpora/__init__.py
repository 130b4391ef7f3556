"""What the small base models are taught: text made by code, one module a kind. Ours."""

from __future__ import annotations

from dataclasses import dataclass

from stages.frame.types import Message


@dataclass(frozen=True)
class Example:
    """A prompt and a reply to it.

    Of the desk's roles only this reply is learned (policy and successor: one of many right ones). Of an agent's episode
    all that follows its system message is learned; its role is the name of its environment.
    """

    role: str
    messages: tuple[Message, ...]
    reply: str
