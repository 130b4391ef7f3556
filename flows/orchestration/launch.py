"""Starts pipelines and reruns: opens the project folder, finds or starts the Prefect server, tells who watches.

Used by the command line and by deployments alike; `plain` leaves Prefect out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from flows import champion, played
from flows.ahead import playing
from flows.book import EXPERIMENT
from flows.branch import Branch
from flows.datasets import check_data
from flows.keep.remake import mending
from flows.look.view.page import keep_page
from flows.orchestration.server import Server, begin_server, use_server
from flows.pipeline import LAST, Step, plain_step, run_pipeline
from flows.presets import RunConfig
from flows.report import Display
from flows.rerun import Rerun
from flows.telling import Asked, Iteration, Summary, run_name
from stages.store.workspace import StageRun, Workspace

T = TypeVar("T")


@dataclass(frozen=True)
class Launcher:
    """How things are run: under the flow of a Prefect server, or plainly where there is none."""

    home: Path
    server: Server | None
    in_flow: bool = False  # Prefect itself started the caller, as in a deployment

    def flow(self, body: Callable[[], T], name: str, parameters: dict[str, Any]) -> T:
        """Run `body`, as a flow run shown with its parameters."""
        if self.server is None:
            return body()
        done: T = self._prefect().run_as_flow(body, name, parameters)
        return done

    def step(self, inner: Step) -> Step:
        """A step that runs `inner`, as a task of the flow that it is called in."""
        if not self.is_flow:
            return inner
        step: Step = self._prefect().prefect_step(inner)
        return step

    @property
    def is_flow(self) -> bool:
        """Whether what `flow` runs is a flow run, with a page."""
        return self.in_flow or self.server is not None

    @property
    def page(self) -> ModuleType:
        """The module of a flow run's page, which imports Prefect. It is for what `flow` runs."""
        return importlib.import_module("flows.orchestration.page")

    def _prefect(self) -> ModuleType:
        """The module that imports Prefect, once the server answers: Prefect reads its address when it is imported."""
        if self.server is not None:
            use_server(self.server.wait(), self.home)
        return importlib.import_module("flows.orchestration.flow")


@contextmanager
def launcher(home: Path, *, plain: bool) -> Iterator[Launcher]:
    """A launcher. A server that it starts begins at once, beside what is imported next, and ends with the context."""
    if plain:
        yield Launcher(home, None)
        return
    server = begin_server(home)
    try:
        yield Launcher(home, server)
    finally:
        server.stop()


def launch_run(
    run: RunConfig,
    workspace: Workspace,
    launch: Launcher,
    display: Display,
    *,
    sets: list[str],
    force: bool = False,
    asked: Asked | None = None,
    branch: Branch | None = None,
) -> Summary:
    """A whole pipeline run. asked: how it was asked for. branch: where it leaves another run, if it does."""
    workspace.replay.check()
    check_data(run)
    asked = asked or (branch.asked(sets) if branch else Asked())
    name = run_name(run, asked)

    watchers = [display.row]
    pages: list[Any] = []

    def make_step(parent: str) -> Step:
        if launch.is_flow:
            pages.append(launch.page.Page(workspace.home, workspace.tracking.link(EXPERIMENT, parent)))
            watchers.append(pages[0].add)
        step = launch.step(plain_step(workspace, display.bar, parent, force=force, of=name, say=display.say))
        step = champion.goes_on(played.step(step, run, workspace), run, workspace)
        step = mended(step, workspace, launch, display, force=force)
        return display.watched(branch.step(step, workspace) if branch else step)

    def watch(row: Iteration) -> None:
        for watcher in watchers:
            watcher(row)

    def body() -> Summary:
        through = branch.through if branch else LAST
        judge = champion.judge(run, workspace) if run.each_run == "champion" and not branch else None
        told = replace(asked, tags={**asked.tags, **(launch.page.here() if launch.is_flow else {})})
        # A branch and a run on another's episodes have their collects from elsewhere.
        fresh = not (force or branch or run.episodes_of or run.goes_on_from)
        summary = run_pipeline(
            run, workspace, make_step, watch, asked=told, through=through, judge=judge,
            make_ahead=lambda parent: playing(workspace, parent, name, on=fresh),
        )  # fmt: skip
        keep_page(workspace, summary.run_id, display.say)
        for page in pages:
            page.end(summary)
        return summary

    return launch.flow(body, name, {**(branch.parameters if branch else {"preset": run.preset}), "sets": sets})


def launch_rerun(
    rerun: Rerun, workspace: Workspace, launch: Launcher, display: Display, *, sets: list[str], force: bool
) -> StageRun:
    """One stage, once more."""
    workspace.replay.check()
    step = mended(_step_of(rerun, workspace, launch, display, force=force), workspace, launch, display, force=force)
    parameters = {"stage": rerun.call.stage.name, "of": rerun.old, "sets": sets}
    return launch.flow(lambda: step(rerun.call), f"rerun {rerun.call.title} of {rerun.whose}", parameters)


def mended(step: Step, workspace: Workspace, launch: Launcher, display: Display, *, force: bool) -> Step:
    """The step, which makes dropped weights of its inputs again, as steps of the same kind."""

    def make(again: Rerun) -> Step:
        return _step_of(again, workspace, launch, display, force=True)

    return mending(step, make, workspace, display.say, force=force)


def _step_of(again: Rerun, workspace: Workspace, launch: Launcher, display: Display, *, force: bool) -> Step:
    inner = plain_step(workspace, display.bar, force=force, tags=again.tags, of=again.whose, say=display.say)
    return display.watched(launch.step(inner))
