"""A command that ends before its time, or works where it cannot write or cannot trust the clock; then the same command
again.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

from commands import TITLES, Commands, Job, titles_by_status

from injuries.bench import Bench, Count, command_of, disturbed, ends_whole

DAY_S = 86400.0
MOST_KILLS = 12
MOST_MISSES = 5  # on a machine that is quicker now than when the command's time was taken
START_S = 0.6  # processor time before the first stage that is not finished
MOMENTS = ("started", "inside", "rows", "committed")


def killed(bench: Bench, rng: random.Random) -> Count:
    """kill -9, one to twelve times, at random moments of any method."""
    return struck(
        bench, rng, bench.run, command_of(rng.choice(bench.methods)), signal.SIGKILL, rng.randint(1, MOST_KILLS)
    )


def killed_under_prefect(bench: Bench, rng: random.Random) -> Count:
    """The same, as flow runs of a Prefect server."""
    assert bench.prefect is not None
    argv = command_of(rng.choice(bench.methods))
    return struck(bench, rng, bench.prefect, argv, signal.SIGKILL, rng.randint(1, MOST_KILLS), plain=False)


def signalled(bench: Bench, rng: random.Random) -> Count:
    """The terminal is closed, Ctrl-C, or what a supervisor sends."""
    number = rng.choice([signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
    return struck(bench, rng, bench.run, command_of(rng.choice(bench.methods)), number, 1)


def clock_back(bench: Bench, rng: random.Random) -> Count:
    """What was begun while the clock was a day ahead is killed, and goes on with the right time."""
    return struck(
        bench, rng, bench.run, command_of(rng.choice(bench.methods)), signal.SIGKILL, 1, clock_s=rng.uniform(60, DAY_S)
    )


def pipe_closed(bench: Bench, rng: random.Random) -> Count:
    """Nobody reads what the command prints: it does its work all the same."""
    count, home, argv = Count(1, 1), bench.home(), command_of("rft")
    closed = rng.choice([(1,), (2,), (1, 2)])
    (done,) = bench.run.at_once(home, Job(argv, closed=closed))
    if done.status != 0:
        count.note("unclear", f"streams {closed} closed: status {done.status}: {done.err[-500:]}")
    again = bench.run(home, *argv)
    if again.ran:
        count.note("lost", f"streams {closed} closed: {again.ran} ran again")
    ends_whole(count, home, again, bench.expected(argv))
    return count


def disk_full(bench: Bench, rng: random.Random) -> Count:
    """From a moment of some stage on nothing can be written."""
    count, home, argv = Count(1, 1), bench.home(), command_of()
    title, moment = rng.choice(TITLES), rng.choice(MOMENTS)
    (done,) = bench.run.at_once(home, Job(argv, title, moment, "fill_the_disk"))
    count.where[moment] += 1
    disturbed(count, done)
    if done.status == 0 and not title.startswith("evaluate"):
        count.note("unclear", f"the disk was full {moment} {title}, and nothing was said")
    ends_whole(count, home, bench.run(home, *argv), bench.expected(argv))
    return count


def struck(
    bench: Bench, rng: random.Random, run: Commands, argv: tuple[str, ...], number: int, times: int, *,
    clock_s: float = 0.0, plain: bool = True,
) -> Count:  # fmt: skip
    """As `_struck`; where the command had ended before any signal came, that was no try, and another one is made."""
    for _ in range(MOST_MISSES):
        count = _struck(bench, rng, run, argv, number, times, clock_s=clock_s, plain=plain)
        if count.faults or not count.is_clean:
            break
    return count


def _struck(
    bench: Bench, rng: random.Random, run: Commands, argv: tuple[str, ...], number: int, times: int, *,
    clock_s: float, plain: bool,
) -> Count:  # fmt: skip
    """The command is sent a signal and given again, so many times; then it ends. The moments are spread over the processor
    time that the whole takes.
    """
    expected, count, home, part_done = bench.expected(argv), Count(1), bench.home(), 0.0
    argv = argv if plain else tuple(part for part in argv if part != "--plain")
    for moment in sorted(rng.random() for _ in range(times)):
        after_s = START_S * rng.random() + expected.done.cpu_s * max(0.0, moment - part_done)
        (done,) = run.at_once(home, Job(argv, signal=number, after_s=after_s, clock_s=clock_s))
        disturbed(count, done, number)
        count.faults += done.status != 0
        part_done = len(done.reused + done.ran) / len(expected.done.ran)
    ends_whole(count, home, run(home, *argv), expected)
    count.where.update(_where(home))
    return count


def _where(home: Path) -> dict[str, int]:
    """The stages in which runs of it died; "between" where only the pipeline's did."""
    found: dict[str, int] = {}
    dead = [
        title
        for status in ("KILLED", "FAILED")
        for title, n in titles_by_status(home).get(status, {}).items()
        for _ in range(n)
    ]
    for title in dead:
        if title != "pipeline":
            found[title.split()[0]] = found.get(title.split()[0], 0) + 1
    if more := dead.count("pipeline") - sum(found.values()):
        found["between stages"] = more
    return found
