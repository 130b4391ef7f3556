"""`turnwise view`: writes one or two pipeline runs as a page in one file.

turnwise view RUN
turnwise view RUN RUN2
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from flows.look.view.page import make_page
from flows.report import answer
from flows.workspace import find_home, open_workspace
from stages.frame.types import UsageError
from stages.store.machine import whole

FOLDER = Path("data") / "views"


def view(args: Namespace) -> int:
    """turnwise view RUN [RUN2]"""
    if args.episodes < 0:
        raise UsageError(f"--episodes {args.episodes}: wanted 0 or more.")
    out = args.out and args.out.resolve()  # before the working directory changes
    workspace = open_workspace(find_home(args.home))
    runs = [workspace.tracking.find(run) for run in (args.run, args.other) if run]
    if len(set(runs)) < len(runs):
        raise UsageError(f"view: wanted two runs, found {runs[0][:8]} twice. Leave the second one out.")
    page = make_page(workspace, runs, args.episodes)
    file = out or workspace.home / FOLDER / f"{'-'.join(run[:8] for run in runs)}.html"
    _write(file, page.html)
    value = {"file": str(file), "runs": runs, "episodes": page.episodes, "of": page.total}
    return answer(args, value, [page.note, str(file)])


def _write(file: Path, text: str) -> None:
    try:
        with whole(file) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out: {file} cannot be written ({error.strerror}). Name another file.") from None
