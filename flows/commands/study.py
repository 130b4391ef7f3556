"""`turnwise study FILE`: runs the cells that are not finished, some at a time, and reports what all of them say."""

from __future__ import annotations

import shlex
import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.report import Display, duration, emit
from flows.study import cells, children, design, keep
from flows.workspace import find_home, open_workspace
from stages.frame.types import UsageError

if TYPE_CHECKING:
    from flows.study.cells import Cell
    from flows.study.design import Study
    from flows.study.rows import Row
    from stages.store.workspace import Workspace


@dataclass(frozen=True)
class Done:
    """A cell and its row, or why it has none."""

    cell: Cell
    row: Row | None
    why: str = ""
    failed: bool = False


@dataclass(frozen=True)
class Bench:
    """Where the cells run and how."""

    workspace: Workspace
    display: Display
    book: keep.Book
    jobs: int | None
    plain: bool
    only: Sequence[str]


def study(args: Namespace) -> int:
    """turnwise study FILE"""
    file, out = args.file.resolve(), args.out and args.out.resolve()  # before the working directory changes
    asked = design.read(file)
    planned = _planned(asked)
    _check_options(args, planned)
    workspace = open_workspace(find_home(args.home, to_write=not args.dry_run))
    if args.dry_run:
        return _dry_run(asked, planned, workspace, args)
    command = shlex.join(
        ["turnwise", "study", str(args.file), *(part for one in args.only for part in ("--only", one))]
    )
    with Display(quiet=args.quiet) as display, keep.open_study(workspace, asked, file, command) as book:
        bench = Bench(workspace, display, book, args.jobs, args.plain, args.only)
        tuned = _finish(cells.tuning_cells(asked), bench)
        chosen = cells.choose(asked, [one.row for one in tuned if one.row])
        done = [*tuned, *_finish(cells.table_cells(asked, chosen), bench)]
        missing = [f"{one.cell.title}: {one.why}" for one in done if not one.row]
        missing += [f"{name}: not tuned, for want of runs" for name in asked.tuned if name not in chosen]
        failed = sum(one.failed for one in done)
        kept = book.keep([one.row for one in done if one.row], chosen, missing, failed)
    files = keep.copied(kept.files, out) if out else kept.files
    if args.json:
        told = {"run_id": kept.run_id, "reused": kept.reused, "chosen": chosen, "missing": missing}
        emit({**told, "files": [str(path) for path in files.values()]})
    else:
        print("\n".join(_ending(kept, missing, files["report.html"])))
    return 1 if failed else 0


def _planned(asked: Study) -> list[Cell]:
    """All cells, those of the table with the presets' settings where these are tuned: for what holds for any setting."""
    return [*cells.tuning_cells(asked), *cells.table_cells(asked, dict.fromkeys(asked.tuned, ()))]


def _check_options(args: Namespace, planned: Sequence[Cell]) -> None:
    if args.jobs is not None and args.jobs < 1:
        raise UsageError(f"--jobs {args.jobs}: wanted at least 1.")
    for pattern in args.only:
        if not any(_is_meant(cell, [pattern]) for cell in planned):
            names = ", ".join(dict.fromkeys(f"{cell.method}/{cell.task}" for cell in planned))
            raise UsageError(f"--only {pattern}: wanted METHOD or METHOD/TASK, one of {names}.")


def _is_meant(cell: Cell, only: Sequence[str]) -> bool:
    name = f"{cell.method}/{cell.task}"
    return not only or any(fnmatch(name, one if "/" in one else f"{one}/*") for one in only)


def _finish(wanted: Sequence[Cell], bench: Bench) -> list[Done]:
    """Find which cells are finished and run the others that are meant; what is known of all of them then."""
    found = cells.stored(bench.workspace, wanted)
    left = list({cell.key: cell for cell in wanted if cell.key not in found and _is_meant(cell, bench.only)}.values())
    said: dict[str, str] = {}
    if left:
        bench.book.start()
        said = _run(left, bench)
        found |= cells.stored(bench.workspace, left)
    return [_done(cell, found, said, bench) for cell in wanted]


def _run(left: Sequence[Cell], bench: Bench) -> dict[str, str]:
    """key of each cell -> "" or why its run failed."""
    from flows.orchestration.server import keep_server

    home, say = bench.workspace.home, bench.display.say
    jobs = min(bench.jobs or children.default_jobs(left), len(left))
    say(f"{len(left)} runs, {jobs} at a time")
    bar, said = bench.display.bar("runs", len(left)), {}
    # The runs find this server; without it each would start one of its own.
    with (
        nullcontext() if bench.plain else keep_server(home),
        closing(children.run_cells(left, home, jobs, plain=bench.plain)) as ended,
    ):
        for cell, problem in ended:
            said[cell.key] = problem
            bar.advance()
            say(f"{cell.title}: {problem or 'done'}")
    return said


def _done(cell: Cell, found: dict[str, str], said: dict[str, str], bench: Bench) -> Done:
    if cell.key in found:
        return Done(cell, cells.row_of(cell, found[cell.key], bench.workspace))
    if not _is_meant(cell, bench.only):
        return Done(cell, None, "not run")
    return Done(cell, None, said[cell.key] or "it ended well, and left no run that can be found again", failed=True)


def _dry_run(asked: Study, planned: Sequence[Cell], workspace: Workspace, args: Namespace) -> int:
    """Each cell with its state, and the time that is left by what the finished runs took."""
    tuning = [cell for cell in planned if cell.part == "tuning"]
    found = cells.stored(workspace, tuning)
    rows = [cells.row_of(cell, found[cell.key], workspace) for cell in tuning if cell.key in found]
    known = (design.PRESET, *(chosen := cells.choose(asked, rows)))
    table = cells.table_cells(asked, chosen)
    found |= cells.stored(workspace, table)
    rows += [cells.row_of(cell, found[cell.key], workspace) for cell in table if cell.key in found]
    later = [cell for cell in planned if cell.part == "table" and asked.source(cell.method) not in known]
    listed = [_state(cell, "finished" if cell.key in found else "to run", found) for cell in (*tuning, *table)]
    listed += [_state(cell, "to run after its tuning", {}) for cell in later]
    if args.json:
        emit(listed)
        return 0
    for one in listed:
        print(f"{one['part']:<8}{one['state']:<24}{(one['run_id'] or '')[:8]:<9} {one['run']}")
    left = sum(one["run_id"] is None for one in listed)
    took = [row["curve"][-1]["stages_s"] for row in rows]
    time = f", about {duration(statistics.mean(took) * left)} if it is one after the other" if took and left else ""
    print(f"{len(listed) - left} of {len(listed)} runs are finished, {left} to run{time}.")
    return 0


def _state(cell: Cell, state: str, found: Mapping[str, str]) -> dict[str, Any]:
    return {"run": cell.title, "part": cell.part, "state": state, "run_id": found.get(cell.key)}


def _ending(kept: keep.Kept, missing: Sequence[str], report: Path) -> list[str]:
    tables = kept.files["table.md"].read_text(encoding="utf-8")
    how = "reused, all of it was there" if kept.reused else "kept"
    lines = [tables, *(f"missing: {one}" for one in missing)]
    return [*lines, f"study {kept.run_id[:8]} {how}. Look: {report}; with its other files in the browser: turnwise ui"]
