"""The engine of a replay: it encodes and decodes as the run's own did, and never generates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from stages.frame.types import Completion, Message, Request, TurnwiseError
from stages.llm.tokens import ChatTokenizer

if TYPE_CHECKING:
    from flows.presets import RunConfig


class Mute(ChatTokenizer):
    """Over a model's folder."""

    @cached_property
    def model_hash(self) -> str:
        from stages.llm.hf import model_hash

        return model_hash(self._path)

    @cached_property
    def context(self) -> int | None:
        from transformers import AutoConfig

        found: int | None = getattr(AutoConfig.from_pretrained(self._path), "max_position_embeddings", None)
        return found

    def load_adapter(self, name: str, path: Path) -> None:
        return None

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        raise TurnwiseError("a replay asked for a reply: this stage is no function of what is stored")


class MuteScript:
    """Of the scripted engine, whose tokens are bytes."""

    def __init__(self) -> None:
        from stages.llm.scripted import ScriptedEngine

        self._script = ScriptedEngine()
        self.model_hash, self.context = self._script.model_hash, self._script.context

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self._script.encode(messages)

    def encode_all(self, chats: Sequence[Sequence[Message]]) -> list[tuple[int, ...]]:
        return self._script.encode_all(chats)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._script.decode(token_ids)

    def load_adapter(self, name: str, path: Path) -> None:
        return None

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        raise TurnwiseError("a replay asked for a reply: this stage is no function of what is stored")


def mute(run: RunConfig) -> Mute | MuteScript:
    """The engine's tokenizer, from the folder `model.path`."""
    return MuteScript() if run.model.engine == "scripted" else Mute(run.model.path)
