"""A model's folder as the libraries read it. An error is one sentence that names the bad file.

These libraries raise all kinds of errors (a KeyError, a ZeroDivisionError, tokenizers a plain Exception). transformers
ignores what it cannot read of generation_config.json. So all JSON is checked first, and every reading step catches all
errors. Ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.frame.types import TurnwiseError, UsageError

GENERATION = "generation_config.json"
OBJECTS = ("config.json", GENERATION, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")  # fmt: skip
FETCHED = "models"
"""Folder, in data/, of the models that `turnwise data fetch` brings."""
SHOWN = 200  # characters of what a library said


def check_folder(path: str) -> None:
    """Raises UsageError if `path` looks like a folder but does not exist: as a hub name it would be looked up in the
    network. Raises it, too, if a file of the folder is not valid JSON, text or weights.
    """
    from safetensors import safe_open

    folder = Path(path)
    fetched = folder.parent.name == FETCHED
    if not folder.is_dir() and (fetched or (folder.parent != Path() and folder.parent.is_dir())):
        made = f"turnwise data fetch {folder.name}" if fetched else "turnwise pretrain"
        raise UsageError(f"model.path: there is no folder {path!r}; it is made by: {made}")
    for name in OBJECTS:
        if (folder / name).exists():
            with reading(path, name):
                if not isinstance(json.loads((folder / name).read_text(encoding="utf-8")), dict):
                    raise ValueError("it holds no JSON object")
    for file in folder.glob("*.jinja"):
        with reading(path, file.name):
            file.read_text(encoding="utf-8")
    for file in sorted(folder.glob("*.safetensors")):
        with reading(path, file.name), safe_open(file, "numpy"):
            pass


@contextmanager
def reading(path: str, *files: str) -> Iterator[None]:
    """A block that reads these files of the model at `path`. Raises UsageError for all that goes wrong in it."""
    try:
        yield
    except TurnwiseError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:SHOWN]
        if not Path(path).is_dir():
            raise UsageError(f"model.path: no model that transformers can load at {path!r} ({said})") from error
        raise UsageError(
            f"model.path: {' or '.join(files)} at {path!r} cannot be read ({said}); take the file anew from where the model came from"
        ) from error
