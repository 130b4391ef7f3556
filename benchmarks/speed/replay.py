"""The replay at a million transitions: a prioritised draw, new priorities, new turns, and a stage's whole way to its draw.

    python -m benchmarks.speed.replay                            # about three minutes and 300 MB of disk on two cores
    python -m benchmarks.speed.replay --transitions 20000 --turns 1000 --repeats 3

Each line beside the obvious way to the same end, in the same process and on the same file. Medians, the fastest in
brackets; the ratio is of processor time, and "a second" of the median. Targets: 256 of a million in 5 ms, 256 new priorities in 20 ms, 20,000 turns a second. A turn has a prompt
of 200 to 340 ids and a reply of 30.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from benchmarks.timed import Times, cells, ratio, timed
from stages.frame.types import Row
from stages.learn.priorities import by_clocks, sample_without_replacement
from stages.play.chains import DrawConfig, draw, read_in_full, usable
from stages.play.transitions import candidates, known_losses
from stages.store.duckdb_file import let_go
from stages.store.replay import Replay

DRAWN, TURNS, A_RUN = 256, 8, 10_000  # transitions drawn; turns of an episode; turns of a run
PROMPT, GROWTH, REPLY = 200, 20, 30  # ids
SEED = 0


def fill(path: Path, n: int) -> tuple[list[str], list[str]]:
    """A replay of n transitions, all with a priority; its runs of collect and of critic."""
    Replay(path).commit("empty", "collect", {})
    with duckdb.connect(str(path)) as raw:
        run, episode, last = f"(i // {A_RUN})", f"'e' || (i // {TURNS})", f"i % {TURNS} = {TURNS - 1}"
        rows = f"from range({n}) t(i)"
        raw.execute(
            f"insert into turns select 'collect' || {run}, {episode}, i % {TURNS}, 2, range({PROMPT})::integer[], range({REPLY})::integer[], "
            f"[]::double[], 'text', '', 'give cash ' || i, 'done', 0, {last}, false, false, 1 {rows}"
        )
        raw.execute(
            f"insert into episodes select distinct 'collect' || {run}, {episode}, 0, 'desk', 'train', 's', '{{}}', null, 'scored', 1.0, "
            f"{TURNS}, 0, 1, 1.0, 10, '', '[]' {rows}"
        )
        raw.execute(f"select setseed({0.5 + SEED})")
        raw.execute(f"insert into priorities select 'critic' || {run}, {episode}, i % {TURNS}, random(), 0 {rows}")
        for stage in ("collect", "critic"):
            raw.execute(f"insert into commits select distinct '{stage}' || {run}, '{stage}', '', '{{}}' {rows}")
    runs = range(-(-n // A_RUN))
    return [f"collect{i}" for i in runs], [f"critic{i}" for i in runs]


def turn_rows(n: int, name: str) -> list[Row]:
    """n turns as a rollout leaves them."""
    rng = np.random.default_rng(SEED)
    ids: list[int] = rng.integers(0, 152_000, PROMPT + GROWTH * TURNS).tolist()
    rows = []
    for i in range(n):
        k = i % TURNS
        rows.append({
            "episode_id": f"{name}{i // TURNS}", "turn": k, "state_len": 2 + 2 * k, "prompt_ids": ids[: PROMPT + GROWTH * k],
            "action_ids": ids[:REPLY], "log_probs": [-0.5] * REPLY, "text": "Action: give cash", "thought": "", "action": "give cash",
            "observation": "done", "reward": 0.0, "terminated": k == TURNS - 1, "truncated": False, "malformed": False, "seconds": 1.0,
        })  # fmt: skip
    return rows


def priority_rows(i: int) -> list[Row]:
    return [{"episode_id": f"e{j}", "turn": i % TURNS, "loss": 0.5, "step": i} for j in range(DRAWN)]


@contextmanager
def alone(path: Path) -> Any:
    """The file opened as anybody would: a DuckDB of its own for each use."""
    let_go()
    with duckdb.connect(str(path)) as raw:
        yield raw


def draws(path: Path, n: int, repeats: int) -> list[tuple[str, str, Times]]:
    with alone(path) as raw:
        p = np.array([one for (one,) in raw.execute("select loss from priorities order by rowid").fetchall()])
        rng = np.random.default_rng(SEED)
        query = f"select episode_id, turn from priorities order by -ln(random()) / loss limit {DRAWN}"
        return [
            (f"draw {DRAWN} of {n:,}", "one sum over p", timed(lambda i: sample_without_replacement(rng, p, DRAWN), repeats)[1]),
            ("", "a clock for each", timed(lambda i: by_clocks(rng, p, DRAWN), repeats)[1]),
            ("", "SQL, order by the clocks", timed(lambda i: raw.execute(query).fetchall(), repeats)[1]),
        ]  # fmt: skip


def updates(path: Path, repeats: int) -> list[tuple[str, str, Times]]:
    replay = Replay(path)

    def by_row(i: int) -> None:
        with alone(path) as raw:
            rows = [[f"by_row{i}", *row.values()] for row in priority_rows(i)]
            raw.executemany("insert into priorities values (?, ?, ?, ?, ?)", rows)

    def in_place(i: int) -> None:
        with alone(path) as raw:
            keys = [
                list(one) for one in zip(*((row["episode_id"], row["turn"]) for row in priority_rows(i)), strict=True)
            ]
            raw.execute(
                "update priorities set loss = 0.5 from (select unnest(?) as e, unnest(?) as t) where episode_id = e and turn = t",
                keys,
            )

    return [
        (f"{DRAWN} new priorities", "commit", timed(lambda i: replay.commit(f"new{i}", "critic", {"priorities": priority_rows(i)}), repeats)[1]),
        ("", "SQL, row by row", timed(by_row, repeats)[1]),
        ("", "SQL, changed in place", timed(in_place, repeats)[1]),
    ]  # fmt: skip


def appends(path: Path, n: int, repeats: int) -> list[tuple[str, str, Times]]:
    """Seconds of n turns, each way."""
    replay, rows, few = Replay(path), turn_rows(n, "a"), turn_rows(max(TURNS, n // 100), "b")

    def by_row(i: int) -> None:
        with alone(path) as raw:
            marks = ", ".join("?" * (1 + len(few[0])))
            raw.executemany(f"insert into turns values ({marks})", [[f"slow{i}", *row.values()] for row in few])

    slow = Times(*([one * n / len(few) for one in kind] for kind in timed(by_row, repeats)[1]))
    return [
        (f"{n:,} new turns", "commit", timed(lambda i: replay.commit(f"turns{i}", "collect", {"turns": rows}), repeats)[1]),
        ("", f"SQL, row by row (of {len(few)})", slow),
    ]  # fmt: skip


def whole_way(path: Path, collects: list[str], critics: list[str]) -> list[tuple[str, str, Times]]:
    """What targets does before it asks the engine: candidates and losses, the draw, and what was drawn in full."""

    def go(replay: Replay) -> None:
        pool = usable(candidates(replay, collects))
        drawn = draw(pool, known_losses(replay, critics), DrawConfig(transitions=DRAWN), np.random.default_rng(SEED))
        assert len(read_in_full(replay, drawn)) == DRAWN

    kept, reopened = (timed(lambda i, kind=kind: go(kind(path)), 1)[1] for kind in (Replay, Reopening))
    return [(f"from the file to {DRAWN} in full", "one DuckDB is kept", kept), ("", "a DuckDB for each use", reopened)]


class Reopening(Replay):
    """The replay with a DuckDB made for each use."""

    @contextmanager
    def _open(self, *, write: bool) -> Any:
        let_go()
        with super()._open(write=write) as connection:
            yield connection


def table(lines: list[tuple[str, str, Times]], count: int) -> None:
    """count: what a call draws or writes."""
    for what, how, times in lines:
        a_second = count / statistics.median(times.wall)
        print(f"| {what} | {how} | {cells(times)} | {ratio(times, lines[0][2]):.1f} | {a_second:,.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transitions", type=int, default=1_000_000, help="in the replay (default: 1,000,000)")
    parser.add_argument("--turns", type=int, default=20_000, help="that are appended at once (default: 20,000)")
    parser.add_argument("--repeats", type=int, default=9, help="of each (default: 9)")
    args = parser.parse_args()
    print("| what | how | time | processor | ratio | a second |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "replay.duckdb"
        collects, critics = fill(path, args.transitions)
        for count, work in (
            (DRAWN, lambda: draws(path, args.transitions, args.repeats)),
            (DRAWN, lambda: updates(path, args.repeats)),
            (args.turns, lambda: appends(path, args.turns, max(1, args.repeats // 3))),
            (DRAWN, lambda: whole_way(path, collects, critics)),
        ):
            table(work(), count)


if __name__ == "__main__":
    main()
