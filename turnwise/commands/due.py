"""`turnwise run PRESET --due TIME`: makes the scheduled run of that time by hand."""

from __future__ import annotations

from argparse import Namespace
from contextlib import chdir
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

from flows import presets
from flows.orchestration.recurring import next_sets
from flows.workspace import open_workspace
from stages.frame.types import UsageError


def as_due(args: Namespace, home: Path) -> Namespace:
    """The arguments, with the changes of the preset's `each_run` for a run due at `args.due`. A time without a zone is
    in the preset's zone. Raises UsageError for an invalid time.
    """
    config = presets.load(args.preset, args.set)
    try:
        due = datetime.fromisoformat(args.due)
    except ValueError:
        raise UsageError(f"--due {args.due}: wanted a time like 2026-11-22T03:00.") from None
    due = due if due.tzinfo else due.replace(tzinfo=ZoneInfo(config.timezone))
    with chdir(Path.cwd()):  # the paths of the arguments count from here
        workspace = open_workspace(home)
    sets = next_sets(args.preset, args.set, config.each_run, due, workspace)
    return Namespace(**{**vars(args), "set": sets, "force": args.force or config.each_run == "force"})
