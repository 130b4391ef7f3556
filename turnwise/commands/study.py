"""`turnwise study FILE`: runs the unfinished cells, some at a time, and reports the results of all."""

from __future__ import annotations

import shlex
import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows import shipped
from flows.evidence.study import cells, design, elsewhere, finish, keep
from flows.evidence.study.cells import Cell
from flows.evidence.study.design import Study
from flows.evidence.study.rows import Row
from flows.report import Display, answer, duration
from flows.workspace import find_home, open_workspace
from stages.frame.types import UsageError
from stages.store.workspace import Workspace


def study(args: Namespace) -> int:
    """turnwise study FILE"""
    file, out = shipped.study(args.file.resolve()), args.out and args.out.resolve()  # before the folder changes
    asked = design.read(file)
    every = planned(asked)
    check_options(args, asked, every)
    rows = elsewhere.read(args.rows, asked)
    workspace = open_workspace(find_home(args.home, to_write=not args.dry_run))
    if args.dry_run:
        return dry_run(asked, every, workspace, args, rows)
    # Without --only: the page has all that is finished, and this makes it.
    command = shlex.join(["turnwise", "study", str(args.file), *elsewhere.options(args.rows)])
    with Display(quiet=args.quiet) as display, keep.open_study(workspace, asked, file, command) as book:
        bench = finish.Bench(workspace, display, book, args.jobs, args.plain, args.only, rows)
        found = finish.run_study(asked, bench)
    kept = found.kept
    files = keep.copied(kept.files, out) if out else kept.files
    told = {"run_id": kept.run_id, "reused": kept.reused, "chosen": found.chosen, "missing": found.missing}
    answer(args, {**told, "files": [str(path) for path in files.values()]}, _ending(found, files["report.html"]))
    return 1 if found.failed else 0


def planned(asked: Study) -> list[Cell]:
    """All cells. Tuned ones of the table have the presets' settings; use this only for facts that hold for any setting."""
    return [*cells.tuning_cells(asked), *cells.table_cells(asked, dict.fromkeys(asked.tuned, ()))]


def check_options(args: Namespace, asked: Study, every: Sequence[Cell]) -> None:
    if args.jobs is not None and args.jobs < 0:
        raise UsageError(f"--jobs {args.jobs}: wanted at least 1, or 0 for a report of what is finished.")
    for pattern in args.only:
        if not any(finish.is_meant(asked, cell, [pattern]) for cell in every):
            names = ", ".join(dict.fromkeys(f"{cell.method}/{cell.task}" for cell in every))
            raise UsageError(f"--only {pattern}: wanted METHOD or METHOD/TASK, one of {names}.")


def dry_run(
    asked: Study, every: Sequence[Cell], workspace: Workspace, args: Namespace, elsewhere_rows: Mapping[str, Row]
) -> int:
    """Each cell that `--only` names, with its state; and the remaining time, estimated from the finished runs."""
    done, chosen, waiting = finish.in_order(asked, lambda wanted: finish.seen(wanted, workspace, elsewhere_rows))
    known = (design.PRESET, *chosen)
    later = [cell for cell in every if cell.part == "table" and asked.settings_of(cell.method) not in known]
    states = [(one.cell, "finished" if one.row else "to run", one.row) for one in done]
    states += [(cell, "to run after its tuning", None) for cell in later]
    states += [(cell, f"to run after {asked.source}", None) for cell in waiting]
    listed: list[dict[str, Any]] = [
        {"run": cell.title, "part": cell.part, "state": state, "run_id": row and row["run"]}
        for cell, state, row in states
        if finish.is_meant(asked, cell, args.only)
    ]
    lines = [f"{one['part']:<8}{one['state']:<24}{(one['run_id'] or '')[:8]:<9} {one['run']}" for one in listed]
    left = sum(one["run_id"] is None for one in listed)
    took = [one.row["curve"][-1]["stages_s"] for one in done if one.row]
    time = f", about {duration(statistics.mean(took) * left)} if it is one after the other" if took and left else ""
    last = f"{len(listed) - left} of {len(listed)} runs are finished, {left} to run{time}."
    return answer(args, listed, [*lines, last])


def _ending(found: finish.Studied, report: Path) -> list[str]:
    tables = found.kept.files["table.md"].read_text(encoding="utf-8")
    how = "reused, all of it was there" if found.kept.reused else "kept"
    # What was not come to may be most of a study, and stands in the table: what went wrong must not drown in it.
    lines = [tables, *(f"missing: {one}" for one in found.missing if one not in found.unrun)]
    if found.unrun:
        lines.append(
            f"{len(found.unrun)} runs not run yet (they are listed above, under Missing runs): "
            "the same command without --only and --jobs 0 runs them"
        )
    run = found.kept.run_id[:8]
    return [*lines, f"study {run} {how}. Look: {report}; with its other files in the browser: turnwise ui"]
