"""The same pipeline under Prefect: one flow a run, one task a stage, so that a server shows, schedules and retries
them.

Prefect's own caching is off: the fingerprint is the only cache. This module is imported late: importing Prefect takes
seconds and fixes the address of its server.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import Any, TypeVar
from uuid import UUID

from prefect import Flow, Task, tags
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.context import TagsContext
from prefect.events.worker import EventsWorker
from prefect.exceptions import Abort, ObjectNotFound, TerminationSignal
from prefect.logging import get_run_logger
from prefect.logging.handlers import APILogHandler
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Completed, Crashed, Scheduled

from flows.pipeline import Call, Step
from stages.frame.types import EngineUnavailable, SimulatorError
from stages.store.machine import is_dead, process_tags
from stages.store.workspace import StageRun

FLOW_NAME = "turnwise"
OURS = "turnwise-command"  # on flow runs that live in a command's own process, whose end no worker watches
RETRY_DELAYS_S = [10.0, 60.0, 300.0]  # a server that is started anew loads its model for minutes
FLUSH_TIMEOUT_S = 5.0
MISSED = "It fell due while nothing served it."
OPEN = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]  # that hold a slot of their deployment

T = TypeVar("T")


def prefect_step(inner: Step) -> Step:
    """Run each stage as a task of the calling flow. Its log has the metrics. A reused stage is shown as cached. A stage
    whose engine was down is tried again.
    """

    def step(call: Call) -> StageRun:
        runs: list[StageRun] = []

        def stage() -> State[None] | None:
            done = inner(call)
            runs.append(done)
            get_run_logger().info(
                "%s: run %s%s, %.1f s", call.title, done.run_id, " (reused)" if done.reused else "", done.seconds
            )
            if done.metrics:
                get_run_logger().info("%s", ", ".join(f"{name} {value:.4g}" for name, value in done.metrics.items()))
            return Completed(name="Cached", message=f"run {done.run_id} is reused") if done.reused else None

        Task(
            fn=stage,
            name=call.stage.name,
            task_run_name=call.title,
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=len(RETRY_DELAYS_S),
            retry_delay_seconds=RETRY_DELAYS_S,
            retry_condition_fn=_infrastructure,
        )()
        return runs[-1]

    return step


def run_as_flow(body: Callable[[], T], name: str, parameters: dict[str, Any]) -> T:
    """Run `body` as one run of the flow `turnwise`, shown with the parameters that started it."""

    def pipeline(parameters: dict[str, Any]) -> T:
        # Tasks would inherit the tags of their flow. Prefect asks for the limits of each tag before a task starts,
        # which often takes 2 s.
        with TagsContext(current_tags=set()):
            return body()

    crash_dead_runs()
    with tags(OURS, *(f"{key}={value}" for key, value in process_tags().items())):
        return _run_and_flush(pipeline, name, parameters)


def crash_dead_runs() -> None:
    """End the flow runs of commands whose process was killed. Otherwise they would be shown as running for ever."""
    _end_runs(
        [OURS], "Its process is gone.", lambda run: is_dead(dict(tag.split("=", 1) for tag in run.tags if "=" in tag))
    )


def serving_tags(project: str) -> list[str]:
    """Tags of a project's deployments on this machine, which their flow runs carry as well."""
    return [f"project={project}", f"host={socket.gethostname()}"]


def settle(project: str) -> None:
    """End what an earlier `turnwise serve` of this project left. Its process is gone, but the server does not know
    that.

    An open run keeps its deployment's only slot, so no later run would start. Call this while nothing serves the
    project here.
    """
    tags = serving_tags(project)
    _end_runs(tags, "The process that served it is gone.")
    # The server goes on scheduling for a killed `turnwise serve`. All missed runs would now start, one after the other.
    _cancel_missed(MISSED, tags={"all_": tags})


def retire(project: str) -> None:
    """As `settle`, and the schedules are paused until the project is served again."""
    with get_client(sync_client=True) as client:
        for served in client.read_deployments(deployment_filter=DeploymentFilter(tags={"all_": serving_tags(project)})):
            if served.schedules and not served.paused:
                client.pause_deployment(served.id)
    settle(project)


def stand_for_missed() -> None:
    """In a deployment's run: cancel scheduled runs that fell due while it waited. What a person started stays."""
    if deployment.id:
        _cancel_missed("A run that waited as long replaces it.", deployment_id={"any_": [deployment.id]})


@contextmanager
def cancelled_where_asked() -> Iterator[None]:
    """Within a deployment's run: what a person cancelled ends as CANCELLED.

    Prefect's runner announces its SIGTERM. The process cannot notice while another handler is in place, as
    `signals_held` puts there for a write. Prefect would then set CRASHED.
    """
    try:
        yield
    except TerminationSignal:
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would break this off
        if not end_if_cancelled(UUID(flow_run.id)):
            signal.signal(signal.SIGTERM, before)
            raise
        raise Abort("it was cancelled") from None  # the process ends with 0, and nobody looks for what crashed


def end_if_cancelled(run_id: UUID) -> bool:
    """Whether a person cancelled this flow run. If so, its state becomes CANCELLED, whatever it was before."""
    with get_client(sync_client=True) as client:
        asked = was_asked_to_end(client.read_flow_run_states(run_id))
        if asked:
            client.set_flow_run_state(run_id, Cancelled(message="It was cancelled."), force=True)
    return asked


def was_asked_to_end(history: Sequence[State[Any]]) -> bool:
    """Whether a flow run was cancelled since it was last due. history: its states, oldest first. A run that a person
    cancelled and then started again may still fail.
    """
    since_due = takewhile(lambda state: not state.is_scheduled(), reversed(history))
    return any(state.is_cancelling() for state in since_due)


def catch_up(name: str, cron: str, timezone: str) -> bool:
    """Start a deployment's last missed run, with its due time, in place of all missed ones. Returns whether one was."""
    with get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(name)
        except ObjectNotFound:  # served for the first time
            return False
        due = last_due(cron, timezone, datetime.now(UTC))
        since = FlowRunFilter.model_validate(
            {"deployment_id": {"any_": [found.id]}, "expected_start_time": {"after_": due}}
        )
        seen_to = [run for run in client.read_flow_runs(flow_run_filter=since) if _seen_to(run)]
        if seen_to or found.created is None or found.created > due:
            return False
        # The key: a server that is asked twice makes one run.
        state: State[Any] = Scheduled(scheduled_time=due)
        key = f"catch-up {name} {due.isoformat()}"
        client.create_flow_run_from_deployment(found.id, state=state, idempotency_key=key)
    return True


def _seen_to(run: FlowRun) -> bool:
    """Whether it ran, or was cancelled by a person or by the run before it. (The start time does not tell: a run that
    is cancelled before it starts has one, too.)
    """
    return run.run_count > 0 or (run.state is not None and run.state.is_cancelled() and run.state.message != MISSED)


def last_due(cron: str, timezone: str, now: datetime) -> datetime:
    """When the schedule was due last."""
    from prefect.server.schemas.schedules import CronSchedule  # takes seconds

    schedule = CronSchedule(cron=cron, timezone=timezone)
    for days in (1 / 24, 1, 32, 366, 5 * 366):  # it only looks ahead, and at a thousand dates at most
        if found := asyncio.run(schedule.get_dates(start=now - timedelta(days=days), end=now)):
            return datetime.fromisoformat(found[-1].isoformat())
    return datetime.fromtimestamp(0, UTC)


def _end_runs(tags: list[str], why: str, gone: Callable[[FlowRun], bool] = lambda run: True) -> None:
    with get_client(sync_client=True) as client:
        open_runs = FlowRunFilter(state={"type": {"any_": OPEN}}, tags={"all_": tags})
        for run in client.read_flow_runs(flow_run_filter=open_runs):
            if gone(run):
                end = Cancelled if run.state is not None and run.state.is_cancelling() else Crashed
                client.set_flow_run_state(run.id, end(message=why), force=True)


def _cancel_missed(why: str, **of: Any) -> None:
    scheduled = FlowRunFilter(state={"type": {"any_": [StateType.SCHEDULED]}}, **of)
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=scheduled):
            if run.auto_scheduled and run.expected_start_time and run.expected_start_time < datetime.now(UTC):
                client.set_flow_run_state(run.id, Cancelled(message=why))


def _run_and_flush(pipeline: Callable[[dict[str, Any]], T], name: str, parameters: dict[str, Any]) -> T:
    try:
        return Flow(fn=pipeline, name=FLOW_NAME, flow_run_name=name, validate_parameters=False, persist_result=False)(
            parameters
        )
    finally:
        # Threads send both and would outlive the server. So they send all that they hold before the server may stop.
        APILogHandler().flush()
        EventsWorker.drain_all(timeout=FLUSH_TIMEOUT_S)


def _infrastructure(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
    """Whether a retry may help: only where an engine or a simulator failed."""
    try:
        state.result()
    except (EngineUnavailable, SimulatorError):
        return True
    except BaseException:  # only looked at, not handled: Prefect still holds it and raises it
        return False
    return False
