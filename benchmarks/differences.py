"""Win rate on test of one method of a study minus that of any others, run by run, from its stored rows: the study's own
table has each method against its `control` alone.

    python -m benchmarks.differences docs/results/table1.jsonl nlac rft grpo ppo

Pairs of one task and seed, 95 % intervals as in the study's table (`flows/study/figures.py`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from flows.study.figures import differences, stratified_mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="cells.jsonl of a study, of one base model")
    parser.add_argument("method")
    parser.add_argument("others", nargs="+")
    args = parser.parse_args()
    rows = [row for row in map(json.loads, args.rows.read_text("utf-8").splitlines()) if row["part"] == "table"]
    arms = {name: [row for row in rows if row["method"] == name] for name in (args.method, *args.others)}
    if missing := [name for name, found in arms.items() if not found]:
        parser.error(
            f"{args.rows} has no rows of {missing[0]!r}; it has {', '.join(sorted({r['method'] for r in rows}))}"
        )
    print("| task | minus | pairs | difference |\n|---|---|---|---|")
    for other in args.others:
        for task, found in differences(arms[args.method], arms[other]).items():
            mean = stratified_mean([found])
            print(f"| {task} | {other} | {len(found)} | {mean.value:+.2f} [{mean.low:+.2f}, {mean.high:+.2f}] |")


if __name__ == "__main__":
    main()
