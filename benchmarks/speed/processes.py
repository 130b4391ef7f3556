"""A training step in two processes against the same step in one (`train.processes`).

    python -m benchmarks.speed.processes                          # widths 256 and 768, on a CPU of two cores
    python -m benchmarks.speed.processes --widths 128 --layers 2 --rows 8 --steps 2

A step is 24 rows of 120 to 280 tokens, forward and backward, the sum of the gradients, and AdamW. The base is frozen,
with LoRA of rank 32 on every linear layer. All processes stay; their steps run in turn.

one: median seconds of a step in one process on one thread. threads: in one process on two threads, the plain
alternative. two: in two processes on one thread each. layers: the same, with the layers' weights dealt out.
gain: one / two, median over the turns, ± half the interquartile range. against threads: threads / two.
The limit of the gain is 2, less what cutting a step into two trees costs. Random weights: only the time matters.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.passes import one_thread, random_policy, table_head, table_row
from stages.learn import ranks
from stages.learn.adapter import base_of
from stages.learn.fit import adamw, fit
from stages.learn.tree_attention import tree_attention
from stages.train.passes import mixed_nll, step_passes
from stages.train.rows import TrainRow

GROUPS = {"one": (1, 1), "threads": (1, 2), "two": (2, 1), "layers": (2, 1)}
"""Name -> processes, and threads of each."""


def rows(n: int) -> list[TrainRow]:
    """Of different lengths; no two begin alike."""
    rng = random.Random(0)
    lengths = [120 + 160 * i // max(n - 1, 1) for i in range(n)]
    return [
        TrainRow([rng.randrange(1000) for _ in range(k - 40)], [rng.randrange(1000) for _ in range(40)])
        for k in lengths
    ]


def rank(group: str, number: int, folder: Path, width: int, layers: int, n: int) -> None:
    """One process of a group: a step for each line that it reads, and its seconds as a line."""
    count, threads = GROUPS[group]
    one_thread()  # for its memory
    torch.set_num_threads(threads)
    if count > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/{group}", rank=number, world_size=count)
    model = random_policy(width, layers, 512, 1000)
    if group == "layers":
        ranks.shard_layers(base_of(model))
    optimiser, chosen = adamw(model, lr=1e-6), {"a": rows(n)}

    def step() -> None:
        batches: list[Any] = [step_passes(chosen, 0, "cpu")]
        with tree_attention(model):
            fit(model, batches, lambda model, each: mixed_nll(model, each)[:2], optimiser)

    step()  # the first one makes AdamW's moments
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        step()
        print(time.perf_counter() - began, flush=True)


class Group:
    """The processes of a group."""

    def __init__(self, group: str, folder: Path, *sizes: int) -> None:
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.speed.processes", "--rank", group, str(i), str(folder), *map(str, sizes)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
            )
            for i in range(GROUPS[group][0])
        ]  # fmt: skip
        self._told()

    def _told(self) -> list[str]:
        found = [one.stdout.readline() if one.stdout else "" for one in self._ranks]
        if not all(found):
            raise SystemExit("a process has ended; its words stand above")
        return found

    def step(self) -> float:
        """Seconds of the slowest."""
        for one in self._ranks:
            assert one.stdin is not None
            one.stdin.write("step\n")
            one.stdin.flush()
        return max(map(float, self._told()))

    def end(self) -> None:
        for one in self._ranks:
            one.kill()
            one.wait()


def spread(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ± {(high - low) / 2:.2f}"


def measure(width: int, layers: int, n: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        groups = {name: Group(name, Path(folder), width, layers, n) for name in GROUPS}
        try:
            found: dict[str, list[float]] = {name: [] for name in groups}
            for _ in range(steps):
                for name, group in groups.items():
                    found[name].append(group.step())
        finally:
            for group in groups.values():
                group.end()
    gains = (
        [a / b for a, b in zip(found[name], found[other], strict=True)]
        for name, other in (("one", "two"), ("threads", "two"), ("one", "layers"))
    )
    table_row(width, layers, *(f"{statistics.median(times):.2f}" for times in found.values()), *map(spread, gains))


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        group, number, folder, *sizes = sys.argv[2:]
        rank(group, int(number), Path(folder), *map(int, sizes))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 768])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    table_head(
        "width", "layers", "one, s", "threads, s", "two, s", "layers, s", "gain", "against threads", "gain of layers"
    )
    for width in args.widths:
        measure(width, args.layers, args.rows, args.steps)


if __name__ == "__main__":
    main()
