"""Ask the operating system about a failure: does a process still live, is the disk full?"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from stages.frame.types import TurnwiseError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
START_TOLERANCE_S = 2.0  # of a start time in seconds since the epoch: it is derived from the boot time, which a clock adjustment moves a little
_FULL = re.compile(r"No space left|File too large|quota exceeded|disk is full", re.IGNORECASE)


def process_tags() -> dict[str, str]:
    """Host, pid and start of this process: a pid alone is given to another process in time."""
    return {"host": socket.gethostname(), "pid": str(os.getpid()), "process_start": _start(os.getpid())}


def is_dead(tags: Mapping[str, str]) -> bool:
    """Whether the process of these `process_tags` is known to be gone; False for one of another host."""
    if tags.get("host") != socket.gethostname():
        return False
    pid, started = int(tags["pid"]), tags["process_start"]
    try:
        if "/" in started:
            return _start(pid) != started
        return abs(_epoch_start(pid) - float(started)) > START_TOLERANCE_S
    except ProcessLookupError:
        return True


def is_here(tags: Mapping[str, str]) -> bool:
    """Whether the process of these `process_tags` is one of this machine since its last start. A name alone says little:
    two machines may have the same one.
    """
    boot = tags.get("process_start", "").partition("/")
    same = not boot[1] or not BOOT_ID.exists() or BOOT_ID.read_text().strip() == boot[0]
    return tags.get("host") == socket.gethostname() and same


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


@contextmanager
def whole(target: Path) -> Iterator[Path]:
    """A name beside `target` to write to, which becomes it at the end. Raises TurnwiseError on a full disk."""
    unfinished = target.with_name(f".{target.name}.part")
    try:
        with disk_told(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            yield unfinished
            unfinished.replace(target)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def first_line(error: BaseException, length: int = 120) -> str:
    """The start of an error's text, to be quoted in a sentence."""
    return (str(error).splitlines() or [type(error).__name__])[0][:length]


def _start(pid: int) -> str:
    """On Linux "boot id/ticks from boot to start", which no clock moves; else seconds. Raises ProcessLookupError."""
    if not BOOT_ID.exists():
        return repr(_epoch_start(pid))
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None
    # The second field is the program's name in parentheses, which may hold spaces and parentheses; the third is the state,
    # the 22nd the start.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):  # it has ended, and whoever started it has not asked how
        raise ProcessLookupError(pid)
    return f"{BOOT_ID.read_text().strip()}/{fields[19]}"


def _epoch_start(pid: int) -> float:
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            raise ProcessLookupError(pid)
        return float(process.create_time())
    except psutil.NoSuchProcess:
        raise ProcessLookupError(pid) from None
