"""An engine that counts what it generates: tokens are one of the four axes of cost (episodes, environment steps,
tokens, seconds).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from stages.frame.types import Completion, Engine, Message, More, Replies, Request, Sleeper
from stages.llm.streams import stream


class Metered:
    """`Engine` around another one. `tokens` and `requests` are counted from its making on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tokens = 0
        self.requests = 0

    @property
    def model_hash(self) -> str:
        return self._engine.model_hash

    @property
    def context(self) -> int | None:
        return self._engine.context

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return self._counted(self._engine.generate(requests))

    def stream(self, more: More) -> Replies:
        """In ticks where the engine is no `Streamer`."""
        with closing(stream(self._engine, more)) as replies:
            for ended in replies:
                self._counted([completion for _, completion in ended])
                yield ended

    def _counted(self, completions: list[Completion]) -> list[Completion]:
        self.requests += len(completions)
        self.tokens += sum(len(completion.token_ids) for completion in completions)
        return completions

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self._engine.encode(messages)

    def encode_all(self, chats: Sequence[Sequence[Message]]) -> list[tuple[int, ...]]:
        return self._engine.encode_all(chats)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._engine.decode(token_ids)

    def load_adapter(self, name: str, path: Path) -> None:
        self._engine.load_adapter(name, path)

    def sleep(self) -> None:
        """Where the engine can."""
        if isinstance(self._engine, Sleeper):
            self._engine.sleep()
