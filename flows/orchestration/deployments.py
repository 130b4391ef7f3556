"""Every preset as a Prefect deployment: started by its cron, from Prefect's page, or with `prefect deployment run`.

    turnwise serve
    prefect deployment run turnwise/demo -p 'sets=["seed=1"]'
    prefect deployment run turnwise-rerun/rerun -p stage=critic -p of=3f9c -p 'sets=["critic.lr=1e-4"]' -p
        through=evaluate

A preset never overlaps with itself: a run that falls due while the one before goes on is cancelled, not queued. The
process that serves them works in the project folder, and each run is a process of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import flow, serve
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.deployments.runner import RunnerDeployment
from prefect.types.entrypoint import EntrypointType

from flows import presets
from flows.orchestration.flow import FLOW_NAME
from flows.orchestration.launch import Launcher, launch_rerun, launch_run
from flows.report import Display
from flows.telling import asked
from flows.workspace import open_workspace
from stages.frame.types import UsageError


@flow(name=FLOW_NAME, flow_run_name="{preset}", persist_result=False)
def pipeline(preset: str = "demo", sets: list[str] = []) -> dict[str, Any]:  # noqa: B006 - Prefect shows the default in its form
    """Run a preset, with `section.key=value` changes; finished stages are reused."""
    config = presets.load(preset, sets)
    workspace = open_workspace(Path.cwd())
    with Display(quiet=True) as display:
        return asdict(
            launch_run(
                config,
                workspace,
                Launcher.inside_flow(workspace.home),
                display,
                sets=sets,
                asked=asked(preset, config, sets),
            )
        )


@flow(name=f"{FLOW_NAME}-rerun", flow_run_name="{stage} of {of}", persist_result=False)
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


def deployments(chosen: Sequence[str]) -> list[RunnerDeployment]:
    """One deployment a preset, and one that reruns a stage."""
    made = [
        RunnerDeployment.from_flow(
            pipeline,
            preset,
            cron=presets.load(preset).cron or None,
            parameters={"preset": preset, "sets": []},
            concurrency_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW),
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
        for preset in chosen
    ]
    return [*made, RunnerDeployment.from_flow(rerun, "rerun", entrypoint_type=EntrypointType.MODULE_PATH)]


def work(chosen: Sequence[str]) -> None:
    """Register the deployments and run what falls due, until stopped."""
    serve(*deployments(chosen), print_starting_message=False)
