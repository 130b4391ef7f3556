"""A finished run of three iterations over stages that need no model, and commands on it. Fixtures of several files."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import Stages, fake_stages

from stages.store import sqlite
from turnwise import cli

NLAC = ["collect", "targets", "critic", "refine", "distill", "evaluate"]
Turnwise = Callable[..., Any]


def begin(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project folder with a preset of three iterations, for stages that need no model."""
    (home / "data").mkdir(exist_ok=True)
    (home / "preset.toml").write_text("iterations = 3\n")
    monkeypatch.chdir(home)
    monkeypatch.setattr("flows.workspace.model_hash", lambda run: "base")
    monkeypatch.setattr("flows.workspace.make_engine", lambda run: None)


@pytest.fixture
def turnwise(
    home: Path, stages: Stages, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Turnwise:
    """Runs a command plainly in a fresh project folder; the JSON value that it prints, or its exit status and both
    streams.
    """
    begin(home, monkeypatch)

    def turnwise(*argv: str, raw: bool = False) -> Any:
        stages.calls.clear()
        plain = ("--plain", "--quiet") if argv[0] in ("run", "rerun") else ()
        try:
            status = cli.main((*argv, *plain, *(() if raw else ("--json",))))
        except SystemExit as end:
            status = int(end.code or 0)
        out, err = capsys.readouterr()
        if raw:
            return status, out, err
        assert status == 0, err
        return json.loads(out)

    return turnwise


@pytest.fixture(scope="module")
def finished_run(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A project folder in which the preset was run once, and what was printed. Running takes seconds, copying
    milliseconds.
    """
    home, out = tmp_path_factory.mktemp("finished"), io.StringIO()
    (home / "mlflow").mkdir()
    sqlite.copy(empty_store, home / "mlflow" / "mlflow.db")
    with pytest.MonkeyPatch.context() as monkeypatch, fake_stages(monkeypatch), contextlib.redirect_stdout(out):
        begin(home, monkeypatch)
        assert cli.main(("run", "preset.toml", "--plain", "--quiet", "--json")) == 0
    return home, json.loads(out.getvalue())


@pytest.fixture
def old(turnwise: Turnwise, home: Path, finished_run: tuple[Path, Any]) -> Any:
    folder, summary = finished_run
    shutil.copytree(folder, home, dirs_exist_ok=True)
    return summary


def runs_of(summary: Any, iteration: int) -> dict[str, str]:
    return dict(summary["iterations"][iteration + 1]["runs"])
