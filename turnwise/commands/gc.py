"""`turnwise gc`: deletes weights that nobody needs. The rule is in `flows/keep/garbage.py`."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flows.keep import garbage
from flows.keep.garbage import Weights, kind_of
from flows.report import answer
from flows.workspace import find_home, open_workspace
from stages.frame.types import UsageError


def gc(args: Namespace) -> int:
    """turnwise gc"""
    if args.keep < 1:
        raise UsageError(f"--keep {args.keep}: wanted at least 1, the iteration that a run goes on from.")
    workspace = open_workspace(find_home(args.home, to_write=args.yes))
    found = garbage.survey(workspace, args.keep)
    gone = garbage.delete(workspace, found) if args.yes else [one for one in found if not one.why]
    freed = sum(one.size_bytes for one in gone)
    left = sum(one.size_bytes for one in found) - freed
    runs = [{**asdict(one), "bytes": one.size_bytes, "dropped": one in gone} for one in found]
    value = {"deleted": args.yes, "keep": args.keep, "freed_bytes": freed, "kept_bytes": left, "runs": runs}
    return answer(args, value, [*table(found, gone), ending(gone, left, args)])


def table(found: Sequence[Weights], gone: Sequence[Weights]) -> list[str]:
    """For each pipeline run and kind of weights: how many files and MB go, and how many stay."""
    if not found:
        return []
    counts: dict[tuple[str, str], Counter[str]] = {}
    going = {one.run_id for one in gone}
    for one in found:
        for path, size in one.files.items():
            mine = counts.setdefault((one.pipeline, kind_of(path)), Counter())
            which = "freed" if one.run_id in going else "kept"
            mine.update({which: 1, f"{which}_bytes": size})
    lines = [f"{'pipeline run':<14}{'weights':<10}{'freed':>7}{'MB':>10}{'kept':>7}{'MB':>10}"]
    for (pipeline, kind), mine in sorted(counts.items()):
        cells = [f"{mine[f'{w}']:>7}{mine[f'{w}_bytes'] / 1e6:>10.1f}" for w in ("freed", "kept")]
        lines.append(f"{pipeline[:8] or 'none':<14}{kind:<10}" + "".join(cells))
    return lines


def ending(gone: Sequence[Weights], left: int, args: Any) -> str:
    freed = f"{sum(one.size_bytes for one in gone) / 1e6:.1f} MB of {len(gone)} runs"
    if args.yes:
        return f"freed {freed}; {left / 1e6:.1f} MB of weights are kept. Rows, metrics and configs are all there."
    if not gone:
        return f"Nothing to free; {left / 1e6:.1f} MB of weights are kept."
    return (
        f"{freed} would be freed, {left / 1e6:.1f} MB of weights kept. To do it: turnwise gc --keep {args.keep} --yes"
    )
