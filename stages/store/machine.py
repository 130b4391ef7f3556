"""What the operating system says of a failure: whether a process still lives, whether the disk is full."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from stages.frame.types import TurnwiseError

START_TOLERANCE_S = 2.0  # a process's start time is derived from the boot time, which a clock adjustment moves a little
_FULL = re.compile(r"No space left|File too large|quota exceeded|disk is full", re.IGNORECASE)


def process_tags() -> dict[str, str]:
    """Host, pid and start time of this process: a pid alone is given to another process in time."""
    return {"host": socket.gethostname(), "pid": str(os.getpid()), "process_start": repr(_process_start(os.getpid()))}


def is_dead(tags: Mapping[str, str]) -> bool:
    """Whether the process of these `process_tags` is known to be gone; False for one of another host, of which nothing
    is known.
    """
    import psutil

    if tags.get("host") != socket.gethostname():
        return False
    try:
        return abs(_process_start(int(tags["pid"])) - float(tags["process_start"])) > START_TOLERANCE_S
    except psutil.NoSuchProcess:
        return True


def disk_full(error: BaseException, path: Path) -> TurnwiseError | None:
    """The error as one sentence where a full disk, a quota or a file size limit is its cause; otherwise None."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or _FULL.search(str(error)):
        return TurnwiseError(
            f"{path} could not be written: the disk is full. Free some space and run the same command again; nothing half-written is read"
        )
    return None


@contextmanager
def disk_told(path: Path) -> Iterator[None]:
    """Tell in a sentence that the disk is full while `path` is written; other errors pass."""
    try:
        yield
    except OSError as error:
        if full := disk_full(error, path):
            raise full from error
        raise


def first_line(error: BaseException, length: int = 120) -> str:
    """The start of an error's text, to be quoted in a sentence."""
    return (str(error).splitlines() or [type(error).__name__])[0][:length]


def _process_start(pid: int) -> float:
    import psutil

    return float(psutil.Process(pid).create_time())
