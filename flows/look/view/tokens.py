"""Token ids as pieces of text, by the model's tokenizer file alone: loading a whole tokenizer takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

Pieces = Callable[[Sequence[int]], list[str]]

FILE = "tokenizer.json"


def pieces_of(model: str) -> Pieces | None:
    """A function from ids to one text each; joined, they are the text. A character of several tokens stands at the last
    one. None where the model has no such file here. model: a folder, or a name in the hub's cache.
    """
    file = _file(model)
    if file is None:
        return None
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # what the library raises for a file it cannot read; the page does without pieces
        return None

    def pieces(ids: Sequence[int]) -> list[str]:
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(tokenizer, token) or "" for token in ids]

    return pieces


def _file(model: str) -> Path | None:
    folder = Path(model)
    if folder.is_dir():
        return folder / FILE if (folder / FILE).is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, FILE)
    except HFValidationError:  # no name that the hub can have
        return None
    return Path(found) if isinstance(found, str) else None
