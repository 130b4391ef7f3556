"""The page of one or two pipeline runs: differences, results and episodes. It is one file and loads nothing else. Each
pipeline run keeps one.

Texts of models and environments are data in it. Its script inserts them as text. The page names the script's hash, and
the browser runs no other script.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.book import EXPERIMENT
from flows.look.pages import data_block, render
from flows.look.view.episodes import Shown, read_episodes
from flows.look.view.figures import LETTERS, changes, curves, facts, iterations, metrics, read_run
from flows.look.view.verdicts import WRONG
from flows.report import finite
from stages.frame.types import UsageError
from stages.store.machine import first_line
from stages.store.workspace import Workspace

HERE = Path(__file__).parent
FILE = "view.html"
"""The page as an artifact of a pipeline run, with this many episodes."""
EPISODES = 40
SCRIPTS = ("curves.js", "reader.js", "view.js")


@dataclass(frozen=True)
class Page:
    """A page as text, and how many episodes of how many are on it."""

    html: str
    episodes: int
    total: int

    @property
    def note(self) -> str:
        """Whether all episodes are there."""
        return told(self.episodes, self.total)


def told(shown: int, total: int) -> str:
    if shown == total:
        return f"All {total} episodes."
    return (
        f"{shown} of {total} episodes: evenly from each stage run, of collect those first of which a critic or the ledger "
        f"says something. All of them: --episodes {total}"
    )


def make_page(workspace: Workspace, run_ids: Sequence[str], n: int) -> Page:
    """The page of one or two pipeline runs, with at most n episodes of each. Raises UsageError for a run of a stage."""
    for run_id in run_ids:
        check_pipeline(workspace, run_id)
    runs = [read_run(workspace, run_id, letter) for run_id, letter in zip(run_ids, LETTERS, strict=False)]
    shown = [read_episodes(workspace, run.summary, run.config, n) for run in runs]
    played = [{"run": run.letter, **one} for run, mine in zip(runs, shown, strict=True) for one in mine.episodes]
    page = Page("", len(played), sum(mine.total for mine in shown))
    data = {"wrong": WRONG, "curves": curves(runs), "runs": [run.letter for run in runs], "episodes": played}
    names = " and ".join(f"{run.info.name} ({run.info.run_id[:8]})" for run in runs)
    notes = [_note(run.letter, mine, len(runs)) for run, mine in zip(runs, shown, strict=True)]
    html = _html(names, [facts(runs), changes(runs)], [iterations(runs), metrics(runs)], notes, data)
    return Page(html, page.episodes, page.total)


def keep_page(workspace: Workspace, run_id: str, say: Callable[[str], None]) -> None:
    """Write the run's page, with some of its episodes, beside its summary; say so where that fails."""
    try:
        workspace.tracking.write_text(run_id, FILE, make_page(workspace, [run_id], EPISODES).html)
        workspace.tracking.seal(run_id)  # anew: now with this file
    except Exception as error:  # the run is finished and stored: what only shows it must not make it fail
        say(f"{FILE} was not written ({type(error).__name__}: {first_line(error)}). Run: turnwise view {run_id[:8]}")


def _html(title: str, above: Sequence[Any], below: Sequence[Any], notes: Sequence[str], data: Any) -> str:
    script = "".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    mark = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return render(
        HERE / "view.html.jinja",
        title=title,
        above=above,
        below=below,
        notes=notes,
        looks=(HERE / "view.css").read_text(encoding="utf-8"),
        script=script,
        mark=mark,
        data=data_block(finite(data)),
    )


def _note(letter: str, mine: Shown, runs: int) -> str:
    return f"{f'{letter}: ' if runs > 1 else ''}{told(len(mine.episodes), mine.total)}"


def check_pipeline(workspace: Workspace, run_id: str, command: str = "view") -> None:
    """Raises UsageError for another run than one of the pipeline."""
    experiment = workspace.tracking.experiment(run_id)
    if experiment != EXPERIMENT:
        pipeline = workspace.tracking.tags(run_id).get("pipeline")
        advice = f"Its pipeline run: turnwise {command} {pipeline[:8]}" if pipeline else "See: turnwise runs"
        raise UsageError(f"{command}: wanted a pipeline run, found {run_id[:8]}, a run of {experiment}. {advice}")
