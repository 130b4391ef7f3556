"""The page as an artifact of a pipeline run."""

from __future__ import annotations

from collections.abc import Callable

from flows.look.view.page import make_page
from stages.store.machine import first_line
from stages.store.workspace import Workspace

FILE = "view.html"
EPISODES = 40


def keep_page(workspace: Workspace, run_id: str, say: Callable[[str], None]) -> None:
    """Write the run's page, with some of its episodes, beside its summary; say so where that fails."""
    try:
        workspace.tracking.write_text(run_id, FILE, make_page(workspace, [run_id], EPISODES).html)
        workspace.tracking.seal(run_id)  # anew: now with this file
    except Exception as error:  # the run is finished and stored: what only shows it must not make it fail
        say(f"{FILE} was not written ({type(error).__name__}: {first_line(error)}). Run: turnwise view {run_id[:8]}")
