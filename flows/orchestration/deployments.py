"""Every preset as a Prefect deployment: started by its cron, from Prefect's page, or with `prefect deployment run`.

    turnwise serve
    prefect deployment run turnwise/PROJECT.demo -p 'sets=["critic.lr=1e-4"]' -p each_run=force
    prefect deployment run turnwise-rerun/PROJECT.rerun -p stage=critic -p of=3f9c -p 'sets=["critic.lr=1e-4"]' -p
        through=evaluate

PROJECT is the name of the project folder. What each run is stands in `each_run`, by default a new seed: the time at
which the run was due.
A preset never overlaps with itself: its key `overlap` says whether a run that falls due while the one before goes on is
cancelled or queued. The process that serves them works in the project folder, and each run is a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from prefect import flow, runtime
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy, FlowRun, State
from prefect.deployments.runner import RunnerDeployment
from prefect.runner import Runner
from prefect.schedules import Cron
from prefect.types.entrypoint import EntrypointType
from prefect.utilities.urls import url_for
from pydantic import Field

from flows import presets
from flows.orchestration import alert
from flows.orchestration.flow import FLOW_NAME, cancelled_where_asked, end_if_cancelled, serving_tags, stand_for_missed
from flows.orchestration.launch import Launcher, launch_rerun, launch_run
from flows.orchestration.recurring import next_sets
from flows.registry import STAGES
from flows.report import Display, ending
from flows.telling import asked
from flows.workspace import open_workspace, project_name
from stages.frame.signals import TIME_IS_UP
from stages.frame.types import TurnwiseError, UsageError

OVERLAP = {"cancel": ConcurrencyLimitStrategy.CANCEL_NEW, "queue": ConcurrencyLimitStrategy.ENQUEUE}
READY = "All deployments are registered."


class TimedOut(KeyboardInterrupt):
    """As Ctrl-C ends a run: it is KILLED, nothing is half-written, and no handler of errors takes it for one."""


def _preset_name() -> str:
    return presets.name_of(runtime.flow_run.parameters["preset"])


def tell_failure(flow: Any, flow_run: FlowRun, state: State[Any]) -> None:
    """Prefect's hook of a run that failed, or, in the process that serves, of one whose process was killed.

    The names of its parameters are Prefect's: it hands them over by place here, by name there.
    """
    # One that is cancelled before Prefect's engine listens, in its first seconds, is a crash to Prefect.
    if state.is_crashed() and end_if_cancelled(flow_run.id):
        return
    workspace = open_workspace(Path.cwd())
    error = re.sub(r"^Flow run encountered an exception: ", "", state.message or state.name or "")
    told = {"project": project_name(workspace.home), "flow": flow.name, "flow_run": flow_run.name}
    told["page"] = url_for("flow-run", obj_id=flow_run.id)
    if said := alert.send({**told, **alert.failure(str(flow_run.id), error, workspace)}):
        print(said)


@contextmanager
def time_limit(hours: float) -> Iterator[None]:
    """Raise TimedOut in this, the main thread, once the time is up; 0 = never."""
    if not hours:
        yield
        return

    up = False

    def end(*_: Any) -> None:
        nonlocal up
        up = True
        raise TimedOut(f"not done after {hours:g} h (timeout_h)")

    before = signal.signal(TIME_IS_UP, end)
    timer = threading.Timer(hours * 3600, signal.pthread_kill, [threading.get_ident(), TIME_IS_UP])
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt as error:
        # A DuckDB that was asked when the time was up makes a KeyboardInterrupt of it.
        if up and not isinstance(error, TimedOut):
            raise TimedOut(f"not done after {hours:g} h (timeout_h)") from error
        raise
    finally:
        timer.cancel()
        signal.signal(TIME_IS_UP, before)


HOOKS: Any = {"on_failure": [tell_failure], "on_crashed": [tell_failure]}


@flow(name=FLOW_NAME, flow_run_name=_preset_name, persist_result=False, log_prints=True, **HOOKS)
def pipeline(
    preset: str = "demo",
    sets: list[str] = [],  # noqa: B006 - Prefect shows the default in its form
    each_run: presets.EachRun = "new_seed",
    seed: Annotated[int | None, Field(ge=0)] = None,
    iterations: Annotated[int | None, Field(ge=0)] = None,
) -> dict[str, Any]:
    """Run a preset; finished stages are reused, and a run that was stopped goes on with the same parameters and seed.

    Args:
        preset: A preset that ships with turnwise, or the path of one's own that ends in .toml, seen from the project
            folder.
        sets: Changes, each as section.key=value, as on the command line: critic.lr=1e-4.
        each_run: new_seed: with the time at which it was due as seed. further: as many iterations again of the same
            run. force: everything once more. champion: on from the champion, whose place it takes where it is better.
        seed: In place of the one that each_run gives.
        iterations: In place of the preset's.
    """
    stand_for_missed()
    workspace = open_workspace(Path.cwd())
    given = {"seed": seed, "iterations": iterations}
    sets = [*sets, *(f"{key}={value}" for key, value in given.items() if value is not None)]
    sets = next_sets(preset, sets, each_run, runtime.flow_run.scheduled_start_time, workspace)
    force = each_run == "force"
    config = presets.load(preset, sets)
    how = asked(preset, config, sets)
    print("As a command:", how.command, *(["--force"] if force else []))
    try:
        with cancelled_where_asked(), Display(quiet=True) as display, time_limit(config.timeout_h):
            launcher = Launcher.inside_flow(workspace.home)
            summary = launch_run(config, workspace, launcher, display, sets=sets, asked=how, force=force)
    except TimedOut as error:
        raise TurnwiseError(f"{preset}: {error}; it goes on where it stopped: {how.command}") from None
    for line in ending(summary):
        print(line)
    return asdict(summary)


@flow(name=f"{FLOW_NAME}-rerun", flow_run_name="{stage} of {of}", persist_result=False, log_prints=True, **HOOKS)
def rerun(
    stage: Annotated[str, Field(json_schema_extra={"enum": list(STAGES)})],
    of: str,
    sets: list[str] = [],  # noqa: B006
    iteration: Annotated[int | None, Field(ge=0)] = None,
    through: str | None = None,
    downstream: bool = False,
) -> dict[str, Any]:
    """Run one stage again from its stored inputs; with what follows it, as a pipeline run of its own.

    Args:
        stage: The stage to be run again.
        of: A pipeline run, or a run of the stage; the start of its id is enough.
        sets: Changes, each as section.key=value, as on the command line: critic.lr=1e-4.
        iteration: Of a pipeline run: this one instead of the last.
        through: Also run what follows in the same iteration, up to this stage, as evaluate.
        downstream: Also run all that follows, later iterations included.
    """
    from flows import branch
    from flows.rerun import prepare

    if through is not None and downstream:
        raise UsageError("rerun: wanted `through` or `downstream`, found both.")
    workspace = open_workspace(Path.cwd())
    if through is not None or downstream:
        new = branch.prepare(stage, of, workspace, sets=sets, iteration=iteration, through=through)
        with cancelled_where_asked(), Display(quiet=True) as display:
            return asdict(
                launch_run(new.run, workspace, Launcher.inside_flow(workspace.home), display, sets=sets, branch=new)
            )
    again = prepare(stage, of, workspace, sets=sets, iteration=iteration)
    with cancelled_where_asked(), Display(quiet=True) as display:
        return asdict(
            launch_rerun(again, workspace, Launcher.inside_flow(workspace.home), display, sets=sets, force=not sets)
        )


def deployments(chosen: Mapping[str, str], project: str) -> list[RunnerDeployment]:
    """One deployment a preset (its name -> the preset), and one that reruns a stage; their names begin with the
    project's.

    Raises UsageError where a preset's `cron` is none.
    """
    made = [_deployment(f"{project}.{name}", preset, project) for name, preset in chosen.items()]
    return [
        *made,
        RunnerDeployment.from_flow(
            rerun, f"{project}.rerun", tags=serving_tags(project), entrypoint_type=EntrypointType.MODULE_PATH
        ),
    ]


def _deployment(name: str, preset: str, project: str) -> RunnerDeployment:
    config = presets.load(preset)
    try:
        ZoneInfo(config.timezone)
    except (ValueError, OSError, ZoneInfoNotFoundError):
        raise UsageError(
            f"The preset {preset} cannot be served: timezone: wanted a name like Europe/Berlin, found {config.timezone!r}."
        ) from None
    try:
        schedule = Cron(config.cron, timezone=config.timezone) if config.cron else None
    except ValueError:
        raise UsageError(
            f"The preset {preset} cannot be served: cron: wanted five fields like '0 3 * * *', found {config.cron!r}."
        ) from None
    return RunnerDeployment.from_flow(
        pipeline,
        name,
        schedule=schedule,
        parameters={"preset": preset, "sets": [], "each_run": config.each_run},
        concurrency_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=OVERLAP[config.overlap]),
        tags=serving_tags(project),
        entrypoint_type=EntrypointType.MODULE_PATH,
    )


def work(chosen: Mapping[str, str], project: str, limit: int) -> None:
    """Register the deployments, say READY, and run what falls due, at most `limit` runs at once, until stopped."""
    runner = Runner(limit=limit, pause_on_shutdown=False)
    # Prefect's own way to stop cancels its runs one by one, 3 s each, over a connection of another event loop, and so
    # seldom ends in time.
    # Here the runs get the signal with this process, and `turnwise serve` tells the server what became of them.
    runner.handle_sigterm = lambda *_: os._exit(0)  # type: ignore[method-assign]
    try:
        for deployment in deployments(chosen, project):
            runner.add_deployment(deployment)
    except UsageError as error:
        sys.exit(str(error))
    print(READY, flush=True)
    asyncio.run(runner.start())
