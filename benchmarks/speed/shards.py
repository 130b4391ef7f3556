"""Collect in one process against collect in shards (`run.shards`), where the environment is what takes the time.

    python -m benchmarks.speed.shards                       # 96 episodes, customers who take 0.1 s a step
    python -m benchmarks.speed.shards --episodes 24 --turns 2

The desk of three steps, on the scripted engine, in a folder of its own. The stage runs alternate, each with a seed of
its own, so that none is reused; the processes stay between them, as between the stages of a run.

one, shards: median seconds of the stage's function. gain: one / shards, median over the turns, ± half the interquartile
range. The limit of the gain is the number of shards, less what a shard costs: a run in the store, and its episodes
written and read.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import textwrap
from pathlib import Path

from benchmarks.passes import table_head, table_row
from benchmarks.speed.processes import spread
from flows import presets
from flows.pipeline import Call, plain_step
from flows.registry import load_stage
from flows.workspace import open_workspace
from stages.store.workspace import silent

SETS = ("task.env=shop.slow", "model.engine=scripted", "roles.max_action_tokens=400")
SHOP = '''
    """A desk whose customers take their time."""
    import time

    from stages.envs.service_desk import OPTIONS, make as plain, scenarios

    def make(options, ask):
        def slow():
            desk = plain(options, ask)()
            step = desk.step
            desk.step = lambda message: (time.sleep({seconds}), step(message))[1]
            return desk
        return slow
'''


def open_shop(home: Path, seconds: float) -> None:
    """Write the environment `shop.slow` into a project folder: the desk, with customers who take so long for a step."""
    (home / "shop").mkdir()
    (home / "shop" / "slow.py").write_text(textwrap.dedent(SHOP.format(seconds=seconds)).lstrip())


def measure(home: Path, shards: int, episodes: int, turns: int, seconds: float) -> None:
    open_shop(home, seconds)
    for name in ("data", "mlflow"):
        (home / name).mkdir()
    workspace = open_workspace(home)
    step, collect = plain_step(workspace, silent), load_stage("collect")

    def took(n: int, seed: int) -> float:
        sets = [*SETS, f"collect.first_episodes={episodes}", f"run.shards={n}", f"seed={seed}"]
        return step(Call(collect, presets.load("tiny", sets), {}, 0)).seconds

    took(shards, 0)  # starts the processes
    one, dealt = [], []
    for turn in range(turns):
        one.append(took(1, 2 * turn + 1))
        dealt.append(took(shards, 2 * turn + 2))
    gains = [a / b for a, b in zip(one, dealt, strict=True)]
    table_row(shards, episodes, f"{statistics.median(one):.2f}", f"{statistics.median(dealt):.2f}", spread(gains))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=96)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.1, help="of a step")
    args = parser.parse_args()
    table_head("shards", "episodes", "one, s", "shards, s", "gain")
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder).resolve(), args.shards, args.episodes, args.turns, args.seconds)


if __name__ == "__main__":
    main()
