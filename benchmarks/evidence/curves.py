"""Prints the table of runs that `benchmarks/evidence/seeds.py` kept, and draws their win rates against episodes and processor
time.

    python benchmarks/evidence/curves.py docs/results/desk.jsonl

Writes desk.svg beside desk.jsonl. Win rates of the table are of the test split; the curves are of the validation split,
one thin line a seed and a thick one for their mean. (Choosing the best of an arm's evaluations is no cost in
"episodes".) "CPU s" is the processor time of the stages, evaluation left out; "to .6" is the first iteration whose
validation win rate reached .6, with its mean cost where all seeds did.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

Run = dict[str, Any]
AXES = {"episodes": "episodes", "cpu_s": "CPU seconds"}


def by_arm(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs of one preset with the same changed keys, by a name that tells both."""
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(" ".join([run["preset"], *run["sets"]]), []).append(run)
    return {name: sorted(members, key=lambda run: int(run["seed"])) for name, members in arms.items()}


def reached(run: Run, level: float) -> dict[str, float] | None:
    """The first point of the curve whose validation win rate reached the level."""
    return next(
        (point for point in run["curve"] if point["iteration"] >= 0 and (point["win_rate"] or 0.0) >= level), None
    )


def table_row(name: str, runs: list[Run]) -> str:
    final, last = [run["final"] for run in runs], [run["curve"][-1] for run in runs]
    hits = [hit for run in runs if (hit := reached(run, 0.6))]
    spread = statistics.stdev(final) if len(final) > 1 else 0.0
    means = {key: statistics.mean(point[key] for point in last) for key in ("episodes", "generated_tokens", "cpu_s")}
    found = f"{len(hits)}/{len(runs)}"
    if len(hits) == len(runs):
        found += f": {statistics.mean(h['episodes'] for h in hits):.0f} ep., {statistics.mean(h['cpu_s'] for h in hits):.0f} s"
    cells = [
        name,
        f"{statistics.mean(run['base'] for run in runs):.2f}",
        f"{statistics.mean(final):.2f} ± {spread:.2f}",
        " ".join(f"{x:.2f}" for x in final),
        f"{means['episodes']:.0f}",
        f"{means['generated_tokens'] / 1000:.0f}k",
        f"{means['cpu_s']:.0f}",
        found,
    ]
    return f"| {' | '.join(cells)} |"


def draw(arms: dict[str, list[Run]], path: Path) -> None:
    """One panel an axis of cost. The mean is taken iteration by iteration, over win rates and cost alike."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, len(AXES), sharey=True)
    for axes, (key, label) in zip(panels, AXES.items(), strict=True):
        for number, (name, runs) in enumerate(arms.items()):
            curves = [[p for p in run["curve"] if p["win_rate"] is not None] for run in runs]
            lines = [([p[key] for p in curve], [p["win_rate"] for p in curve]) for curve in curves]
            for x, y in lines:
                axes.plot(x, y, color=f"C{number}", linewidth=0.6, alpha=0.35)
            mean_x, mean_y = (
                [statistics.mean(column) for column in zip(*part, strict=True)] for part in zip(*lines, strict=True)
            )
            axes.plot(mean_x, mean_y, color=f"C{number}", linewidth=2, label=f"{name} ({len(runs)})")
        axes.set(xlabel=label, ylim=(0, 1.02))
        axes.grid(color="0.9")
    panels[0].set_ylabel("win rate, validation")
    panels[0].legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    arms = by_arm([json.loads(line) for line in args.file.read_text().splitlines()])
    print("| preset | base | final, mean ± sd | by seed | episodes | tokens | CPU s | to .6 |")
    print("|---|---|---|---|---|---|---|---|")
    for name, runs in arms.items():
        print(table_row(name, runs))
    draw(arms, args.file.with_suffix(".svg"))


if __name__ == "__main__":
    main()
