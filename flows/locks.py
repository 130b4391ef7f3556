"""Locks that end with their process, however it ended: a file that the system holds for it, with a line that says who.

One GPU serves one pipeline of a machine at a time: a run takes the lock of its device before it loads a model, and
keeps it until its process ends. There is no lock for a CPU, whose cores are shared anyway; there `turnwise serve
--limit` counts alone.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

POLL_S = 1.0
_held: dict[Path, int] = {}  # open files: the system gives a lock back when its file is closed


def lock(path: Path, who: str) -> str:
    """Hold `path` until this process ends. Returns "" where it is held now, or the line of the process that holds it."""
    if path in _held:
        return ""
    file = _open(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        said = os.read(file, 1000).decode(errors="replace").strip()
        os.close(file)
        return said or "another process"
    os.ftruncate(file, 0)
    os.pwrite(file, who.encode(), 0)
    _held[path] = file
    return ""


def hold_device(device: str, who: str) -> None:
    """Hold a device of this machine until this process ends; waits, and says for whom, while another process holds it."""
    path, told = Path(tempfile.gettempdir()) / f"turnwise-{device}.lock", ""
    while holder := lock(path, who):
        if holder != told:
            print(
                f"Waiting for {device}, which has one run at a time; it is held by {holder}.",
                file=sys.stderr,
                flush=True,
            )
        told = holder
        time.sleep(POLL_S)


def device() -> str:
    """Name of the GPU that a run of this process would use, the same for every process of the machine; "" where there
    is none.
    """
    import torch

    if not torch.cuda.is_available():
        return ""
    return f"gpu-{torch.cuda.get_device_properties(0).uuid}"


def _open(path: Path) -> int:
    # Opened as it is where it is there: in a shared folder for temporary files Linux refuses to "create" the file of
    # another user.
    with suppress(FileNotFoundError):
        return os.open(path, os.O_RDWR)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with suppress(PermissionError):  # another user was quicker, and did this
        os.fchmod(file, 0o666)  # whatever the umask: other users wait for the device, too
    return file
