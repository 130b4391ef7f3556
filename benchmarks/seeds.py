"""Runs presets over seeds and prints a Markdown table: the figures of docs/results.md.

    python benchmarks/seeds.py --presets demo demo_frozen demo_no_critique demo_rft demo_grpo --seeds 0 1 2 3 4

Each run is `turnwise run PRESET --plain --json --set seed=N`, so what is finished is reused, and an interrupted benchmark
goes on where it stopped. Win rates are of the test split, sampled at temperature 1; "CPU s" is the processor time of
the stages, without evaluation; "to .6" is the first iteration whose validation win rate reached .6.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any


def run(preset: str, seed: int, sets: list[str]) -> dict[str, Any]:
    command = ["turnwise", "run", preset, "--plain", "--json", "--quiet"]
    for item in [f"seed={seed}", *sets]:
        command += ["--set", item]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed with exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def reached(summary: dict[str, Any], level: float) -> dict[str, float] | None:
    """Cost totals of the first iteration whose validation win rate reached the level."""
    for row in summary["iterations"]:
        if (row["win_rate"] or 0.0) >= level and row["iteration"] >= 0:
            return {name: row["metrics"][f"pipeline/{name}"] for name in ("episodes", "cpu_s", "generated_tokens")}
    return None


def line(preset: str, summaries: list[dict[str, Any]]) -> str:
    base = [s["base"]["win_rate"] for s in summaries]
    final = [s["final"]["win_rate"] for s in summaries]
    last = [s["iterations"][-1]["metrics"] for s in summaries]
    hits = [hit for s in summaries if (hit := reached(s, 0.6))]
    spread = statistics.stdev(final) if len(final) > 1 else 0.0
    cells = [
        preset,
        f"{statistics.mean(base):.2f}",
        f"{statistics.mean(final):.2f} ± {spread:.2f}",
        " ".join(f"{x:.2f}" for x in final),
        f"{statistics.mean(m['pipeline/episodes'] for m in last):.0f}",
        f"{statistics.mean(m['pipeline/generated_tokens'] for m in last) / 1000:.0f}k",
        f"{statistics.mean(m['pipeline/cpu_s'] for m in last):.0f}",
        f"{len(hits)}/{len(summaries)}"
        + (f": {statistics.mean(h['episodes'] for h in hits):.0f} ep., {statistics.mean(h['cpu_s'] for h in hits):.0f} s" if hits else ""),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="SECTION.KEY=VALUE")
    args = parser.parse_args()
    print("| preset | base | final, mean ± sd | by seed | episodes | tokens | CPU s | to .6 |")
    print("|---|---|---|---|---|---|---|---|")
    for preset in args.presets:
        print(line(preset, [run(preset, seed, args.sets) for seed in args.seeds]), flush=True)


if __name__ == "__main__":
    main()
