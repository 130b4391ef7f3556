"""Runs a command that must not outlive its owner.

    python -m flows.leash COMMAND ARGUMENT ...

The owner holds the write end of this process's standard input. It closes when the owner lets go or is killed with -9.
Then the command and all that it started are stopped. This works on every POSIX system without the owner's help.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

GRACE_S = 5.0  # between the request to stop and the kill
POLL_S = 0.05
SIGNALLED = 192  # an exit status above is 256 less the number of a signal


class Leashed:
    """A command on a leash, seen from its owner. Its output goes to the file `log`, which is kept if anything was said."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str],
        cwd: Path | None = None,
        hands: Sequence[int] = (),
    ) -> None:
        """hands: open file descriptors that the command gets, under the same numbers."""
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flows.leash", *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=cwd,
                pass_fds=hands,
                # Ctrl-C reaches the whole foreground group. The owner stops its servers itself, after its last report
                # to them.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """The command's exit status; None while it runs, 0 where it was stopped."""
        return self._process.poll()

    @property
    def killed(self) -> bool:
        """Whether a signal ended the command."""
        return (self.status or 0) % 256 > SIGNALLED

    def how(self) -> str:
        """How it ended, as a sentence goes on behind its name."""
        if self.killed:
            return f"was killed (signal {256 - (self.status or 0) % 256})"
        return f"ended: {self.tail(2)}"

    def stop(self) -> None:
        """Stop the command and wait until it is gone. Idempotent."""
        stdin: IO[bytes] | None = self._process.stdin
        if stdin is not None:
            with contextlib.suppress(OSError):
                stdin.close()
        try:
            self._process.wait(timeout=3 * GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.log.is_file() and not self.log.stat().st_size:
            self.log.unlink()

    def tail(self, lines: int = 3) -> str:
        """The last lines that the command wrote."""
        return " / ".join(self.log.read_text(errors="replace").strip().splitlines()[-lines:])


def main(command: Sequence[str]) -> int:
    """Run the command until it ends or standard input closes; its exit status, or 0 where it was stopped."""
    # Open files stay open. Beside the standard ones they are only those that the command is to get.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, close_fds=False)
    stopper = threading.Thread(target=_stop_group, args=(child,))
    once = threading.Lock()

    def stop() -> None:
        if once.acquire(blocking=False):
            stopper.start()

    def watch() -> None:
        # The raw descriptor: a buffered reader would hold a lock that the interpreter wants at its own end.
        while os.read(0, 1024):
            pass
        stop()

    signal.signal(signal.SIGTERM, lambda *_: stop())
    threading.Thread(target=watch, daemon=True).start()
    status = child.wait()
    asked = once.locked()
    stop()  # what it started goes with it, however it ended
    stopper.join()
    return 0 if asked else status


def _stop_group(child: subprocess.Popen[bytes]) -> None:
    """Ask the command's whole process group to stop, then kill what is left. Return once it is gone. (A killed process
    lives on until its memory is freed.)
    """
    with contextlib.suppress(ProcessLookupError):
        for request in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(child.pid, request)
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline:
                if not _living(child.pid):
                    return
                time.sleep(POLL_S)


def _living(group: int) -> bool:
    """Whether a process of the group still runs. An ended one may stay listed until its parent reads its status."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
