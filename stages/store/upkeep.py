"""Repairs: runs whose process died, artifacts that changed after they were written, and a DuckDB file that lacks rows."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from stages.frame.types import MissingInput, TurnwiseError
from stages.store.machine import is_dead, is_here
from stages.store.replay import Replay
from stages.store.tracking import Tracking
from stages.store.workspace import Bar, Workspace, silent

AT_ONCE = 100  # runs
PAGES = (".html", ".svg")
"""Endings of artifacts that only show a run; no stage reads them."""


def recover(workspace: Workspace) -> list[str]:
    """Clean up after processes that died: their runs are KILLED, their scratch folders removed. Returns the run ids.

    To be called once as a command starts; a run of a living process is left alone.
    """
    dead = workspace.tracking.reap()
    scratch = workspace.workdir("x").parent
    if scratch.exists() and (left := list(scratch.iterdir())):
        alive = {info.run_id for info in workspace.tracking.running()}
        for folder in left:
            if folder.name not in alive and not _works_here(folder.name, workspace.tracking):
                shutil.rmtree(folder, ignore_errors=True)
    return dead


def _works_here(run_id: str, tracking: Tracking) -> bool:
    """Whether a living process of this machine has the run, whatever another machine took it for while this one slept."""
    try:
        tags = tracking.tags(run_id)
    except MissingInput:
        return False
    return "heartbeat" in tags and is_here(tags) and not is_dead(tags)


def complete(replay: Replay, bar: Bar = silent, old: Replay | None = None) -> dict[str, str]:
    """Take in the rows of all finished runs that the DuckDB file lacks. Returns the runs whose rows are lost: run -> why.

    old: a file that may still have rows whose artifact is damaged or gone.
    """
    lacking, lost = replay.lacking(), dict[str, str]()
    progress = bar("rows of runs", len(lacking))
    for group in (lacking[i : i + AT_ONCE] for i in range(0, len(lacking), AT_ONCE)):
        try:
            replay.fetch(group)
        except MissingInput:
            lost |= {run_id: why for run_id in group if (why := _why_lost(run_id, replay, old))}
        progress.advance(len(group))
    return lost


def _why_lost(run_id: str, replay: Replay, old: Replay | None) -> str:
    """Take in one run; "" where its rows could be had."""
    try:
        replay.fetch([run_id])
    except MissingInput as error:
        return "" if old is not None and _copied(run_id, old, replay) else str(error)
    return ""


def rebuild(replay: Replay, bar: Bar = silent) -> dict[str, str]:
    """Make the DuckDB file again from the runs, and put it in the place of the old one when it is whole. Returns as
    `complete` does. Rows that no artifact has any more are copied from the old file, where it can be read.
    """
    with replay.made_again() as new:
        return complete(new, bar, old=replay)


def _copied(run_id: str, old: Replay, new: Replay) -> bool:
    try:
        return old.path.exists() and old.copy(run_id, new)
    except TurnwiseError:  # it is damaged, too
        return False


def orphans(workspace: Workspace) -> list[str]:
    """Runs that committed rows and never finished; nobody reads them."""
    return workspace.replay.verify(workspace.tracking.finished_runs())


def impossible_rows(workspace: Workspace) -> dict[str, list[str]]:
    """Finished runs with rows that no environment may leave: run -> what they are."""
    finished = set(workspace.tracking.finished_runs())
    return {run_id: told for run_id, told in workspace.replay.impossible().items() if run_id in finished}


def changed_runs(workspace: Workspace) -> dict[str, list[str]]:
    """Finished runs with an artifact that is not what was written: run -> its names."""
    found = {run_id: workspace.tracking.changed(run_id) for run_id in workspace.tracking.finished_runs()}
    return {run_id: names for run_id, names in found.items() if names}


def give_up(workspace: Workspace, run_id: str, why: str) -> None:
    """Let nobody reuse a finished run, nor read its rows."""
    workspace.tracking.finish(run_id, "FAILED", why)


def mend(workspace: Workspace, run_id: str, names: Sequence[str]) -> None:
    """The next command that needs unreadable files makes them again. Weights are dropped, as by gc. A run that lost
    anything else is FAILED, so that nobody reuses it. A page that only shows the run is deleted, and the run stays.
    `turnwise view` and `turnwise lineage` make such pages again.
    """
    tracking = workspace.tracking
    read = [name for name in names if not name.endswith(PAGES)]
    for name in set(names) - set(read):
        tracking.discard(run_id, name)
    if read and all(name.endswith(".safetensors") for name in read):
        tracking.drop(run_id, lambda: False)
    elif read:
        give_up(workspace, run_id, f"{read[0]} is not what was written")
