"""A command on a leash ends with its owner, however that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import ended, until

from flows.leash import Leashed

ROOT = Path(__file__).parents[2]
SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


def test_a_command_on_the_leash_ends_when_it_is_stopped(tmp_path: Path) -> None:
    leashed = Leashed(SLEEP, log=tmp_path / "log", env=os.environ)
    assert until(lambda: "up" in leashed.tail())
    (child,) = psutil.Process(leashed.pid).children()
    leashed.stop()
    assert not leashed.running()
    assert not child.is_running()


def test_what_a_command_on_the_leash_started_has_time_to_end_well_and_does_not_outlive_it(tmp_path: Path) -> None:
    # The command ends at the first signal, and what it started a moment later, after a last word.
    last = "import signal, sys, time\ndef end(*_): time.sleep(1); print('ended well', flush=True); sys.exit()\nsignal.signal(signal.SIGTERM, end)"
    below = f"{last}\nprint('up', flush=True); time.sleep(600)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {below!r}]); time.sleep(600)"
    leashed = Leashed([sys.executable, "-c", code], log=tmp_path / "log", env=os.environ)
    assert until(lambda: "up" in leashed.tail())
    children = psutil.Process(leashed.pid).children(recursive=True)
    leashed.stop()
    assert "ended well" in leashed.tail()
    assert ended(children)


@pytest.mark.slow
def test_what_will_not_end_is_killed_and_gone_once_the_command_is_stopped(tmp_path: Path) -> None:
    # Its memory takes a moment to be freed: a process that was only sent its kill would still be there.
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); big = b'x' * 10**9"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {f'{deaf}; {SLEEP[-1]}'!r}]); time.sleep(600)"
    leashed = Leashed([sys.executable, "-c", code], log=tmp_path / "log", env=os.environ)
    assert until(lambda: "up" in leashed.tail())
    children = psutil.Process(leashed.pid).children(recursive=True)
    leashed.stop()
    assert len(children) == 2
    assert ended(children)


def test_what_a_command_on_the_leash_started_ends_with_it_when_it_is_killed(tmp_path: Path) -> None:
    code = f"import subprocess, time; subprocess.Popen({SLEEP!r}); time.sleep(600)"
    leashed = Leashed([sys.executable, "-c", code], log=tmp_path / "log", env=os.environ)
    assert until(lambda: "up" in leashed.tail())
    command, below = psutil.Process(leashed.pid).children(recursive=True)
    command.kill()
    assert until(lambda: not leashed.running())
    assert ended([below])


def test_a_command_on_the_leash_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from flows.leash import Leashed\n"
        f"Leashed({SLEEP!r}, log=Path({str(tmp_path / 'log')!r}), env=os.environ); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        assert until(lambda: (tmp_path / "log").is_file() and "up" in (tmp_path / "log").read_text())
        below = psutil.Process(owner.pid).children(recursive=True)
        assert len(below) == 2  # the leash and the command
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    assert until(lambda: ended(below))


def test_a_command_on_the_leash_gets_the_files_that_it_is_handed(tmp_path: Path) -> None:
    code = "import os, sys; os.write(int(sys.argv[1]), b'handed on')"
    with (tmp_path / "written").open("wb") as written:
        leashed = Leashed(
            [sys.executable, "-c", code, str(written.fileno())],
            log=tmp_path / "log",
            env=os.environ,
            hands=[written.fileno()],
        )
    assert until(lambda: not leashed.running())
    assert (tmp_path / "written").read_text() == "handed on"
