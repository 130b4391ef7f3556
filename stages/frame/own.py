"""Your own modules, named by a config: `task.env = "my.traffic"` is my/traffic.py in the project folder.

Importing such a module runs its code. So only a config can name it, and it must lie in the project folder, where the
process works (SECURITY.md).
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from stages.frame.border import failure
from stages.frame.types import Malformed, TurnwiseError, UsageError


def is_own(name: str) -> bool:
    """Whether what a config says is a module of one's own: names with dots between them; none that ships has a dot."""
    return "." in name and all(part.isidentifier() for part in name.split("."))


def own_file(name: str) -> Path | None:
    """The file of such a module, from the project folder on; None where there is none."""
    parts = name.split(".")
    places = (Path(*parts[:-1], f"{parts[-1]}.py"), Path(*parts, "__init__.py"))
    return next((place for place in places if os.path.isfile(place)), None)


def own_module(key: str, name: str, exports: Sequence[str]) -> ModuleType:
    """The module that a config names at `key`, once a process: it stays as it was when it was first asked for.

    Raises UsageError: there is none, it cannot be imported, or it lacks one of the names that it has to export.
    """
    return _imported(key, name, tuple(exports), os.getcwd())


@cache
def _imported(key: str, name: str, exports: tuple[str, ...], home: str) -> ModuleType:
    file = own_file(name)
    if file is None:
        wanted = f"{name.replace('.', '/')}.py"
        raise UsageError(f"{key}: there is no module {name[:80]!r} in {home}; wanted the file {wanted[:80]} there.")
    if home not in sys.path:
        sys.path.append(home)  # last, so that nothing installed is hidden
    importlib.invalidate_caches()
    try:
        with apart():
            module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # whatever the code of a user raises: it did not become a module
        raise UsageError(f"{key}: {file} cannot be imported: {told(error, home)}. Mend it.") from error
    if Path(str(module.__file__)).resolve() != Path(home, file).resolve():
        raise UsageError(
            f"{key}: {name} is another module already, {module.__file__}; give the folder {name.partition('.')[0]} another name."
        )
    if missing := [one for one in exports if not hasattr(module, one)]:
        raise UsageError(f"{key}: {file} lacks {', '.join(missing)}; it has to export {', '.join(exports)}.")
    return module


def apart() -> AbstractContextManager[Any]:
    """What is printed within the block goes to stderr: stdout belongs to a command's results."""
    return redirect_stdout(sys.stderr)


@contextmanager
def telling(key: str, name: str, doing: str) -> Iterator[None]:
    """Use this block around a call of a module that a config names at `key`. An exception from your own module becomes
    a UsageError with the line of its file. turnwise's own errors pass, and so do those of a shipped module.
    """
    try:
        with apart():
            yield
    except (TurnwiseError, Malformed):
        raise
    except (Exception, SystemExit) as error:
        if not is_own(name):
            raise
        raise UsageError(f"{key}: {doing} of {name} failed: {told(error, os.getcwd())}. Mend it.") from error


def told(error: BaseException, home: str) -> str:
    """What a module of the project raised, and in which line of its files."""
    where = ""
    if isinstance(error, SyntaxError):  # says it itself
        return f"{type(error).__name__}: {error}"
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(f"{home}{os.sep}"):
            where = f" ({os.path.relpath(frame.filename, home)}, line {frame.lineno})"
    return f"{failure(error).rstrip('.')}{where}"
