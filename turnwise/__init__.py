"""The public interface: the command line, and functions for notebooks and scripts.

    import turnwise

    project = turnwise.open_project("my/project")
    run = turnwise.run(project, "tiny", ["seed=1"])
    turnwise.episodes(project, run.run_id)
    turnwise.compare(project, run.run_id, "3f9c")

Tables are pandas DataFrames. The start of an id names a run, as on the command line. Once a project is open, the
process works in its folder: paths count from there. A `TurnwiseError` says in one sentence what is wrong.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stages.frame.types import TurnwiseError, UsageError
    from stages.store.workspace import Workspace as Project
    from turnwise.tables import compare, config, curve, episodes, rows, runs, sql
    from turnwise.work import open_project, rerun, run

__all__ = [
    "Project", "TurnwiseError", "UsageError", "compare", "config", "curve", "episodes", "open_project", "rerun", "rows",
    "run", "runs", "sql",
]  # fmt: skip

_HOMES = {
    "Project": "stages.store.workspace:Workspace",
    **{name: f"stages.frame.types:{name}" for name in ("TurnwiseError", "UsageError")},
    **{name: f"turnwise.tables:{name}" for name in ("compare", "config", "curve", "episodes", "rows", "runs", "sql")},
    **{name: f"turnwise.work:{name}" for name in ("open_project", "rerun", "run")},
}
"""Name -> where it lies. It is imported at its first use: the command line lies beside these names, and pays for none."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, own = _HOMES[name].partition(":")
    value = globals()[name] = getattr(importlib.import_module(module), own)
    return value


def __dir__() -> list[str]:
    return list(__all__)
