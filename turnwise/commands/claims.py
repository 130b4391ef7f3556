"""`turnwise claims`: runs the missing runs and programs behind the sources' claims, and prints a table of the results."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows import rerun, shipped
from flows.evidence import programs
from flows.evidence.claims import CLAIMS, Claim
from flows.evidence.kinds import Finding, Found, together
from flows.evidence.programs import Program, Said
from flows.evidence.study import design, elsewhere, finish, keep
from flows.evidence.study.design import Study
from flows.evidence.study.finish import Studied
from flows.evidence.study.rows import Row
from flows.report import Display, answer
from flows.workspace import find_home, open_workspace
from stages.frame.types import UsageError
from stages.store.workspace import Workspace

STUDY = Path("studies") / "claims.toml"


def claims(args: Namespace) -> int:
    """turnwise claims"""
    folder = programs.root()
    file = shipped.study((args.study or (folder or Path()) / STUDY).resolve())
    out = args.out and args.out.resolve()
    wanted = _wanted(args.only)
    asked = design.read(file)
    known = elsewhere.read(args.rows, asked)
    workspace = open_workspace(find_home(args.home, to_write=True))
    with Display(quiet=args.quiet) as display:
        studied = _studied(wanted, asked, file, known, workspace, display, args)
        rows = [row for row in studied.rows if row["part"] == "table"] if studied else []
        said = _said(wanted, rows, workspace, display, folder)
    found = Found(rows, asked.level, lambda row: _metrics(row, workspace), said)
    judged = [(claim, [one.find(found) for one in claim.rests_on]) for claim in wanted]
    if out:
        _write(out, judged, asked.title)
    rest = [f"\nThe runs that they rest on: {studied.kept.files['report.html']}"] if studied else []
    answer(args, [_told(claim, findings) for claim, findings in judged], [*_table(judged), *rest])
    return 1 if studied and studied.failed else 0


def _studied(
    wanted: Sequence[Claim],
    asked: Study,
    file: Path,
    known: Mapping[str, Row],
    workspace: Workspace,
    display: Display,
    args: Namespace,
) -> Studied | None:
    """The runs of the methods behind these claims, or their rows from elsewhere. None if the claims need no runs."""
    methods = _methods(wanted)
    if missing := [name for name in methods if name not in asked.methods]:
        raise UsageError(
            f"{file.name}: there is no method {missing[0]!r}, which a claim rests on; add it, or use {STUDY}."
        )
    if args.jobs is not None and args.jobs < 1:
        raise UsageError(f"--jobs {args.jobs}: wanted at least 1.")
    only = [f"{method}/*" for method in methods] if args.only else []
    options = [*(["--study", str(args.study)] if args.study else []), *elsewhere.options(args.rows)]
    command = shlex.join(["turnwise", "claims", *options])
    with keep.open_study(workspace, asked, file, command) as book:
        bench = finish.Bench(workspace, display, book, args.jobs, args.plain, only, known)
        return finish.run_study(asked, bench) if methods else None


def _wanted(only: Sequence[int]) -> list[Claim]:
    if unknown := sorted(set(only) - {claim.number for claim in CLAIMS}):
        raise UsageError(f"--only {unknown[0]}: there is no such claim; they have the numbers 1 to {len(CLAIMS)}.")
    return [claim for claim in CLAIMS if not only or claim.number in only]


def _methods(wanted: Sequence[Claim]) -> list[str]:
    """The methods of the study that these claims rest on."""
    return list(dict.fromkeys(name for claim in wanted for one in claim.rests_on for name in one.methods))


def _said(
    wanted: Sequence[Claim], rows: Sequence[Row], workspace: Workspace, display: Display, folder: Path | None
) -> dict[Program, Said]:
    """The programs' output. Programs that have not run with today's code run now, one after the other."""
    asked = dict.fromkeys(program for claim in wanted for one in claim.rests_on for program in one.programs)
    if folder is None:
        display.say("Claims that rest on benchmarks need a clone of the repository. They are left out.")
        return {}
    found: dict[Program, Said] = {}
    for program in asked:
        mine = [str(row["run"]) for row in rows if row["method"] == program.of]
        of = [run_id for run_id in mine if workspace.tracking.is_finished(run_id)]
        if program.of and not of:
            continue
        run_id = of[0] if program.of else ""
        found[program] = programs.said_by(program, run_id, workspace, display, folder)
    return found


def _metrics(row: Row, workspace: Workspace) -> list[Mapping[str, float]]:
    """None for a run of another folder: its row has only win rates and costs."""
    return [one["metrics"] for one in rerun.stored_summary(workspace, row["run"])["iterations"]]


def _told(claim: Claim, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "number": claim.number,
        "claim": claim.text,
        "source": claim.source,
        "paper": claim.paper,
        "verdict": together(findings),
        "figures": [one.figure for one in findings],
        "control": claim.control,
        "criterion": claim.criterion,
    }


def _table(judged: Sequence[tuple[Claim, Sequence[Finding]]]) -> list[str]:
    """Markdown, as it is printed and written."""
    lines = ["| | claim | verdict | seen here | control | the source says |", "|---|---|---|---|---|---|"]
    for claim, findings in judged:
        told = _told(claim, findings)
        when = f" (holds: {claim.criterion})" if claim.criterion else ""
        source = f"{claim.paper} ({claim.source})"
        lines.append(
            f"| {claim.number} | {claim.text}{when} | **{told['verdict']}** | {'; '.join(told['figures'])} | {claim.control} | {source} |"
        )
    note = "In brackets: Student's 95 % interval over the pairs of seeds. A difference holds where its interval is above 0, and does not where it is below."
    return [*lines, "", note]


def _write(folder: Path, judged: Sequence[tuple[Claim, Sequence[Finding]]], title: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "claims.md").write_text("\n".join([f"# {title}", "", *_table(judged), ""]), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--out: {folder} cannot be used ({error.strerror}). Name a folder that can be written."
        ) from None
