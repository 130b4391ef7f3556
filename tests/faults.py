"""The fault suite: runs are disturbed, the same command is given again, and what readers see is compared with an
undisturbed run: rows, fingerprints, metrics, files.

    python tests/faults.py --tries 120 --seed 0
    python tests/faults.py --only kill --tries 50 --methods nlac rft

It stands among the tests because it is made of what they use (`commands.py`, `command_child.py`, `openai_stub.py`);
`tests/test_faults.py` is its short form. The seed decides what is tried; where a signal falls, the machine decides, too.
Exit status 1 where a count is not 0.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from commands import commands
from injuries import bits, endpoints, ends, others
from injuries.bench import SETS, Bench, Count, Kind

KINDS: dict[str, Kind] = {
    "kill": ends.killed, "kill-prefect": ends.killed_under_prefect, "signal": ends.signalled,
    "at-once": others.at_once, "disk-full": ends.disk_full, "duckdb-held": others.duckdb_held,
    "sqlite-held": others.sqlite_held, "engine": endpoints.badly_answered, "engine-restart": endpoints.restarted,
    "pipe": ends.pipe_closed, "clock": ends.clock_back, "bits": bits.flipped,
}  # fmt: skip
SHARE = {"kill": 0.4, "kill-prefect": 0.1, "bits": 0.15, "signal": 0.08, "at-once": 0.06, "engine": 0.06}
"""Of all tries; the other kinds have a part in 40 each."""


def tries_of(kind: str, tries: int) -> int:
    return max(1, round(tries * SHARE.get(kind, 1 / 40)))


def suffer(bench: Bench, kind: str, numbers: Sequence[int], seed: int) -> Count:
    """The tries of a kind with these numbers; what each of them does follows from seed, kind and number."""
    count = Count()
    for number in numbers:
        before = set(bench.folder.iterdir())
        try:
            found = KINDS[kind](bench, random.Random(f"{seed} {kind} {number}"))
        except Exception as error:  # of the suite itself, or a store that cannot be read any more: the others are tried
            traceback.print_exc()
            found = Count(1)
            found.note("unclear", f"the try did not come to its end: {type(error).__name__}: {error}")
        kept = {one.home for one in bench.known.values()}
        for folder in set(bench.folder.iterdir()) - before - kept:
            if found.is_clean and folder.name.startswith("home"):
                shutil.rmtree(folder)
        for note in found.notes:
            print(f"{kind} {number}: {note}", file=sys.stderr, flush=True)
        count.add(found)
    return count


def table(counts: Mapping[str, Count]) -> str:
    lines = ["| kind | tries | faults | lost | doubled | wrong reuse | other ends |", "|---|---|---|---|---|---|---|"]
    total = Count()
    for kind, count in counts.items():
        total.add(count)
        lines.append(_line(kind, count))
    lines.append(_line("all", total))
    for kind, count in counts.items():
        if count.where:
            lines.append(f"\n{kind} fell into: " + ", ".join(f"{name} {n}" for name, n in sorted(count.where.items())))
    return "\n".join(lines)


def _line(kind: str, count: Count) -> str:
    return f"| {kind} | {count.tries} | {count.faults} | {count.lost} | {count.doubled} | {count.wrong} | {count.unclear} |"


@contextmanager
def a_bench(folder: Path, methods: Sequence[str], *, prefect: bool) -> Iterator[Bench]:
    from models import save_base

    from flows.orchestration.server import start_server
    from stages.store.tracking import Tracking

    Tracking(folder / "mlflow").initialise()
    base = save_base(folder / "base")
    with ExitStack() as stack:
        flows = None
        if prefect:
            server = start_server(folder)
            stack.callback(server.stop)
            flows = stack.enter_context(commands({"PREFECT_API_URL": server.wait()}))
        run, whole = stack.enter_context(commands()), stack.enter_context(commands())
        yield Bench(folder, folder / "mlflow" / "mlflow.db", base, run, whole, flows, methods=methods)


def main() -> int:
    parser = argparse.ArgumentParser(description="Disturb runs, and compare what is left with undisturbed ones.")
    parser.add_argument("--tries", type=int, default=60, help="about so many in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(KINDS), nargs="+", help="kinds; then --tries is of each")
    parser.add_argument("--methods", choices=list(SETS), nargs="+", default=list(SETS))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further try after so long")
    args = parser.parse_args()
    wanted = {kind: args.tries if args.only else tries_of(kind, args.tries) for kind in args.only or KINDS}
    counts, started = {kind: Count() for kind in wanted}, time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="turnwise-faults-"))
    with a_bench(folder, args.methods, prefect="kill-prefect" in wanted) as bench:
        # Kind by kind in turn, so that one that is stopped early has tried them all.
        order = sorted((number / wanted[kind], kind, number) for kind in wanted for number in range(wanted[kind]))
        for _, kind, number in order:
            if time.monotonic() - started < 60 * args.minutes:
                counts[kind].add(suffer(bench, kind, [number], args.seed))
                print(f"{kind} {number}: {counts[kind].faults} faults so far", file=sys.stderr, flush=True)
        print(table(counts), flush=True)
    if clean := all(count.is_clean for count in counts.values()):
        shutil.rmtree(folder)
    else:
        print(f"what was left of the runs that differ is in {folder}", file=sys.stderr)
    return 0 if clean else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
