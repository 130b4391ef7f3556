"""Every preset as a Prefect deployment: started by its cron, from Prefect's page, or with `prefect deployment run`.

    turnwise serve
    prefect deployment run turnwise/PROJECT.demo -p 'sets=["critic.lr=1e-4"]' -p each_run=force
    prefect deployment run turnwise-rerun/PROJECT.rerun -p stage=critic -p of=3f9c -p 'sets=["critic.lr=1e-4"]' -p
        through=evaluate

PROJECT is the name of the project folder. `each_run` says what each run does; by default its due time is a new seed. A
preset never overlaps with itself. Its key `overlap` says whether a run that falls due meanwhile is cancelled or queued.
The serving process works in the project folder, and each run is its own process.
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

from flows import branch, presets
from flows.orchestration import alert
from flows.orchestration.flow import FLOW_NAME, cancelled_where_asked, end_if_cancelled, serving_tags, stand_for_missed
from flows.orchestration.launch import Launcher, launch_rerun, launch_run
from flows.orchestration.recurring import next_sets
from flows.registry import STAGES
from flows.report import Display, ending
from flows.rerun import prepare
from flows.telling import asked
from flows.workspace import open_workspace, project_name
from stages.frame.signals import TIME_IS_UP
from stages.frame.types import TurnwiseError, UsageError

OVERLAP = {"cancel": ConcurrencyLimitStrategy.CANCEL_NEW, "queue": ConcurrencyLimitStrategy.ENQUEUE}
READY = "All deployments are registered."


class TimedOut(KeyboardInterrupt):
    """Ends a run as Ctrl-C does: it is KILLED, and nothing is half-written. Error handlers do not catch it."""


def _preset_name() -> str:
    return presets.name_of(runtime.flow_run.parameters["preset"])


def tell_failure(flow: Any, flow_run: FlowRun, state: State[Any]) -> None:
    """Prefect's hook for a failed run; in the serving process also for a run whose process was killed.

    Prefect fixes the parameter names: it passes them by position or by name.
    """
    # Prefect takes a run for crashed if it is cancelled in its first seconds, before Prefect's engine listens.
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
        # DuckDB turns the timeout into a KeyboardInterrupt if it was busy at that moment.
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
    """Run a preset. Finished stages are reused. A stopped run goes on if its parameters and seed are the same.

    Args:
        preset: A preset that ships with turnwise, or the path of your own .toml, from the project folder.
        sets: Changes, each as section.key=value, as on the command line: critic.lr=1e-4.
        each_run: new_seed: the due time is the seed. further: as many iterations again of the same run. force:
            everything once more. champion: on from the champion; a better adapter takes its place.
        seed: Replaces the seed that each_run gives.
        iterations: Replaces the preset's number.
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
            launcher = Launcher(workspace.home, None, in_flow=True)
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
    """Run one stage again from its stored inputs. With the stages after it, this is a new pipeline run.

    Args:
        stage: The stage to be run again.
        of: A pipeline run, or a run of the stage. The start of its id is enough.
        sets: Changes, each as section.key=value, as on the command line: critic.lr=1e-4.
        iteration: This iteration of a pipeline run. Default: the last one.
        through: Also run the stages that follow in the same iteration, up to this one. Example: evaluate.
        downstream: Also run all that follows, including later iterations.
    """
    if through is not None and downstream:
        raise UsageError("rerun: `through` and `downstream` cannot both be set. Leave one of them out.")
    workspace = open_workspace(Path.cwd())
    launcher = Launcher(workspace.home, None, in_flow=True)
    with cancelled_where_asked(), Display(quiet=True) as display:
        if through is not None or downstream:
            new = branch.prepare(stage, of, workspace, sets=sets, iteration=iteration, through=through)
            return asdict(launch_run(new.run, workspace, launcher, display, sets=sets, branch=new))
        again = prepare(stage, of, workspace, sets=sets, iteration=iteration)
        return asdict(launch_rerun(again, workspace, launcher, display, sets=sets, force=not sets))


def deployments(chosen: Mapping[str, str], project: str) -> list[RunnerDeployment]:
    """One deployment for each preset (name -> preset), and one that reruns a stage. Their names begin with the
    project's.

    Raises UsageError where a preset's `cron` or `timezone` is not valid.
    """
    made = [_deployment(f"{project}.{name}", preset, project) for name, preset in chosen.items()]
    how: Any = {"tags": serving_tags(project), "entrypoint_type": EntrypointType.MODULE_PATH}
    return [*made, RunnerDeployment.from_flow(rerun, f"{project}.rerun", **how)]


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
    """Register the deployments, print READY, and run what falls due until stopped: at most `limit` runs at once."""
    runner = Runner(limit=limit, pause_on_shutdown=False)
    # Prefect's own stop cancels its runs one by one, 3 s each, over another event loop's connection. It seldom ends in
    # time.
    # Here the runs get the signal with this process, and `turnwise serve` tells the server what became of them.
    runner.handle_sigterm = lambda *_: os._exit(0)  # type: ignore[method-assign]
    try:
        for deployment in deployments(chosen, project):
            runner.add_deployment(deployment)
    except UsageError as error:
        sys.exit(str(error))
    print(READY, flush=True)
    asyncio.run(runner.start())
