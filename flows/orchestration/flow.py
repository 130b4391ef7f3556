"""The same pipeline under Prefect: one flow a run, one task a stage, so that a server shows, schedules and retries
them.

Prefect's own caching is off: the fingerprint is the only cache. Imported late, because Prefect takes seconds to import
and reads the address of its server when it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from prefect import Flow, Task, tags
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import State, StateType, TaskRun
from prefect.context import TagsContext
from prefect.events.worker import EventsWorker
from prefect.logging import get_run_logger
from prefect.logging.handlers import APILogHandler
from prefect.states import Crashed

from stages.frame.types import EngineUnavailable, SimulatorError
from stages.store.machine import is_dead, process_tags

if TYPE_CHECKING:
    from flows.pipeline import Call, Step
    from stages.store.execute import StageRun

FLOW_NAME = "turnwise"
OURS = "turnwise-command"  # on flow runs that live in a command's own process, whose end no worker watches
RETRIES = 2
RETRY_DELAY_S = 10
FLUSH_TIMEOUT_S = 5.0

T = TypeVar("T")


def prefect_step(inner: Step) -> Step:
    """Run each stage as a task of the flow that calls it; a stage whose engine was down is tried again."""

    def step(call: Call) -> StageRun:
        def stage() -> StageRun:
            done = inner(call)
            get_run_logger().info(
                "%s: run %s%s, %.1f s", call.title, done.run_id, " (reused)" if done.reused else "", done.seconds
            )
            return done

        return Task(
            fn=stage,
            name=call.stage.name,
            task_run_name=call.title,
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=RETRIES,
            retry_delay_seconds=RETRY_DELAY_S,
            retry_condition_fn=_infrastructure,
        )()

    return step


def run_as_flow(body: Callable[[], T], name: str, parameters: dict[str, Any]) -> T:
    """Run `body` as one run of the flow `turnwise`, shown with the parameters that started it."""

    def pipeline(parameters: dict[str, Any]) -> T:
        # Tasks would take over the tags of their flow, and Prefect asks for the limits of each before a task starts:
        # often a wait of 2 s.
        with TagsContext(current_tags=set()):
            return body()

    crash_dead_runs()
    with tags(OURS, *(f"{key}={value}" for key, value in process_tags().items())):
        return _run_and_flush(pipeline, name, parameters)


def crash_dead_runs() -> None:
    """Mark as crashed the flow runs whose process was killed: nobody else would, and they would be shown as running for
    ever.
    """
    running = FlowRunFilter(state={"type": {"any_": [StateType.RUNNING]}}, tags={"all_": [OURS]})
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=running):
            if is_dead(dict(tag.split("=", 1) for tag in run.tags if "=" in tag)):
                client.set_flow_run_state(run.id, Crashed(message="Its process is gone."), force=True)


def _run_and_flush(pipeline: Callable[[dict[str, Any]], T], name: str, parameters: dict[str, Any]) -> T:
    try:
        return Flow(fn=pipeline, name=FLOW_NAME, flow_run_name=name, validate_parameters=False, persist_result=False)(
            parameters
        )
    finally:
        # Both are sent by threads that would outlive the server: what they still hold is sent before it may be stopped.
        APILogHandler().flush()
        EventsWorker.drain_all(timeout=FLUSH_TIMEOUT_S)


def _infrastructure(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
    """Whether trying again may help: an engine or a simulator that failed, never a mistake of ours or of the user."""
    try:
        state.result()
    except (EngineUnavailable, SimulatorError):
        return True
    except BaseException:  # only looked at, not handled: Prefect still holds it and raises it
        return False
    return False
