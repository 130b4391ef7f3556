"""Commands over a DuckDB file that is gone or damaged: the runs keep their rows, so nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import Stages

from turnwise import cli

Turnwise = Callable[..., tuple[int, str, str]]
COUNT = ("sql", "select count(*) as n from commits", "--json")


@pytest.fixture
def turnwise(
    home: Path, stages: Stages, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Turnwise:
    """Runs a command in a project folder with a finished run of stages that learn nothing."""
    (home / "data").mkdir()
    (home / "preset.toml").write_text("iterations = 1\n")
    monkeypatch.chdir(home)
    monkeypatch.setattr("flows.workspace.model_hash", lambda run: "base")
    monkeypatch.setattr("flows.workspace.make_engine", lambda run: None)
    stages.won = lambda adapter, scenario: scenario % 2 == 0  # with it they leave rows of episodes

    def turnwise(*argv: str) -> tuple[int, str, str]:
        status = cli.main(argv)
        return status, *capsys.readouterr()

    assert turnwise("run", "preset.toml", "--plain", "--quiet")[0] == 0
    return turnwise


def value(ran: tuple[int, str, str]) -> Any:
    status, out, err = ran
    assert status == 0, err
    return json.loads(out)


def test_a_query_after_the_file_was_deleted_counts_every_finished_run(turnwise: Turnwise, home: Path) -> None:
    before = value(turnwise(*COUNT))
    run_id = value(turnwise("runs", "--json"))[0]["run_id"]
    shown = value(turnwise("show", run_id, "--json"))
    evaluated = shown["final"]["run_id"]
    of_stage = value(turnwise("show", evaluated, "--json"))
    (home / "data" / "turnwise.duckdb").unlink()
    assert value(turnwise("show", evaluated, "--json")) == of_stage and of_stage["episodes"]
    assert value(turnwise(*COUNT)) == before
    assert value(turnwise("verify", "--json"))["lost"] == {}


def test_a_damaged_file_names_the_command_that_makes_it_again(turnwise: Turnwise, home: Path) -> None:
    before = value(turnwise(*COUNT))
    file = home / "data" / "turnwise.duckdb"
    file.write_bytes(file.read_bytes()[:5000])
    for argv in (COUNT, ("verify",), ("run", "preset.toml", "--plain", "--quiet", "--force")):
        status, out, err = turnwise(*argv)
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert "is damaged" in err and "Run: turnwise verify --rebuild" in err
    assert value(turnwise("verify", "--rebuild", "--json")) == {"orphans": [], "changed": {}, "impossible": {}, "lost": {}, "mended": False}  # fmt: skip
    assert value(turnwise(*COUNT)) == before


def test_lost_rows_are_listed_and_a_mended_run_is_made_again(turnwise: Turnwise, home: Path, stages: Stages) -> None:
    file = next((home / "mlflow" / "artifacts" / "evaluate").rglob("episodes.parquet"))
    file.unlink()
    assert turnwise("verify", "--rebuild")[0] == 0  # the old file still has them
    (home / "data" / "turnwise.duckdb").unlink()
    status, out, _ = turnwise("verify")
    assert status == 1 and f"were wanted from {file}, but it is gone. Run: turnwise verify --mend" in out
    assert turnwise(*COUNT)[0] == 1  # a count without them would be wrong
    mended = value(turnwise("verify", "--mend", "--json"))
    assert mended["lost"].keys() == {file.parts[-4]}
    stages.calls.clear()
    assert turnwise("run", "preset.toml", "--plain", "--quiet")[0] == 0
    assert [name for name, _ in stages.calls] == ["evaluate"]
    assert turnwise("verify")[0] == 0
