"""The engine of a replay: it encodes and decodes as the run's own did, and never generates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from flows.keep.recompute import compare
from flows.keep.recompute.compare import Compared, Stored
from flows.presets import RunConfig
from stages.frame.contract import Context
from stages.frame.types import Completion, Request, TurnwiseError
from stages.llm.scripted import ScriptedEngine
from stages.llm.tokens import ChatTokenizer


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
        raise _asked()


class MuteScript(ScriptedEngine):
    """Of the scripted engine, whose tokens are bytes."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        raise _asked()


DECODES = ("hf", "scripted")
"""Engines whose text of a reply is what its ids decode to; a server's may stand otherwise."""


def written(context: Context, stored: Stored, said: Iterable[tuple[str, str, Sequence[int]]]) -> Compared:
    """Replies (where, text, ids) held against each other, where the ids can be decoded and their engine's text is that."""
    can = stored.has_model and context.run.model.engine in DECODES
    return compare.replies(said, context.engine.decode) if can else Compared()


def _asked() -> TurnwiseError:
    return TurnwiseError("a replay asked for a reply: this stage is no function of what is stored")


def mute(run: RunConfig) -> Mute | MuteScript:
    """The engine's tokenizer, from the folder `model.path`."""
    return MuteScript() if run.model.engine == "scripted" else Mute(run.model.path)
