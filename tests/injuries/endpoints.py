"""An OpenAI-compatible engine that answers late, wrongly or not at all, or that is killed and started again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from commands import Ended

from injuries.bench import Bench, Count, command_of, disturbed, ends_whole
from injuries.endpoint_child import HANG_S, LASTING, PASSING

HERE = Path(__file__).parent
FIRST, LAST = 15, 60  # of the completions, every so manieth is answered badly
DOWN_S = (0.2, 6.0)  # how long an engine is away; the client's tries reach over the shorter ones


def badly_answered(bench: Bench, rng: random.Random) -> Count:
    """Answers that come late or refuse pass when they are asked for again; answers that are wrong end the command with a
    sentence. Neither is in the result.
    """
    count, home, (argv, expected) = Count(1, 1), bench.home(bench.lettered), undisturbed(bench)
    fault = rng.choice([*PASSING, *LASTING])
    count.where[fault] += 1
    with engine(bench, fault, rng.randint(FIRST, LAST)):
        done = bench.run(home, *argv)
    disturbed(count, done)
    if (done.status == 0) != (fault in PASSING):
        count.note("unclear", f"answered with {fault}, it ended with status {done.status}: {done.err[-800:]}")
    with engine(bench):
        again = bench.run(home, *argv)
    ends_whole(count, home, again, expected)
    return count


def restarted(bench: Bench, rng: random.Random) -> Count:
    """The engine is killed while it is at work, and started again on its port without the adapters that it had."""
    count, home, (argv, expected) = Count(1, 1), bench.home(bench.lettered), undisturbed(bench)
    over = threading.Event()

    def live_twice() -> None:
        with engine(bench) as process:
            ready.set()
            over.wait(rng.uniform(0.5, max(1.0, 1.5 * expected.done.cpu_s)))
            process.kill()
        over.wait(rng.uniform(*DOWN_S))
        with engine(bench):
            over.wait()

    ready, lives = threading.Event(), threading.Thread(target=live_twice)
    lives.start()
    ready.wait()
    done = bench.run(home, *argv)
    over.set()
    lives.join()
    disturbed(count, done)
    with engine(bench):
        again = bench.run(home, *argv)
    ends_whole(count, home, again, expected)
    return count


def undisturbed(bench: Bench) -> tuple[tuple[str, ...], Ended]:
    """The command, and what it comes to on an engine that answers well."""
    url = f"http://127.0.0.1:{bench.port}/v1"
    argv = command_of("nlac", "model.engine=openai", f"model.url={url}", f"model.timeout_s={HANG_S / 2}")
    if argv not in bench.known:
        with engine(bench):
            bench.expected(argv, bench.lettered)
    return argv, bench.expected(argv)


@contextmanager
def engine(bench: Bench, fault: str = "", every: int = 0) -> Iterator[subprocess.Popen[str]]:
    """The engine in a process of its own, once it listens."""
    path = os.pathsep.join([str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    argv = [sys.executable, str(HERE / "endpoint_child.py"), str(bench.lettered), str(bench.port), fault, str(every)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), "the engine did not start"
            yield process
        finally:
            process.kill()
