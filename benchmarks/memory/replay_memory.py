"""Peak memory of reading the replay at the paper's size: all of it, as the obvious code does, and as the stages do.

    python -m benchmarks.memory.replay_memory                    # a twentieth of it, about a minute
    python -m benchmarks.memory.replay_memory --share 1 --stage targets

A synthetic replay: runs of 128 episodes of 13 turns, prompts that grow from 5,000 to 8,700 random ids. Each arm reads it
in a process of its own; what it takes is the peak of its resident memory (VmHWM) above that after the imports. `targets`
draws 256 of the newest 20,000 transitions, `rft` 512 turns of the winning episodes of all iterations. With a share below
1 there are fewer runs, and as many are drawn: so what the stages take hardly falls, and what the obvious code takes does.
"""

from __future__ import annotations

import argparse
import gc
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stages.frame.types import Completion, Episode, Outcome, Scenario, Turn
from stages.play.transitions import Transition, candidates, episode_rows, ids_of, in_full
from stages.store.replay import Replay

EPISODES, TURNS, FIRST, LAST, REPLY = 128, 13, 5000, 8700, 60  # of a run; of an episode; ids of its prompts; of a reply
NEWEST, ITERATIONS, TARGETS, ROWS = 20_000, 60, 256, 512
CHARACTERS = 4  # of a token


def episode(name: str, rng: np.random.Generator, *, won: bool) -> Episode:
    """13 turns whose prompts are the beginnings of one text."""
    ids: list[int] = rng.integers(0, 152_000, LAST).tolist()
    lengths = [FIRST + k * (LAST - FIRST) // (TURNS - 1) for k in range(TURNS)]
    text = "x" * (CHARACTERS * REPLY)
    messages: list[Any] = [
        {"role": "system", "content": "y" * (CHARACTERS * FIRST)},
        {"role": "user", "content": "hello"},
    ]
    turns = []
    for k, length in enumerate(lengths):
        done = Completion(text, tuple(ids[:REPLY]), (-0.5,) * REPLY, "stop")
        last = k == TURNS - 1
        reward, said = float(won and last), "z" * 1000
        turns.append(Turn(k, len(messages), tuple(ids[:length]), done, "", text, said, reward, last, False, False, 1.0))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": said}]
    scenario = Scenario("tau_bench", "train", name, {})
    return Episode(name, scenario, None, Outcome.SCORED, tuple(messages), tuple(turns), 1.0)


def write(path: Path, n_runs: int) -> None:
    replay, rng = Replay(path), np.random.default_rng(0)
    for i in range(n_runs):
        made = [episode(f"e{i}-{k}", rng, won=k % 10 < 3) for k in range(EPISODES)]
        replay.commit(f"run{i}", "collect", episode_rows(made, i))


def all_at_once(replay: Replay, runs: list[str], newest: int | None) -> list[Transition]:
    """What was there before: whole rows, run by run from the newest on, every one a transition."""
    found: list[Transition] = []
    for run in reversed(runs):
        if newest is not None and len(found) >= newest:
            break
        heads = {row["episode_id"]: row for row in replay.rows("episodes", [run])}
        mine = []
        for row in replay.rows("turns", [run]):
            head, past = heads[row["episode_id"]], ()
            state = tuple(head["messages"][: row["state_len"]])
            scenario = Scenario(head["task"], head["split"], head["scenario_id"], head["scenario"])
            ids = tuple(row["prompt_ids"]), tuple(row["action_ids"])
            mine.append(Transition(
                row["episode_id"], row["turn"], scenario, state, state, row["action"], row["thought"], row["observation"], row["reward"],
                row["terminated"], row["malformed"], *ids, head["total_reward"], past,
            ))  # fmt: skip
        found = mine + found
    return found[-newest:] if newest else found


def targets_obvious(replay: Replay, runs: list[str]) -> int:
    pool = all_at_once(replay, runs, NEWEST)
    drawn = random.Random(0).sample(pool, TARGETS)
    return len(pool) if drawn else 0


def targets_as_stages(replay: Replay, runs: list[str]) -> int:
    pool = candidates(replay, runs, newest=NEWEST)
    drawn = in_full(replay, random.Random(0).sample(pool, TARGETS))
    return len(pool) if drawn else 0


def rft_obvious(replay: Replay, runs: list[str]) -> int:
    lived = [t for t in all_at_once(replay, runs, None) if not t.malformed]
    drawn = random.Random(0).sample([t for t in lived if t.total_reward >= 1], ROWS)
    return len(lived) if drawn else 0


def rft_as_stages(replay: Replay, runs: list[str]) -> int:
    lived = [t for t in candidates(replay, runs) if not t.malformed]
    drawn = ids_of(replay, random.Random(0).sample([t for t in lived if t.total_reward >= 1], ROWS))
    return len(lived) if drawn else 0


ARMS: dict[str, dict[str, Callable[[Replay, list[str]], int]]] = {
    "targets": {"all at once": targets_obvious, "as stages": targets_as_stages},
    "rft": {"all at once": rft_obvious, "as stages": rft_as_stages},
}


def peak_bytes() -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(path: Path, stage: str, arm: str, n_runs: int) -> None:
    """Print transitions, bytes above the imports, seconds."""
    import duckdb  # noqa: F401  # part of what every arm starts with
    import pyarrow  # noqa: F401

    gc.collect()
    before, began = peak_bytes(), time.perf_counter()
    n = ARMS[stage][arm](Replay(path), [f"run{i}" for i in range(n_runs)])
    print(n, peak_bytes() - before, time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.05, help="of the paper's size (default: 0.05)")
    parser.add_argument("--stage", choices=tuple(ARMS), action="append", help="this one only (default: both)")
    parser.add_argument("--arm", nargs=4, metavar=("PATH", "STAGE", "ARM", "RUNS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        path, stage, arm, n_runs = args.arm
        measure(Path(path), stage, arm, int(n_runs))
        return
    whole = {"targets": NEWEST, "rft": ITERATIONS * EPISODES * TURNS}
    sizes = {stage: max(1, round(args.share * whole[stage] / (EPISODES * TURNS))) for stage in args.stage or ARMS}
    print("| stage | read | transitions | peak, MB | bytes a transition | seconds |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "replay.duckdb"
        write(path, max(sizes.values()))
        for stage in sizes:
            for arm in ARMS[stage]:
                own = ["--arm", str(path), stage, arm, str(sizes[stage])]
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.memory.replay_memory", *own],
                    check=True,
                    capture_output=True,
                    text=True,
                )
                n, size, seconds = done.stdout.split()
                print(
                    f"| {stage} | {arm} | {int(n):,} | {int(size) / 1e6:,.0f} | {int(size) / int(n):,.0f} | {float(seconds):.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
