"""Makes weights again that `turnwise gc` deleted, where a stage that is to be run needs them.

The run is done once more from its stored config and inputs. The new run has the same fingerprint, and so the same
result; by its tag `stands_for` it takes the old one's place as the owner of these weights and nowhere else: whoever
read the old run's id goes on reading it, so nothing that follows has to be made again. What it needs itself is made
again likewise, back to the newest iteration whose weights are there. [ours]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flows.registry import read_weights
from flows.rerun import prepare
from stages.frame.types import MissingInput

if TYPE_CHECKING:
    from flows.pipeline import Call, Step
    from flows.rerun import Rerun
    from stages.store.workspace import StageRun, Workspace


def mending(
    step: Step,
    make: Callable[[Rerun], Step],
    workspace: Workspace,
    say: Callable[[str], None] = lambda text: None,
    *,
    force: bool = False,
) -> Step:
    """The same step, which first makes again the dropped weights that it is going to read; none where a finished run is
    reused, unless by `force` none is. make: a step that runs even what is finished, for a rerun.
    """

    def mended(call: Call) -> StageRun:
        for run_id in lost(call, workspace):
            if not force and is_finished(call, workspace):
                break
            again = replacement(run_id, workspace)
            say(f"{call.title}: making {again.call.title} again, whose weights were dropped")
            mending(make(again), make, workspace, say, force=True)(again.call)
        return step(call)

    return mended


def lost(call: Call, workspace: Workspace) -> list[str]:
    """Runs whose weights the call reads, and which nobody has any more."""
    tracking = workspace.tracking
    dropped = [run_id for run_id in read_weights(call.stage.name, call.inputs) if tracking.is_dropped(run_id)]
    return [one for one in dropped if all(tracking.is_dropped(other) for other in tracking.stand_ins(one))]


def is_finished(call: Call, workspace: Workspace) -> bool:
    return workspace.tracking.finished(call.fingerprint(workspace), call.stage.name) is not None


def replacement(run_id: str, workspace: Workspace) -> Rerun:
    """The call that makes the run of the dropped weights again. Raises MissingInput where it would not be the same."""
    stage = workspace.tracking.experiment(run_id)
    again = prepare(stage, run_id, workspace)
    if not again.replaces:
        raise MissingInput(
            f"the weights of {stage} run {run_id} were dropped by turnwise gc, and cannot be made again as they were: the code, a prompt, a file "
            f"or the model has changed since. With what they are now: turnwise rerun {stage} --of {run_id} --downstream"
        )
    return again
