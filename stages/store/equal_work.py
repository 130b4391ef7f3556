"""Equal work at once: one process works, the others wait for it.

Each fingerprint has a lock file. The operating system releases it however its holder ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.store.machine import disk_told

GRACE_S = 1.0  # before a wait is told: shorter ones are none, and by then it can be said whose work it is
POLL_S = 0.2  # between two looks at a lock that another process holds


@contextmanager
def held(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`. Another process that holds it is waited for without an end, `waiting` called once.

    Two threads of a process wait for each other, too. Raises TurnwiseError where the disk is full.
    """
    from filelock import FileLock, Timeout

    with disk_told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=GRACE_S)
        except Timeout:
            waiting()
            lock.acquire(poll_interval=POLL_S)
    try:
        yield
    finally:
        # while it is held: who waits sees that its file has no name any more, and makes it anew
        path.unlink(missing_ok=True)
        lock.release()
