"""An engine that counts the tokens it reads and generates, one of four costs (episodes, environment steps, tokens,
seconds).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from stages.frame.types import Completion, Engine, Message, More, Replies, Request, Sleeper, Wait
from stages.llm.streams import stream


class Metered:
    """`Engine` around another one. What it counts it counts from its making on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tokens = 0
        self.requests = 0
        self.read: Counter[str] = Counter()  # role -> tokens of its prompts
        self.cached: Counter[str] = Counter()  # role -> those of them that the engine still had, where it says so

    @property
    def model_hash(self) -> str:
        return self._engine.model_hash

    @property
    def context(self) -> int | None:
        return self._engine.context

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        completions = self._engine.generate(requests)
        self._count(zip(requests, completions, strict=True))
        return completions

    def stream(self, more: More) -> Replies:
        """In ticks where the engine is no `Streamer`."""
        under_way: dict[int, Request] = {}

        def noted(wait: Wait) -> Sequence[tuple[int, Request]] | None:
            asked = more(wait)
            under_way.update(asked or ())
            return asked

        with closing(stream(self._engine, noted)) as replies:
            for ended in replies:
                self._count((under_way.pop(number), completion) for number, completion in ended)
                yield ended

    def _count(self, pairs: Iterable[tuple[Request, Completion]]) -> None:
        for request, completion in pairs:
            self.requests += 1
            self.tokens += len(completion.token_ids)
            self.read[request.role] += len(request.prompt_ids)
            if completion.cached is not None:
                self.cached[request.role] += completion.cached

    def told(self) -> dict[str, Any]:
        """What it has counted, as plain JSON."""
        return {"requests": self.requests, "tokens": self.tokens, "read": self.read, "cached": self.cached}

    def add(self, told: Mapping[str, Any]) -> None:
        """Count what another one has counted, too."""
        self.requests += told["requests"]
        self.tokens += told["tokens"]
        self.read.update(told["read"])
        self.cached.update(told["cached"])

    def metrics(self, stage: str) -> dict[str, float]:
        """Of the stage; none where nothing was asked. cached_share is there where the engine says."""
        if not self.requests:
            return {}
        found: dict[str, float] = {
            "requests": self.requests,
            "generated_tokens": self.tokens,
            "read_tokens": self.read.total(),
        }
        found |= {f"read_tokens/{role}": n for role, n in self.read.items()}
        found |= {f"cached_share/{role}": n / self.read[role] for role, n in self.cached.items()}
        return {f"{stage}/{name}": float(value) for name, value in found.items()}

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self._engine.encode(messages)

    def count_controls(self, messages: Sequence[Message]) -> int:
        return self._engine.count_controls(messages)

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
