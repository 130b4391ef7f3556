"""What PostgreSQL and S3 cost a stage run, beside SQLite and a folder: the same stage in both stores, in turn.

    python -m benchmarks.speed.shared_store                              # servers of its own, on loopback (extra team, moto)
    python -m benchmarks.speed.shared_store --home FOLDER --repeats 10   # the store that FOLDER/turnwise.toml names; it grows

The stage is `collect` of the preset tiny with the scripted engine: 16 episodes, two tables, seven files. The second one
leaves a file of weights beside them. Each turn has an iteration, and so a fingerprint, of its own. "found": the same call once
more, which reuses the run. Wall time: a server works in a process of its own, and the network only waits.

seconds: median of all turns, the fastest in brackets. ratio: shared over own, median over the turns, ± half the
interquartile range.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.timed import told
from flows import presets
from flows.workspace import find_home, stores
from stages.collect import STAGE as COLLECT
from stages.frame.contract import Context, Outputs
from stages.store.execute import execute

SETTINGS = ["model.engine=scripted"]
WEIGHTS_MIB = 16


def with_weights(context: Context) -> Outputs:
    """What collect leaves, and random weights."""
    file = context.workdir / "adapter" / "adapter_model.safetensors"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(random.Random(context.seed).randbytes(WEIGHTS_MIB * 2**20))
    return replace(COLLECT.run(context), files={"adapter": file.parent})


@contextmanager
def servers(root: Path) -> Iterator[Path]:
    """A project folder on a PostgreSQL and a moto server, which end with it."""
    from tests import team

    with team.servers(root / "empty") as store:
        yield store.home(root / "shared")


def measure(homes: dict[str, Path], repeats: int) -> None:
    config = presets.load("tiny", SETTINGS)
    model = Path(config.model.path).absolute()
    spaces: dict[str, Any] = {}
    for name, home in homes.items():
        if not (home / config.model.path).exists():
            shutil.copytree(model, home / config.model.path)
        spaces[name] = stores(find_home(home, to_write=True))
    stages = {"collect": COLLECT, f"collect and {WEIGHTS_MIB} MiB": replace(COLLECT, run=with_weights)}
    print("| stage run | SQLite and folder | PostgreSQL and S3 | ratio |\n|---|---|---|---|")
    numbers = count(int(time.time()) % 10**9)  # no iteration of an earlier call
    for what, stage in stages.items():
        seconds: dict[tuple[str, str], list[float]] = {}
        for i in range(repeats + 1):
            iteration = next(numbers)
            for name, space in spaces.items():
                with chdir(homes[name]):
                    call = partial(execute, stage, run=config, inputs={}, iteration=iteration, workspace=space)
                    for kind, reused in ((f"{what}, made", False), (f"{what}, found", True)):
                        began = time.perf_counter()
                        if call().reused != reused:
                            raise SystemExit(f"{kind}: the run was {'made' if reused else 'found'}")
                        if i:  # the first makes tables and loads modules
                            seconds.setdefault((kind, name), []).append(time.perf_counter() - began)
        for kind in dict.fromkeys(kind for kind, _ in seconds):
            own, shared = (seconds[kind, name] for name in homes)
            ratios = [b / a for a, b in zip(own, shared, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            cells = [f"{told(one)} ({told([min(one)])})" for one in (own, shared)]
            print(f"| {kind} | {' | '.join(cells)} | {middle:.2f} ± {(high - low) / 2:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, help="a project folder with a turnwise.toml; default: servers of its own")
    parser.add_argument("--repeats", type=int, default=15, help="turns (default: 15)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        root = Path(folder)
        shared = args.home.resolve() if args.home else stack.enter_context(servers(root))
        (root / "own").mkdir()
        measure({"own": root / "own", "shared": shared}, args.repeats)


if __name__ == "__main__":
    main()
