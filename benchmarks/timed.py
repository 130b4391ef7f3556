"""Wall and processor time of repeated calls, and how a table tells them. Other work on the machine only ever adds; to
processor time it adds least.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from resource import RUSAGE_CHILDREN, getrusage
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Times(NamedTuple):
    """Seconds of each call."""

    wall: list[float]
    cpu: list[float]  # of this process and of those that it waited for


def timed(work: Callable[[int], T], repeats: int, first: int = 1) -> tuple[T, Times]:
    """What the last call gave, and the times of all but the `first` ones; a call is told which one it is, from 0."""
    times = Times([], [])
    for i in range(first + repeats):
        began, cpu_began = time.perf_counter(), _processor_s()
        found = work(i)
        if i >= first:
            times.wall.append(time.perf_counter() - began)
            times.cpu.append(_processor_s() - cpu_began)
    return found, times


def _processor_s() -> float:
    children = getrusage(RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def cells(times: Times) -> str:
    """Two cells of a table: the median of wall time, with the fastest in brackets, and of processor time."""
    return f"{told(times.wall)} ({told([min(times.wall)])}) | {told(times.cpu)}"


def told(seconds: list[float]) -> str:
    """The median."""
    middle = statistics.median(seconds)
    return f"{middle:.1f} s" if middle >= 1 else f"{1e3 * middle:.1f} ms"


def ratio(times: Times, to: Times) -> float:
    """Of the medians of processor time."""
    return statistics.median(times.cpu) / statistics.median(to.cpu)
