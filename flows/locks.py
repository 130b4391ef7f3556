"""Locks that end with their process, however it ends: a locked file, with a line that names the holder.

One pipeline per GPU: a run locks its device before it loads a model, and holds the lock until its process ends. A CPU
has no lock, because its cores are shared anyway. There only `turnwise serve --limit` counts.
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
    """Hold `path` until this process ends. Returns "" on success, else the line of the process that holds it."""
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
    """Hold a device of this machine until this process ends. While another process holds it, wait and say for whom."""
    path, told = Path(tempfile.gettempdir()) / f"turnwise-{device}.lock", ""
    while holder := lock(path, who):
        if holder != told:
            print(f"Waiting for {device}: one run at a time. It is held by {holder}.", file=sys.stderr, flush=True)
        told = holder
        time.sleep(POLL_S)


def devices(n: int) -> list[str]:
    """Names of the GPUs that this process and those that train with it would use, n at most; none without a GPU. All
    processes of the machine see the same names.
    """
    import torch

    found = min(n, torch.cuda.device_count()) if torch.cuda.is_available() else 0
    return [f"gpu-{torch.cuda.get_device_properties(i).uuid}" for i in range(found)]


def _open(path: Path) -> int:
    # An existing file is opened without O_CREAT: in a shared temporary folder Linux refuses to "create" another user's
    # file.
    with suppress(FileNotFoundError):
        return os.open(path, os.O_RDWR)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with suppress(PermissionError):  # another user was quicker, and did this
        os.fchmod(file, 0o666)  # whatever the umask: other users wait for the device, too
    return file
