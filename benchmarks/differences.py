"""Win rate on test of one method of a study minus that of any others, run by run, from its stored rows: the study's own
table has each method against its `control` alone.

    python -m benchmarks.differences docs/results/table1.jsonl nlac rft grpo ppo
    python -m benchmarks.differences docs/results/table1.jsonl nlac 'no replay' --at 560    # on validation, half-way

Pairs of one task and seed. Two 95 % intervals: that of the study's table, by a bootstrap, and Student's, which is wider
and by which the claims are decided (`flows/study/figures.py`; how often each covers the truth: `benchmarks/coverage.py`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from flows.study.figures import at, differences, stratified_mean, students_mean
from flows.study.rows import Row, evaluated
from flows.study.tables import rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="cells.jsonl of a study, of one base model")
    parser.add_argument("method")
    parser.add_argument("others", nargs="+")
    parser.add_argument(
        "--at", type=float, metavar="EPISODES", help="validation after so many, in place of test at the end"
    )
    args = parser.parse_args()
    rows = [row for row in map(json.loads, args.rows.read_text("utf-8").splitlines()) if row["part"] == "table"]
    arms = {name: [row for row in rows if row["method"] == name] for name in (args.method, *args.others)}
    if missing := [name for name, found in arms.items() if not found]:
        parser.error(
            f"{args.rows} has no rows of {missing[0]!r}; it has {', '.join(sorted({r['method'] for r in rows}))}"
        )
    if args.at is not None:
        arms = {name: [_at(row, args.at, parser) for row in found] for name, found in arms.items()}
    print("| task | minus | pairs | difference | Student's |\n|---|---|---|---|---|")
    for other in args.others:
        for task, found in differences(arms[args.method], arms[other]).items():
            drawn, students = (rate(mean([found]), "+.2f") for mean in (stratified_mean, students_mean))
            print(f"| {task} | {other} | {len(found)} | {drawn} | {students} |")


def _at(row: Row, episodes: float, parser: argparse.ArgumentParser) -> Row:
    """The row with validation after so many episodes in place of the end on test."""
    if episodes > (last := evaluated(row)[-1]["episodes"]):
        parser.error(f"{row['method']} on seed {row['seed']} has {last:.0f} episodes: choose --at no later")
    return row | {"final": at(evaluated(row), "episodes", episodes)}


if __name__ == "__main__":
    main()
