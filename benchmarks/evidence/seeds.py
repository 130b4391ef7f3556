"""Runs presets over seeds, and keeps what came out: the figures of docs/results/.

    python benchmarks/evidence/seeds.py --presets demo desk+nlac_frozen desk+nlac_no_critique desk+rft desk+grpo --seeds 30 31 32 33 34
        --into docs/results/desk.jsonl
    python benchmarks/evidence/curves.py docs/results/desk.jsonl

Each run is `turnwise run PRESET --plain --json --set seed=N`, so what is finished is reused, and an interrupted
benchmark goes on where it stopped. `--into` gets one line a finished run: preset, seed, changed keys, commit, and win
rate and cost by iteration. A run that already has its line there is not run again: after a change that matters begin a
new file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows import parts
from flows.evidence.study.rows import row


def run(preset: str, seed: int, sets: Sequence[str]) -> dict[str, Any]:
    """One whole run, as the row that is kept of it."""
    command = ["turnwise", "run", preset, "--plain", "--json", "--quiet"]
    for item in [f"seed={seed}", *sets]:
        command += ["--set", item]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed with exit code {done.returncode}")
    return row(json.loads(done.stdout), preset, seed, sets, commit())


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[30, 31, 32, 33, 34])
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="SECTION.KEY=VALUE")
    parser.add_argument(
        "--into", type=Path, help="JSONL file that gets a line a run; without it the line is only printed"
    )
    args = parser.parse_args()
    kept = [json.loads(line) for line in args.into.read_text().splitlines()] if args.into and args.into.exists() else []
    known = {(parts.current(one["preset"]), one["seed"], tuple(one["sets"])) for one in kept}
    for preset in args.presets:
        for seed in args.seeds:
            if (parts.current(preset), seed, tuple(args.sets)) in known:
                continue
            found = run(preset, seed, args.sets)
            print(f"{preset} seed {seed}: {found['base']:.2f} -> {found['final']:.2f}", file=sys.stderr, flush=True)
            if args.into is None:
                print(json.dumps(found), flush=True)
                continue
            args.into.parent.mkdir(parents=True, exist_ok=True)
            with args.into.open("a") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
