"""What a run costs beside its stages' own work: its wall time over the sum of theirs, under Prefect and plainly.

    python -m benchmarks.speed.overhead                          # demo, ten iterations, about six minutes on two idle cores
    python -m benchmarks.speed.overhead --preset tiny --iterations 1

Each run is a command in a new folder with stores that are made already (`turnwise init`). Start: from the command to
the first stage's first moment, imports and Prefect's server. Rest: from there to the command's end. Prints a Markdown
table; 1.05 is the most that the rest may be of the stages' work. Only an idle machine tells anything: a stage's own
work is wall time, too.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flows import presets

STAGE = re.compile(r"^\w+ \w+: ([\d.]+) s, run \w+$")
COMMAND = [sys.executable, "-m", "turnwise"]


def measure(home: Path, argv: list[str]) -> tuple[float, float, float]:
    """Seconds of a `turnwise run`: before its first stage, from there to its end, and of its stages' own work. Raises
    if it fails.
    """
    began = time.perf_counter()
    started, work = None, 0.0
    with subprocess.Popen(
        [*COMMAND, "run", *argv, "--home", str(home)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if told := STAGE.match(line.strip()):
                seconds = float(told[1])
                started = started or time.perf_counter() - seconds
                work += seconds
            last = line
    if run.returncode or started is None:
        raise SystemExit(f"turnwise run ended with status {run.returncode}; it said: {last}")
    return started - began, time.perf_counter() - started, work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--iterations", type=int, help="default: the preset's")
    args = parser.parse_args()
    sets = [] if args.iterations is None else ["--set", f"iterations={args.iterations}"]
    model = Path(presets.load(args.preset).model.path)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    print("| run | start, s | rest, s | stages' work, s | rest over work |\n|---|---|---|---|---|")
    for name, how in {"under Prefect": [], "--plain": ["--plain"]}.items():
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            shutil.copytree(model, home / model)
            subprocess.run([*COMMAND, "init", "--home", folder], check=True, stdout=subprocess.DEVNULL)
            start, rest, work = measure(home, [args.preset, *sets, *how])
        print(f"| {args.preset}, {name} | {start:.1f} | {rest:.1f} | {work:.1f} | {rest / work:.3f} |", flush=True)


if __name__ == "__main__":
    main()
