"""How far runs moved that were made twice: the same config, code and seed on another processor, whose sums round
otherwise, so that what is sampled parts after a while.

    python -m benchmarks.evidence.again docs/results/claims.jsonl docs/results/claims_again.jsonl

Rows are of one run where they have one recipe (`turnwise study`). Of win rates on test: each method in both files, by
seed, and the mean of what the second has over the first. Of all pairs how far one moves, beside how far two tests of one
and the same policy would, each action drawn anew (at most: the customers are the same), and beside how far the seeds of
a method lie apart, which is their rule books and another draw.
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from statistics import fmean, variance

from flows.evidence.study.rows import Row

Pair = tuple[Row, Row]
NEAR = 0.05  # of win rates: about five of 96 test customers


def read(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def pairs(first: list[Row], second: list[Row]) -> list[Pair]:
    """Rows of the same recipe and of two runs, by method, task and seed."""
    there = {row["recipe"]: row for row in second if row["part"] == "table"}
    both = [(row, there[row["recipe"]]) for row in first if row["part"] == "table" and row["recipe"] in there]
    made = [(one, other) for one, other in both if one["run"] != other["run"]]
    return sorted(made, key=lambda pair: (pair[0]["method"], pair[0]["task"], pair[0]["seed"]))


def moved(some: list[Pair]) -> list[float]:
    """Win rate of the second run over the first's, each pair."""
    return [other["final"] - one["final"] for one, other in some]


def by_method(some: list[Pair]) -> dict[tuple[str, str], list[Pair]]:
    return {key: list(found) for key, found in groupby(some, lambda pair: (pair[0]["method"], pair[0]["task"]))}


def root_mean_square(values: list[float]) -> float:
    return fmean(value * value for value in values) ** 0.5


def drawn_anew(some: list[Pair], episodes: int) -> float:
    """Root mean square of the difference of two independent tests of a policy that wins as often as the two runs do."""
    rates = [(one["final"] + other["final"]) / 2 for one, other in some]
    return fmean(2 * rate * (1 - rate) / episodes for rate in rates) ** 0.5


def apart(some: list[Pair]) -> float:
    """Standard deviation of a method's seeds within one file, pooled over methods and both files."""
    arms = [[row["final"] for row in rows] for found in by_method(some).values() for rows in zip(*found, strict=True)]
    return fmean(variance(arm) for arm in arms if len(arm) > 1) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path, help="cells.jsonl of a study")
    parser.add_argument("second", type=Path, help="cells.jsonl of the same study, run anew elsewhere")
    parser.add_argument("--episodes", type=int, default=96, help="of a test (default: 96, the demo's)")
    args = parser.parse_args()
    if not (some := pairs(read(args.first), read(args.second))):
        parser.error(f"{args.first} and {args.second} have no run of one recipe that was made twice")
    print("| method | task | first | again | mean of again - first |\n|---|---|---|---|---|")
    means = []
    for (method, task), found in by_method(some).items():
        rates = [" ".join(f"{row['final']:.2f}" for row in rows) for rows in zip(*found, strict=True)]
        means.append(fmean(moved(found)))
        print(f"| {method} | {task} | {rates[0]} | {rates[1]} | {means[-1]:+.2f} |")
    far = moved(some)
    print(f"\n{len(far)} runs twice, {sum(abs(by) < NEAR for by in far)} within {NEAR}; on average {fmean(far):+.3f}")
    print(f"one run moves by {root_mean_square(far):.3f} (root mean square), at most {max(map(abs, far)):.2f}")
    print(f"two tests of one policy, drawn anew, would by at most {drawn_anew(some, args.episodes):.3f}")
    print(f"a method's mean moves by {root_mean_square(means):.3f}, at most {max(map(abs, means)):.2f}")
    print(f"the seeds of a method lie {apart(some):.3f} apart (standard deviation)")


if __name__ == "__main__":
    main()
