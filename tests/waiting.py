"""For tests of processes and servers, which take their time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import psutil


def until(true: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


def ended(processes: Iterable[psutil.Process]) -> bool:
    """Whether all of them have, also where nobody has asked yet how."""
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)
