"""Makes weights again that `turnwise gc` deleted, where a stage that is to be run needs them.

The run is done once more from its stored config and inputs. The new run has the same fingerprint, and so the same
result; by its tag `stands_for` it takes the old one's place as the owner of these weights and nowhere else: whoever
read the old run's id goes on reading it, so nothing that follows has to be made again. What it needs itself is made
again likewise, back to the newest iteration whose weights are there. [ours]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from flows.rerun import prepare
from stages.frame.types import Dropped, MissingInput
from stages.store.runs import STANDS_FOR

if TYPE_CHECKING:
    from flows.pipeline import Call, Step
    from flows.rerun import Rerun
    from stages.store.workspace import StageRun, Workspace


def mending(
    step: Step, make: Callable[[Mapping[str, str]], Step], workspace: Workspace, say: Callable[[str], None]
) -> Step:
    """The same step, which makes dropped weights of its inputs again. make: a step that runs even what is finished, with
    these tags.
    """

    def mended(call: Call) -> StageRun:
        try:
            return step(call)
        except Dropped as error:
            again = replacement(error, workspace)
            say(f"{call.title}: making {again.call.title} again, whose weights were dropped")
            mending(make({**again.tags, STANDS_FOR: again.old}), make, workspace, say)(again.call)
        return mended(call)

    return mended


def replacement(error: Dropped, workspace: Workspace) -> Rerun:
    """The call that makes the run of the dropped weights again. Raises MissingInput where it would not be the same."""
    again = prepare(workspace.tracking.experiment(error.run_id), error.run_id, workspace)
    if not is_same(again, workspace):
        raise MissingInput(
            f"the weights of run {again.old} were dropped by turnwise gc, and cannot be made again as they were: the code, a prompt, a file or the "
            f"model has changed since. Start from a stage before it, with its new result: turnwise rerun {again.call.stage.name} --of {again.old} --downstream"
        ) from error
    return again


def is_same(again: Rerun, workspace: Workspace) -> bool:
    """Whether the rerun has the fingerprint of the old run, and so its result."""
    from stages.store.execute import stage_fingerprint

    call = again.call
    key = stage_fingerprint(call.stage, run=call.run, inputs=call.inputs, iteration=call.iteration, workspace=workspace)
    return key == workspace.tracking.tags(again.old).get("fingerprint")
