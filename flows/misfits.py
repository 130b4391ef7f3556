"""Says in one sentence what does not fit a config: the key, the value found, and a right one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import get_args

from pydantic import BaseModel, ValidationError

from stages.envs import nearest
from stages.frame.contract import RETIRED_KEY
from stages.frame.sections import NOT_A_URL

SHOWN = 80  # letters of a name or value that is quoted in an error


def sentence(error: ValidationError, root: type[BaseModel]) -> str:
    """The first problem in one sentence. An unknown key comes before a wrong value, because it is often the cause.
    root: the config that did not fit.
    """
    first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    path = [str(part) for part in first["loc"]]
    key = ".".join(path)
    if first["type"] != "extra_forbidden":
        reason = first["msg"][:1].lower() + first["msg"][1:]
        if first["type"] in (NOT_A_URL, RETIRED_KEY):
            return f"{key}: {reason}."
        return f"{key}: {reason}; found {quoted(str(first['input']))!r}."
    what = "section or key" if len(path) == 1 else "key"
    same_name = [name for name in _keys(root) if name.endswith(f".{path[-1]}")]
    meant = f"; did you mean {' or '.join(same_name)}?" if same_name else _meant(path[-1], _section(path[:-1], root))
    return f"There is no {what} {key!r}{meant}"


def quoted(text: str) -> str:
    """The beginning of a user's text, for a quote in an error. A URL's password is left out."""
    return re.sub(r"//.*@", "//***@", text, flags=re.DOTALL)[:SHOWN]


def _meant(word: str, section: type[BaseModel]) -> str:
    """The end of the sentence: keys with these words in their description, the nearest key, or all keys."""
    words = word.lower().split("_")
    said = [
        repr(key)
        for key, info in section.model_fields.items()
        if len(words) > 1 and " ".join(words) in (info.description or "").lower()
    ]
    if said:
        return f"; did you mean {' or '.join(said)}?"
    end = nearest(word, known := list(section.model_fields))
    return f"; it has {', '.join(known)}." if end == "." else end


def _section(path: Sequence[str], root: type[BaseModel]) -> type[BaseModel]:
    """The config that a path of keys leads to. Names that are no key, as of a table of sections, are skipped."""
    model = root
    for name in path:
        if name not in model.model_fields:
            continue
        held = model.model_fields[name].annotation
        inner = [one for one in (held, *get_args(held)) if isinstance(one, type) and issubclass(one, BaseModel)]
        if not inner:
            break
        model = inner[0]
    return model


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All dotted keys of a config."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _keys(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
