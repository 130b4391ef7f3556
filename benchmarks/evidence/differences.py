"""Win rate on test, or return, of one method of a study minus that of any others, run by run, from its stored rows:
the study's own table has each method against its `control` alone.

    python -m benchmarks.evidence.differences docs/results/table1.jsonl nlac rft grpo ppo
    python -m benchmarks.evidence.differences docs/results/table1.jsonl nlac 'no replay' --at 560    # on validation, half-way
    python -m benchmarks.evidence.differences docs/results/self_ac.jsonl td_mean grpo --task '8 steps, each paid' --axis cpu_s --at 236
    python -m benchmarks.evidence.differences docs/results/self_ac.jsonl td1 grpo --measure return     # where each turn pays
    python -m benchmarks.evidence.differences docs/results/long.jsonl 'by the step' nlac --to 0.6      # what it took to get there

Pairs of one task and seed. Two 95 % intervals: that of the study's table, by a bootstrap, and Student's, which is wider
and by which the claims are decided (`flows/evidence/study/figures.py`; how often each covers the truth: `benchmarks/checks/coverage.py`).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from statistics import median

from flows.evidence.study.figures import AXES, at, cost_to, differences, stratified_mean, students_mean
from flows.evidence.study.rows import Row, evaluated
from flows.evidence.study.tables import cost, rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="cells.jsonl of a study, of one base model")
    parser.add_argument("method")
    parser.add_argument("others", nargs="+")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--at", type=float, metavar="COST", help="validation after so much of --axis, in place of test at the end"
    )
    where.add_argument("--to", type=float, metavar="RATE", help="so much of --axis to this win rate on validation")
    parser.add_argument("--axis", choices=AXES, default="episodes", help="what --at and --to count (default: episodes)")
    parser.add_argument("--task", help="this one alone (default: each task of the rows)")
    parser.add_argument("--measure", choices=("win_rate", "return"), default="win_rate", help="what is compared")
    args = parser.parse_args()
    if args.to is not None and args.measure == "return":
        parser.error("--to is of win rates: leave out --measure, or choose --at")
    rows = [row for row in map(json.loads, args.rows.read_text("utf-8").splitlines()) if row["part"] == "table"]
    if args.task not in (None, *(tasks := {row["task"] for row in rows})):
        parser.error(f"{args.rows} has no task {args.task!r}; it has {', '.join(sorted(tasks))}")
    rows = [row for row in rows if args.task in (None, row["task"])]
    arms = {name: [row for row in rows if row["method"] == name] for name in (args.method, *args.others)}
    if missing := [name for name, found in arms.items() if not found]:
        parser.error(
            f"{args.rows} has no rows of {missing[0]!r}; it has {', '.join(sorted({r['method'] for r in rows}))}"
        )
    if twice := [one for one, n in Counter((row["method"], row["task"], row["seed"]) for row in rows).items() if n > 1]:
        method, task, seed = twice[0]
        parser.error(f"{args.rows} has {method} / {task} / seed {seed} more than once: keep one run of it")
    if args.to is not None:
        return _print_costs(arms, args)
    arms = {name: [_measured(row, args, parser) for row in found] for name, found in arms.items()}
    print("| task | minus | pairs | difference | Student's |\n|---|---|---|---|---|")
    for other in args.others:
        for task, found in differences(arms[args.method], arms[other]).items():
            drawn, students = (rate(mean([found]), "+.2f") for mean in (stratified_mean, students_mean))
            print(f"| {task} | {other} | {len(found)} | {drawn} | {students} |")


def _print_costs(arms: dict[str, list[Row]], args: argparse.Namespace) -> None:
    """Medians over pairs, and in how many of them the method took less."""
    costs = {
        name: {(row["task"], row["seed"]): cost_to(row, args.to, args.axis) for row in found}
        for name, found in arms.items()
    }
    print(f"Median over pairs of {AXES[args.axis]} to {args.to:g} on validation\n")
    print(f"| task | against | {args.method} | the other | less in | as much in |\n|---|---|---|---|---|---|")
    for other in args.others:
        for task in dict.fromkeys(row["task"] for row in arms[args.method]):
            pairs = [
                (mine, costs[other][key])
                for key, mine in costs[args.method].items()
                if key[0] == task and key in costs[other]
            ]
            if pairs:
                middle = " | ".join(cost(median(some)) for some in zip(*pairs, strict=True))
                less, equal = sum(a < b for a, b in pairs), sum(a == b for a, b in pairs)
                print(f"| {task} | {other} | {middle} | {less} of {len(pairs)} | {equal} |")


def _measured(row: Row, args: argparse.Namespace, parser: argparse.ArgumentParser) -> Row:
    """The row with what is compared as its `final`: on test at the end, or on validation at a cost."""
    where, curve = f"{row['method']} on seed {row['seed']}", evaluated(row)
    if args.measure == "return" and "final_return" not in row:
        parser.error(f"{where} was kept before rows had a return: run it again, or compare win rates")
    if args.at is None:
        return row | {"final": row["final_return" if args.measure == "return" else "final"]}
    if args.at > (last := curve[-1][args.axis]):
        parser.error(f"{where} has {last:.0f} {AXES[args.axis]}: choose --at no later")
    return row | {"final": at(curve, args.axis, args.at, args.measure)}


if __name__ == "__main__":
    main()
