"""What people touch: the command line, and for notebooks and scripts the names that are meant to be used from outside.

    import turnwise

    project = turnwise.open_project("my/project")
    run = turnwise.run(project, "tiny", ["seed=1"])
    turnwise.episodes(project, run.run_id)
    turnwise.compare(project, run.run_id, "3f9c")

Tables are pandas DataFrames. A run is named by the start of its id, as on the command line. The process works in the project
folder once it is open: paths count from there. What is wrong is told by a `TurnwiseError` in one sentence.

Modules:

    tables     what was run and kept, as DataFrames: runs, curves, rows, SQL, comparisons
    work       runs a preset or one stage
    cli        the command line: parser, exit status; the reference is [cli.md](cli.md)
    __main__   `python -m turnwise` is `turnwise`
    completion what a shell completes at a tab
    output     streams that may close, fill up or know no bars: what is shown is dropped, the command goes on
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stages.frame.types import TurnwiseError, UsageError
    from stages.store.workspace import Workspace as Project
    from turnwise.tables import compare, config, curve, episodes, rows, runs, sql
    from turnwise.work import open_project, rerun, run

__all__ = [
    "Project",
    "TurnwiseError",
    "UsageError",
    "compare",
    "config",
    "curve",
    "episodes",
    "open_project",
    "rerun",
    "rows",
    "run",
    "runs",
    "sql",
]

_HOMES = {
    "stages.frame.types": ("TurnwiseError", "UsageError"),
    "stages.store.workspace": ("Workspace",),
    "turnwise.tables": ("compare", "config", "curve", "episodes", "rows", "runs", "sql"),
    "turnwise.work": ("open_project", "rerun", "run"),
}
"""Module -> what it has of these names. It is imported at the first use of one, so that the command line, which lies beside
them, pays for none."""


def __getattr__(name: str) -> Any:
    own = {"Project": "Workspace"}.get(name, name)
    for module, names in _HOMES.items():
        if name in __all__ and own in names:
            value = globals()[name] = getattr(importlib.import_module(module), own)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
