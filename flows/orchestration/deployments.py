"""Every preset as a Prefect deployment: started by its cron, from Prefect's page, or with `prefect deployment run`.

    turnwise serve
    prefect deployment run turnwise/PROJECT.demo -p 'sets=["critic.lr=1e-4"]' -p each_run=force
    prefect deployment run turnwise-rerun/PROJECT.rerun -p stage=critic -p of=3f9c -p 'sets=["critic.lr=1e-4"]' -p
        through=evaluate

PROJECT is the name of the project folder. What each run is stands in `each_run`, by default a new seed: the time at
which the run was due.
A preset never overlaps with itself: a run that falls due while the one before goes on is cancelled, not queued. The
process that serves them works in the project folder, and each run is a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.deployments.runner import RunnerDeployment
from prefect.runner import Runner
from prefect.runtime import flow_run
from prefect.schedules import Cron
from prefect.types.entrypoint import EntrypointType

from flows import presets
from flows.orchestration.flow import FLOW_NAME, serving_tags, stand_for_missed
from flows.orchestration.launch import Launcher, launch_rerun, launch_run
from flows.orchestration.recurring import next_sets
from flows.report import Display
from flows.telling import asked
from flows.workspace import open_workspace
from stages.frame.types import UsageError

READY = "All deployments are registered."


def _preset_name() -> str:
    return Path(flow_run.parameters["preset"]).stem


@flow(name=FLOW_NAME, flow_run_name=_preset_name, persist_result=False, log_prints=True)
def pipeline(preset: str = "demo", sets: list[str] = [], each_run: presets.EachRun = "new_seed") -> dict[str, Any]:  # noqa: B006 - Prefect shows the default in its form
    """Run a preset, with `section.key=value` changes in `sets`; finished stages are reused.

    `each_run` says what a run is: `new_seed` (the time at which it was due, unless `sets` name a seed), `further` (as
    many iterations again of the same run) or `force` (everything once more).
    """
    stand_for_missed()
    workspace = open_workspace(Path.cwd())
    sets = next_sets(preset, sets, each_run, flow_run.scheduled_start_time, workspace)
    force = each_run == "force"
    config = presets.load(preset, sets)
    how = asked(preset, config, sets)
    print("As a command:", how.command, *(["--force"] if force else []))
    with Display(quiet=True) as display:
        return asdict(
            launch_run(
                config,
                workspace,
                Launcher.inside_flow(workspace.home),
                display,
                sets=sets,
                asked=how,
                force=force,
            )
        )


@flow(name=f"{FLOW_NAME}-rerun", flow_run_name="{stage} of {of}", persist_result=False, log_prints=True)
def rerun(
    stage: str,
    of: str,
    sets: list[str] = [],  # noqa: B006
    iteration: int | None = None,
    through: str | None = None,
    downstream: bool = False,
) -> dict[str, Any]:
    """Run one stage again from its stored inputs; with what follows it, up to the stage `through` or all of it, as a
    pipeline run of its own.
    """
    from flows import branch
    from flows.rerun import prepare

    if through is not None and downstream:
        raise UsageError("rerun: wanted `through` or `downstream`, found both.")
    workspace = open_workspace(Path.cwd())
    if through is not None or downstream:
        new = branch.prepare(stage, of, workspace, sets=sets, iteration=iteration, through=through)
        with Display(quiet=True) as display:
            return asdict(
                launch_run(new.run, workspace, Launcher.inside_flow(workspace.home), display, sets=sets, branch=new)
            )
    again = prepare(stage, of, workspace, sets=sets, iteration=iteration)
    with Display(quiet=True) as display:
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
        schedule = Cron(config.cron) if config.cron else None
    except ValueError:
        raise UsageError(
            f"The preset {preset} cannot be served: cron: wanted five fields like '0 3 * * *', found {config.cron!r}."
        ) from None
    return RunnerDeployment.from_flow(
        pipeline,
        name,
        schedule=schedule,
        parameters={"preset": preset, "sets": [], "each_run": config.each_run},
        concurrency_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW),
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
