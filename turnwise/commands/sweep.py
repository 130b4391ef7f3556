"""`turnwise run PRESET --set KEY=[...] --seeds N`: a study of all combinations, and one table of it.

Each run is the one that `turnwise run` makes with these values. A finished one is found again. Its tag `group` names
the sweep, so MLflow's page can group by it. The study's own run has the whole report.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.evidence.study import design, finish, keep
from flows.evidence.study import sweep as sweeps
from flows.evidence.study.figures import Mean
from flows.evidence.study.tables import rate
from flows.report import Display, answer
from flows.telling import command_of
from flows.workspace import open_workspace
from stages.frame.types import UsageError
from stages.store.workspace import Workspace
from turnwise.commands import study as studies

GROUP = "group"  # the tag


def sweep(args: Namespace, home: Path) -> int:
    """turnwise run PRESET --set KEY=[...] --seeds N"""
    if args.force:
        raise UsageError("--force: a sweep reuses finished runs. Leave --force out, or force one run by itself.")
    if args.due:
        raise UsageError("--due: a sweep is no run of a schedule. Leave --due out.")
    command = command_of(args.preset, args.set, *(["--seeds", str(args.seeds)] if args.seeds is not None else []))
    text = sweeps.study_text(args.preset, args.set, args.seeds, home)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sweep.toml"
        file.write_text(text, encoding="utf-8")
        asked = design.read(file)
        args.only = []
        planned = studies.planned(asked)
        studies.check_options(args, asked, planned)
        workspace = open_workspace(home)
        if args.dry_run:
            return studies.dry_run(asked, planned, workspace, args, {})
        with Display(quiet=args.quiet) as display, keep.open_study(workspace, asked, file, command) as book:
            found = finish.run_study(asked, finish.Bench(workspace, display, book, args.jobs, args.plain, ()))
    _group(found, asked.title, workspace)
    results = sweeps.results(found.rows)
    runs = " ".join(run_id[:8] for one in results for run_id in one["runs"])
    last = f"sweep {found.kept.run_id[:8]}: {found.kept.files['report.html']}. Side by side: turnwise compare {runs}"
    value = {"study": found.kept.run_id, GROUP: asked.title, "results": results, "missing": found.missing}
    answer(args, value, [*table(results), *(f"missing: {one}" for one in found.missing), last])
    return 1 if found.failed else 0


def table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line a setting."""
    width = max([7, *(len(one["setting"]) for one in results)])
    lines = [f"{'setting':<{width}}  {'win rate on test, 95 %':<24}{'sd':<7}by seed"]
    for one in results:
        mean = rate(Mean(one["mean"], *((one["low"], one["high"]) if one["low"] is not None else ())))
        sd = "-" if one["sd"] is None else f"{one['sd']:.3f}"
        by_seed = " ".join(f"{value:.2f}" for value in one["by_seed"])
        lines.append(f"{one['setting']:<{width}}  {mean:<24}{sd:<7}{by_seed}")
    return lines


def _group(found: finish.Studied, title: str, workspace: Workspace) -> None:
    """A run that several sweeps share carries the newest one's name."""
    for row in found.rows:
        if workspace.tracking.tags(row["run"]).get(GROUP) != title:
            workspace.tracking.tag(row["run"], GROUP, title)
