"""Finds which cells are finished and runs the others, some at a time; what is known of all of them then. Ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatch

from flows.evidence.study import cells, children, keep
from flows.evidence.study.cells import Cell, Setting
from flows.evidence.study.design import Study
from flows.evidence.study.rows import Row
from flows.orchestration.server import keep_server
from flows.report import Display
from stages.store.workspace import Workspace


@dataclass(frozen=True)
class Done:
    """A cell and its row, or why it has none."""

    cell: Cell
    row: Row | None
    why: str = ""
    failed: bool = False

    @property
    def line(self) -> str:
        return f"{self.cell.title}: {self.why}"


@dataclass(frozen=True)
class Bench:
    """Where the cells run and how."""

    workspace: Workspace
    display: Display
    book: keep.Book
    jobs: int | None
    plain: bool
    only: Sequence[str]
    elsewhere: Mapping[str, Row] = field(default_factory=dict)  # recipe -> the row of a run in another folder


@dataclass(frozen=True)
class Studied:
    """What a study came to."""

    rows: Sequence[Row]
    chosen: Mapping[str, Setting]
    missing: Sequence[str]  # each run without a result, and why
    unrun: Sequence[str]  # those of them that were left out, or not come to
    failed: int  # runs that ended without one
    kept: keep.Kept


def run_study(asked: Study, bench: Bench) -> Studied:
    """Tune, choose, run the table and keep its report; of all that is finished already nothing is run again."""
    done, chosen, waiting = in_order(asked, lambda wanted: finish(asked, wanted, bench))
    rows = [one.row for one in done if one.row]
    missing = [one.line for one in done if not one.row]
    missing += [f"{name}: not tuned, for want of runs" for name in asked.tuned if name not in chosen]
    missing += [f"{cell.title}: the episodes of {asked.source} are missing" for cell in waiting]
    failed = sum(one.failed for one in done)
    unrun = [one.line for one in done if not one.row and not one.failed]
    return Studied(rows, chosen, missing, unrun, failed, bench.book.keep(rows, chosen, missing, failed))


def in_order(
    asked: Study, look: Callable[[Sequence[Cell]], list[Done]]
) -> tuple[list[Done], dict[str, Setting], list[Cell]]:
    """A study's cells with what `look` makes of them, part by part; the chosen settings; the cells that wait for the
    source's episodes.
    """
    tuned = look(cells.tuning_cells(asked))
    chosen = cells.choose(asked, [one.row for one in tuned if one.row])
    planned = cells.table_cells(asked, chosen)
    first = look([cell for cell in planned if cell.method == asked.source])
    played = {(one.cell.task, one.cell.seed): str(one.row["run"]) for one in first if one.row}
    table, waiting = cells.with_episodes(asked, planned, played)
    return [*tuned, *look(table)], chosen, waiting


def seen(wanted: Sequence[Cell], workspace: Workspace, elsewhere: Mapping[str, Row]) -> list[Done]:
    """The state of all cells; none is run."""
    found = cells.finished(workspace, wanted, elsewhere)
    return [_done(cell, found, {}, workspace) for cell in wanted]


def is_meant(asked: Study, cell: Cell, only: Sequence[str]) -> bool:
    """Whether `--only` names the cell, or one that waits for it as a part of its tuning."""
    names = [f"{cell.method}/{cell.task}"]
    if cell.part == "tuning":
        of = [method for method in asked.methods if asked.settings_of(method) == cell.method]
        names += [f"{method}/{task}" for method in of for task in asked.tasks]
    patterns = [one if "/" in one else f"{one}/*" for one in only]
    return not only or any(fnmatch(name, pattern) for name in names for pattern in patterns)


def finish(asked: Study, wanted: Sequence[Cell], bench: Bench) -> list[Done]:
    """Find the finished cells and run the chosen others, none if there are no jobs. Returns the state of all cells."""
    found = cells.finished(bench.workspace, wanted, bench.elsewhere)
    missing = [cell for cell in wanted if cell.key not in found and bench.jobs != 0]
    meant = [cell for cell in missing if is_meant(asked, cell, bench.only)]
    left = list({cell.key: cell for cell in meant}.values())
    said: dict[str, str] = {}
    if left:
        bench.book.start()
        said = _run(left, bench)
        found |= cells.stored(bench.workspace, left)
    return [_done(cell, found, said, bench.workspace) for cell in wanted]


def _run(left: Sequence[Cell], bench: Bench) -> dict[str, str]:
    """key of each cell -> "" or why its run failed."""
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


def _done(cell: Cell, found: Mapping[str, str | Row], said: dict[str, str], workspace: Workspace) -> Done:
    if cell.key in found:
        return Done(cell, cells.row_of(cell, found[cell.key], workspace))
    if cell.key not in said:
        return Done(cell, None, "not run")
    return Done(cell, None, said[cell.key] or "it ended well, and left no run that can be found again", failed=True)
