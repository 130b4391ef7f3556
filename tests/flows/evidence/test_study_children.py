"""The runs of a study as processes of their own (flows.evidence.study.children)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until

from flows.evidence.study import children


def test_two_studies_that_run_one_cell_at_once_end_it_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "TURNWISE", (sys.executable, "-c", "print('done')"))
    cell: Any = SimpleNamespace(part="table", title="nlac / desk / seed 50", preset="demo", sets=(), seed=50)
    started = []
    for process in (1, 2):  # one after the other, as two commands would be
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        started.append(children._start(cell, tmp_path, plain=True))
    assert until(lambda: not any(child.running() for child in started))
    assert [children._ended(child) for child in started] == ["", ""]
