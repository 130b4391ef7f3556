"""Makes weights again that `turnwise gc` deleted, when a stage needs them.

The run is repeated from its stored config and inputs. The new run has the same fingerprint, and so the same result. Its
tag `stands_for` makes it the owner of these weights. In all else the old run stays, so nothing after it has to be made
again. Missing weights that it needs are made again first, back to the newest iteration that still has weights. [ours]
"""

from __future__ import annotations

from collections.abc import Callable

from flows.pipeline import Call, Step
from flows.registry import read_weights
from flows.rerun import Rerun, prepare
from stages.frame.types import MissingInput
from stages.store.workspace import StageRun, Workspace


def mending(
    step: Step,
    make: Callable[[Rerun], Step],
    workspace: Workspace,
    say: Callable[[str], None] = lambda text: None,
    *,
    force: bool = False,
) -> Step:
    """The same step, but it first makes the dropped weights again that it reads. A reused run needs none; `force`
    reuses none. make: gives a rerun's step, which runs even finished stages.
    """

    def mended(call: Call) -> StageRun:
        for run_id in lost(call, workspace):
            if not force and is_finished(call, workspace):
                break
            again = replacement(run_id, workspace)
            say(f"{call.title}: making {again.call.title} again, because its weights were dropped")
            mending(make(again), make, workspace, say, force=True)(again.call)
        return step(call)

    return mended


def lost(call: Call, workspace: Workspace) -> list[str]:
    """Runs whose weights the call reads, but which no longer exist."""
    tracking = workspace.tracking
    dropped = [run_id for run_id in read_weights(call.stage.name, call.inputs) if tracking.is_dropped(run_id)]
    return [one for one in dropped if all(tracking.is_dropped(other) for other in tracking.stand_ins(one))]


def is_finished(call: Call, workspace: Workspace) -> bool:
    return workspace.tracking.finished(call.fingerprint(workspace), call.stage.name) is not None


def replacement(run_id: str, workspace: Workspace) -> Rerun:
    """The call that repeats the run of the dropped weights. Raises MissingInput where the result would not be the same."""
    stage = workspace.tracking.experiment(run_id)
    again = prepare(stage, run_id, workspace)
    if not again.replaces:
        raise MissingInput(
            f"turnwise gc dropped the weights of {stage} run {run_id}. They cannot be made again as they were: the code, a prompt, a file "
            f"or the model has changed. To make them as of now: turnwise rerun {stage} --of {run_id} --downstream"
        )
    return again
