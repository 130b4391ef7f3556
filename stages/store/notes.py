"""The note of a stage's run on MLflow's page: its pipeline run and its inputs, in Markdown with links."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

Link = Callable[[str, str], str]
"""(experiment, run id) -> the run's page."""

INPUTS_SHOWN = 6  # newest runs of an upstream stage; all of them are in the artifact inputs.json


def run_link(experiment: str, run_id: str, link: Link, text: str = "") -> str:
    """A link to a run, by the start of its id."""
    return f"[{text or run_id[:8]}]({link(experiment, run_id)})"


def code(text: object) -> str:
    """A text as code, which no Markdown is read in; fit for a table's cell."""
    return f"`{str(text).replace('`', chr(39)).replace('|', '/').replace(chr(10), ' ')}`"


def stage_note(
    stage: str, iteration: int, inputs: Mapping[str, Sequence[str]], tags: Mapping[str, str], link: Link
) -> str:
    """The description of a stage's run. tags: of the run; read are `part`, `pipeline`, `rerun_of` and `changed`."""
    place = {
        "base": "of the base model",
        "start": "of the base model",
        "final": "of the final adapter",
        "candidate": "of the candidate",
        "champion": "of the champion",
    }.get(tags.get("part", ""))
    lines = [f"**{stage}** {place or f'of iteration {iteration}'}, seed {tags['seed']}."]
    if pipeline := tags.get("pipeline"):
        lines.append(f"Made by the {run_link('pipeline', pipeline, link, f'pipeline run {pipeline[:8]}')}.")
    if old := tags.get("rerun_of"):
        lines.append(
            f"Made again from {run_link(stage, old, link)}; changed: {code(tags.get('changed') or 'nothing')}."
        )
    lines += [
        f"Reads {name}: {', '.join(run_link(name, one, link) for one in runs[-INPUTS_SHOWN:])}{_more(runs)}."
        for name, runs in inputs.items()
    ]
    return "\n\n".join(lines)


def _more(runs: Sequence[str]) -> str:
    return f" and {len(runs) - INPUTS_SHOWN} older ones" if len(runs) > INPUTS_SHOWN else ""


@cache
def code_version() -> dict[str, str]:
    """Commit and dirty flag of the code that runs; "unknown" where it does not lie in a git checkout."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        return {
            "git_commit": git("rev-parse", "HEAD"),
            "git_dirty": str(bool(git("status", "--porcelain", "--untracked-files=no"))).lower(),
        }
    except (OSError, subprocess.SubprocessError):
        return {"git_commit": "unknown", "git_dirty": "unknown"}
