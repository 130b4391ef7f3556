"""Opens a project and runs in it as `turnwise run PRESET --plain` does: in this process, without Prefect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flows import presets, telling
from flows import rerun as reruns
from flows.orchestration import launch
from flows.report import Display
from flows.telling import Summary
from flows.workspace import find_home, open_workspace
from stages.store.workspace import StageRun, Workspace


def open_project(folder: str | Path | None = None) -> Workspace:
    """Open the named project folder, else the nearest one at or above the working directory. An empty folder becomes a
    new project. The process works in it from here on.
    """
    return open_workspace(find_home(None if folder is None else Path(folder), to_write=True))


def run(
    project: Workspace, preset: str, sets: Sequence[str] = (), *, force: bool = False, quiet: bool = True
) -> Summary:
    """Run a preset with changes such as "critic.lr=1e-4". Finished stages are reused. Raises what a stage raises."""
    config = presets.load(preset, sets)
    asked = telling.asked(preset, config, sets)
    with launch.launcher(project.home, plain=True) as launcher, Display(quiet=quiet) as display:
        return launch.launch_run(config, project, launcher, display, sets=list(sets), force=force, asked=asked)


def rerun(
    project: Workspace,
    stage: str,
    of: str,
    sets: Sequence[str] = (),
    *,
    iteration: int | None = None,
    force: bool = False,
    quiet: bool = True,
) -> StageRun:
    """Run one stage again from the inputs of a stored run, which stays unchanged. Without changes the stage runs once more."""
    again = reruns.prepare(stage, of, project, sets=sets, iteration=iteration)
    with launch.launcher(project.home, plain=True) as launcher, Display(quiet=quiet) as display:
        return launch.launch_rerun(again, project, launcher, display, sets=list(sets), force=force or not sets)
