"""MATH-500 against itself: does math-verify take every gold answer for right, and another problem's for wrong?

    turnwise data fetch math
    python -m benchmarks.checks.math_gold                    # --path FOLDER for another folder, --workers 2 for two processes

boxed: the gold answer in a box, as a policy would give it. solution: the reference solution as the reply. neighbour:
the gold answer of the next problem, where it is another text; one that is taken for equal is printed, to be judged by
eye. What math-verify cannot decide is a failure of the environment and is counted by itself. Each line: right, wrong,
undecided, seconds.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local

from stages.envs.files import read_rows
from stages.envs.math_verifier import Verifier
from stages.frame.types import Malformed, SimulatorError

Pair = tuple[str, str]
"""(gold, reply)."""


def verdicts(pairs: Sequence[Pair], workers: int, timeout_s: float) -> list[str]:
    """right, wrong or undecided for each pair, by so many processes."""
    own = local()

    def verdict(pair: Pair) -> str:
        if not hasattr(own, "verifier"):
            own.verifier = Verifier(timeout_s)
        try:
            return "right" if own.verifier.check(*pair).correct else "wrong"
        except (SimulatorError, Malformed) as error:
            print(f"undecided: {pair[0]!r}: {error}")
            return "undecided"

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(verdict, pairs))


def report(name: str, pairs: Sequence[Pair], args: argparse.Namespace, expected: str) -> None:
    began = time.perf_counter()
    found = verdicts(pairs, args.workers, args.timeout)
    counts = Counter(found)
    print(
        f"| {name} | {len(pairs)} | {counts['right']} | {counts['wrong']} | {counts['undecided']} | {time.perf_counter() - began:.0f} |"
    )
    for (gold, reply), verdict in zip(pairs, found, strict=True):
        if verdict not in (expected, "undecided"):
            print(f"    {name}: {verdict}: gold {gold!r}, reply ...{reply[-60:]!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path("data/tasks/math"), help="folder with test.jsonl")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds a comparison may take")
    args = parser.parse_args()
    rows = [row for _, row in read_rows(args.path / "test.jsonl", "Fetch it: turnwise data fetch math")]
    golds = [str(row["answer"]) for row in rows]
    neighbours = [
        (gold, f"\\boxed{{{other}}}")
        for gold, other in zip(golds, [*golds[1:], golds[0]], strict=True)
        if gold != other
    ]
    print("| reply | pairs | right | wrong | undecided | s |\n| --- | --- | --- | --- | --- | --- |")
    report("boxed", [(gold, f"\\boxed{{{gold}}}") for gold in golds], args, "right")
    report("solution", [(gold, str(row["solution"])) for gold, row in zip(golds, rows, strict=True)], args, "right")
    report("neighbour", neighbours, args, "wrong")


if __name__ == "__main__":
    main()
