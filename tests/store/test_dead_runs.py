"""Runs whose process is gone are told from those that still work, after a crash, a reboot and a step of the clock."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from waiting import until

from stages.store import machine
from stages.store.tracking import Tracking


def test_reap_marks_runs_whose_process_is_gone_and_no_other(
    tracking: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as gone:
        gone.wait()
    mine = tracking.start("critic", "mine", {})
    tags = machine.process_tags()
    made = {}
    for name, changed in {
        "gone": {"pid": str(gone.pid)},
        "pid taken again": {"process_start": tags["process_start"] + "0"},
        "gone, by an older turnwise": {"pid": str(gone.pid), "process_start": "1000.0"},
        "pid taken again, by an older turnwise": {"process_start": "1000.0"},
        "mine, by an older turnwise": {"process_start": repr(psutil.Process().create_time())},
        "elsewhere": {"host": "x", "pid": "1"},
    }.items():
        monkeypatch.setattr("stages.store.tracking.process_tags", lambda changed=changed: tags | changed)
        made[name] = tracking.start("critic", name, {})
    assert set(tracking.reap()) == {run_id for name, run_id in made.items() if name.startswith(("gone", "pid"))}
    assert tracking.reap() == []
    assert tracking.status(made["gone"]) == "KILLED"
    assert tracking.tags(made["gone"])["error"] == "its process is gone"
    living = (mine, made["mine, by an older turnwise"], made["elsewhere"])
    assert [tracking.status(run_id) for run_id in living] == ["RUNNING"] * 3


linux = pytest.mark.skipif(
    not machine.BOOT_ID.exists(), reason="the start of a process is told in clock ticks on Linux alone"
)


@linux
def test_a_clock_that_is_stepped_kills_no_living_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil derives a start from the boot time, and that from the clock: a step of the clock moves both."""
    tags = machine.process_tags()
    booted = psutil._pslinux.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted + 3600)
    assert psutil.Process().create_time() > time.time()  # the step is seen
    assert not machine.is_dead(tags)


@linux
def test_a_process_is_dead_after_the_machine_was_booted_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pids and ticks begin anew then: both may well be those of another process."""
    booted = tmp_path / "boot_id"
    booted.write_text("first\n")
    monkeypatch.setattr(machine, "BOOT_ID", booted)
    tags = machine.process_tags()
    assert not machine.is_dead(tags)
    booted.write_text("second\n")
    assert machine.is_dead(tags)


@pytest.mark.parametrize("procfs", [pytest.param(True, marks=linux), False])
def test_a_process_that_has_ended_is_dead_before_anybody_has_asked_how(
    procfs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run below a worker that was stopped: whoever inherits it may take a while to collect it."""
    if not procfs:
        monkeypatch.setattr(machine, "BOOT_ID", tmp_path / "nowhere")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    tags = machine.process_tags() | {"pid": str(child.pid), "process_start": machine._start(child.pid)}
    assert not machine.is_dead(tags)
    child.kill()
    assert until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
    assert machine.is_dead(tags)
    child.communicate()


def test_without_procfs_a_process_is_told_by_its_start_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "BOOT_ID", tmp_path / "nowhere")
    tags = machine.process_tags()
    assert float(tags["process_start"]) == pytest.approx(psutil.Process().create_time())
    assert not machine.is_dead(tags)
    assert machine.is_dead(tags | {"process_start": "1000.0"})


@linux
def test_a_process_of_another_machine_with_the_same_name_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    tags = machine.process_tags()
    assert machine.is_here(tags)
    assert not machine.is_here(tags | {"host": "x"})
    assert not machine.is_here(tags | {"process_start": "another-boot/1"})
    assert machine.is_here(tags | {"process_start": "1000.0"})  # of a system that does not know its boots
