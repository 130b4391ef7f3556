"""What the policy was taught: how many labels of the desk's refine stages were right, by what the critic had said of the
action and by what became of it.

    turnwise run ladder --set task.options.audit=fault --set task.options.audited=0.25
    python -m benchmarks.evidence.labels RUN --tool give --first 5

A label is an action that the policy learned: the fresh one where the critic said Yes, or where the gate refused every
rewrite of it; else a rewrite. A bare No is one without a reason. Several runs are added up.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from benchmarks.evidence.desk_run import desk_run
from benchmarks.passes import table_head, table_row
from stages.envs import service_desk as desk
from stages.frame.react import parse_react
from stages.frame.types import Malformed
from stages.play.transitions import transitions


def fate(row: Any) -> tuple[str, str]:
    """What the critic said, and what became of the action."""
    if row["verdict"] == "yes":
        return "Yes", "kept"
    said = "No, with a reason" if row["critique"].partition("No.")[2].strip() else "a bare No"
    return said, "kept, its rewrites refused" if row["info"]["refused"] else "rewritten"


def labels(run: str, tool: str, first: int) -> Iterator[tuple[tuple[str, str], bool, bool]]:
    """Of each label: its fate, whether the fresh action was right, and whether the label is."""
    options, iterations, replay = desk_run(run)
    rows = [runs for runs in iterations if "refine" in runs]
    by_key = {t.key: t for t in transitions(replay, [runs["collect"] for runs in rows])}
    for runs in rows[first:]:
        for row in replay.rows("judgements", [runs["refine"]]):
            t = by_key.get((row["episode_id"], row["turn"]))
            if t is None or row["info"]["dropped"]:
                continue
            with suppress(Malformed):
                before, after = (parse_react(row[name])[1] for name in ("action", "refined"))
                if after.startswith(f"{tool} "):
                    known = options.model_dump(), t.scenario
                    right = [desk.truth(*known, [*t.past_actions, one]).optimal for one in (before, after)]
                    yield fate(row), right[0], right[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--tool", default="give", help="of this step alone")
    parser.add_argument("--first", type=int, default=0, help="from this iteration on")
    args = parser.parse_args()
    found = defaultdict[tuple[str, str], list[tuple[bool, bool]]](list)
    for run in args.runs:
        for what, before, after in labels(run, args.tool, args.first):
            found[what].append((before, after))
            found["all", ""].append((before, after))
    table_head("the critic said", "the action was", "labels", "right before", "right as learned")
    for (said, became), rights in sorted(found.items(), key=lambda one: -len(one[1])):
        before, after = (sum(one[i] for one in rights) / len(rights) for i in (0, 1))
        table_row(said, became, len(rights), f"{before:.2f}", f"{after:.2f}")


if __name__ == "__main__":
    main()
