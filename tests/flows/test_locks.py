"""Locks: one holder at a time, gone with its process however that ended, and a line for those who wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import locks, presets, workspace
from flows.locks import devices, hold_device, lock

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where device locks lie, for this process and those that a test starts; what is held at the end is given back."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    for path in [path for path in locks._held if path.is_relative_to(tmp_path)]:
        os.close(locks._held.pop(path))


def holder(*code: str) -> subprocess.Popen[str]:
    """Another process, which says "held" once its lines have run, and stays."""
    script = "\n".join(
        [
            "from pathlib import Path",
            "from flows.locks import hold_device, lock",
            *code,
            "print('held', flush=True)",
            "input()",
        ]
    )
    return subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_a_lock_has_one_holder_who_is_named_to_the_others_and_it_ends_with_a_kill(folder: Path) -> None:
    path = folder / "x.lock"
    with holder(f"assert lock(Path({str(path)!r}), 'process 7, demo') == ''") as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert lock(path, "me") == "process 7, demo"
        other.send_signal(signal.SIGKILL)
    assert lock(path, "me") == ""
    assert lock(path, "me again") == ""  # within one process it is held already
    assert path.read_text() == "me"


def test_a_lock_can_be_taken_by_another_user(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        assert lock(folder / "x.lock", "me") == ""
    finally:
        os.umask(before)
    assert (folder / "x.lock").stat().st_mode & 0o777 == 0o666


def test_who_wants_a_device_that_is_held_says_who_holds_it_and_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with holder("hold_device('gpu-1', 'process 7, demo seed 0')") as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        waits: list[str] = []

        def sleep(seconds: float) -> None:
            waits.append(capsys.readouterr().err)
            if len(waits) == 3:
                other.kill()
                other.wait()

        monkeypatch.setattr("flows.locks.time.sleep", sleep)
        hold_device("gpu-2", "me")  # another device is free
        assert not waits
        hold_device("gpu-1", "me")
    assert waits[0] == "Waiting for gpu-1: one run at a time. It is held by process 7, demo seed 0.\n"
    assert waits[1:3] == ["", ""]  # said once
    assert (folder / "turnwise-gpu-1.lock").read_text() == "me"


def test_a_run_holds_its_gpus_from_its_first_engine_on_and_nothing_on_a_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "make_engine", lambda run: object())
    engine = workspace.engine_cache(folder)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert devices(1) == []
    engine(presets.load("tiny"))
    assert not list(folder.glob("*.lock"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: SimpleNamespace(uuid=f"uuid-{number}"))
    engine(presets.load("tiny", ["seed=4", "model.dtype=bfloat16"]))
    assert (folder / "turnwise-gpu-uuid-0.lock").read_text() == f"process {os.getpid()}, tiny seed 4 in {folder}"
    assert len(list(folder.glob("*.lock"))) == 1
    engine(presets.load("tiny", ["seed=4", "train.processes=2"]))
    assert {path.name for path in folder.glob("*.lock")} == {f"turnwise-gpu-uuid-{i}.lock" for i in (0, 1)}
