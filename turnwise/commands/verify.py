"""`turnwise verify`: finds rows of no finished run, impossible rows, lost rows, and artifacts that are not what their run
wrote. With --rebuild it makes the DuckDB file again from the runs.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence

from flows.report import Display, emit
from flows.workspace import find_home, open_workspace
from stages.store.upkeep import changed_runs, complete, give_up, impossible_rows, mend, orphans, rebuild
from stages.store.workspace import Workspace


def verify(args: Namespace) -> int:
    """turnwise verify"""
    workspace = open_workspace(find_home(args.home))
    with Display(quiet=args.quiet) as display:
        lost = (rebuild if args.rebuild else complete)(workspace.replay, display.bar)
    found, changed, impossible = orphans(workspace), changed_runs(workspace), impossible_rows(workspace)
    if args.mend:
        for run_id, names in changed.items():
            mend(workspace, run_id, names)
        for run_id, told in impossible.items():
            give_up(workspace, run_id, told[0])
        for run_id, why in lost.items():
            give_up(workspace, run_id, why)
    if args.json:
        emit({"orphans": found, "changed": changed, "impossible": impossible, "lost": lost, "mended": args.mend})
    else:
        again = "made again when it is needed" if args.mend else "to have it made again: turnwise verify --mend"
        print("\n".join(found or ["Every stored row belongs to a finished run."]))
        wrong = _by_run(workspace, impossible, f"; {again}")
        print("\n".join(wrong or ["Every reward is a finite number, and no turn ends twice."]))
        unlike = _by_run(workspace, changed, f" is not what was written; {again}")
        print("\n".join(unlike or ["Every artifact of a finished run is what was written."]))
        print("\n".join(lost.values() or ["The rows of every finished run are in the DuckDB file."]))
    return 1 if (changed or impossible or lost) and not args.mend else 0


def _by_run(workspace: Workspace, found: Mapping[str, Sequence[str]], said: str) -> list[str]:
    """A line for each thing that was found of a run."""
    named = {run_id: f"{workspace.tracking.experiment(run_id)} run {run_id}" for run_id in found}
    return [f"{named[run_id]}: {one}{said}" for run_id in found for one in found[run_id]]
