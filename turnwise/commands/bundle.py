"""The commands that import a bundle, and recompute what a run stored. `flows/keep/bundle` and `flows/keep/recompute` do the work."""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import asdict
from pathlib import Path

from flows.book import EXPERIMENT
from flows.keep.bundle import check
from flows.keep.bundle import take_in as into
from flows.keep.recompute.run import Checked, check_episode, check_run, check_stage, first_difference
from flows.report import answer, emit
from flows.rerun import find_stage_run
from flows.workspace import find_home, open_workspace
from stages.frame.types import UsageError
from stages.store.workspace import Workspace

SHOWN = 5  # differences of a stage


def take_in(args: Namespace) -> int:
    """turnwise import BUNDLE"""
    bundle = check.read(args.folder.resolve())
    if unnamed := [name for name in check.own_modules(bundle) if name not in args.module]:
        raise UsageError(
            f"import: runs of the bundle name the module {unnamed[0][:80]}. Its code is not in the bundle: a rerun would import it from this "
            f"project. If you mean that: --module {unnamed[0][:80]}"
        )
    workspace = open_workspace(find_home(args.home, to_write=True))
    taken = into.take_in(bundle, workspace, lambda text: print(f"turnwise: {text}", file=sys.stderr))
    differ = "differs from the bundle's file and was not changed. A rerun that reads it is a new run."
    missing = "is missing in the bundle and here, or differs here. A rerun needs it as the run read it."
    lines = [f"{path} {differ}" for path in taken.different] + [f"{path} {missing}" for path in taken.left_out]
    done = f"{len(taken.new)} runs taken in, {len(taken.known)} were here. Look: turnwise show {taken.run_id[:8]}"
    return answer(args, asdict(taken), [*lines, done])


def replay(args: Namespace) -> int:
    """turnwise replay BUNDLE | RUN | EPISODE"""
    checked: list[Checked] = []
    with _opened(args) as (workspace, what):
        for one in _checks(workspace, what):
            checked.append(one)
            if not args.json:
                print("\n".join(_lines(one)), flush=True)
    first = first_difference(checked)
    if args.json:
        emit({"same": first is None, "first": first and first.title, "stages": [one.as_json for one in checked]})
    else:
        print(_verdict(checked, first))
    return 0 if first is None else 1


@contextmanager
def _opened(args: Namespace) -> Iterator[tuple[Workspace, str]]:
    """The store and what to recompute in it. The store is this project's, or a scratch one with an imported bundle."""
    folder, _, rest = args.what.partition(":")
    if not Path(folder).is_dir():
        yield open_workspace(find_home(args.home)), args.what
        return
    bundle = check.read(Path(folder).resolve())
    # The working directory is given back before the folder goes.
    with tempfile.TemporaryDirectory(prefix="turnwise-bundle-") as scratch, chdir(scratch):
        workspace = open_workspace(find_home(Path(scratch), to_write=True))
        into.take_in(bundle, workspace)
        yield workspace, f"{bundle.manifest.run}:{rest}".rstrip(":")


def _checks(workspace: Workspace, what: str) -> Iterable[Checked]:
    run, _, rest = what.partition(":")
    stage, _, iteration = rest.partition(":")
    if stage:
        if iteration and not iteration.isdigit():
            raise UsageError(f"replay {what}: wanted RUN:STAGE:ITERATION, found the iteration {iteration[:40]!r}.")
        return [check_stage(workspace, find_stage_run(stage, run, workspace, int(iteration) if iteration else None))]
    try:
        run_id = workspace.tracking.find(run)
    except UsageError:
        episode = workspace.replay.find_episode(run, workspace.tracking.is_finished)
        return check_episode(workspace, episode)
    is_pipeline = workspace.tracking.experiment(run_id) == EXPERIMENT
    return check_run(workspace, run_id) if is_pipeline else [check_stage(workspace, run_id)]


def _lines(one: Checked) -> Iterator[str]:
    """A stage's part of the report."""
    ok = "differs" if one.compared.differences else "equal" if one.how != "not" else "not recomputed"
    yield f"{one.title:<16}{one.run_id[:8]}  {ok:<16}{one.how if one.how != 'not' else one.why}"
    if one.compared.what:
        yield f"    recomputed: {', '.join(one.compared.what)}; largest difference {one.compared.largest:.1g}"
    if one.unchecked:
        yield f"    by hash only: {', '.join(one.unchecked)}"
    if not one.same:
        yield "    code, a prompt, a file or the base model is not what it ran with"
    for each in one.compared.differences[:SHOWN]:
        yield f"    {each.where}: stored {each.stored}, recomputed {each.recomputed}"
    if (more := len(one.compared.differences) - SHOWN) > 0:
        yield f"    and {more} more differences"


def _verdict(checked: list[Checked], first: Checked | None) -> str:
    if first is not None:
        each = first.compared.differences[0]
        return f"first difference: {first.title}, run {first.run_id[:8]}: {each.where}"
    done = [one for one in checked if one.how != "not"]
    values = sum(one.compared.values for one in done)
    largest = max((one.compared.largest for one in done), default=0.0)
    return f"{len(done)} of {len(checked)} runs recomputed, {values} values equal to 1e-6 (largest difference {largest:.1g})."
