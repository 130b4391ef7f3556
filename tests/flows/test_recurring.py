"""What a deployment's next run is: each kind does work that the one before did not, and is a command that a person can
type.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import pytest
from fakes import Stages, fake_stages

from flows import presets
from flows.orchestration.launch import Launcher, launch_run
from flows.orchestration.recurring import next_sets
from flows.report import Display
from flows.telling import Summary
from stages.store.workspace import Workspace
from turnwise import cli

DUE = datetime(2026, 11, 22, 3, 0, tzinfo=UTC)
NEXT_DAY = datetime(2026, 11, 23, 3, 0, tzinfo=UTC)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stages]:
    with fake_stages(monkeypatch) as found:
        found.win_rates |= dict.fromkeys(range(3, 10), 0.5)
        yield found


@pytest.fixture
def preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("flows.orchestration.launch.check_data", lambda run: None)
    (tmp_path / "nightly.toml").write_text("iterations = 2\nmethod = 'rft'\n")
    return str(tmp_path / "nightly.toml")


def go(preset: str, sets: list[str], workspace: Workspace, *, force: bool = False) -> Summary:
    launcher = Launcher(workspace.home, None)
    with Display(quiet=True) as display:
        return launch_run(presets.load(preset, sets), workspace, launcher, display, sets=sets, force=force)


def test_a_new_seed_is_the_time_at_which_the_run_was_due(preset: str, stages: Stages, workspace: Workspace) -> None:
    first = next_sets(preset, ["collect.lr=0.2"], "new_seed", DUE, workspace)
    assert first == ["collect.lr=0.2", "seed=1795316400"]
    go(preset, first, workspace)
    before = len(stages.calls)
    go(preset, next_sets(preset, ["collect.lr=0.2"], "new_seed", NEXT_DAY, workspace), workspace)
    assert len(stages.calls) == 2 * before  # nothing was reused
    assert next_sets(preset, ["seed=3"], "new_seed", DUE, workspace) == ["seed=3"]


def test_further_iterations_reuse_those_of_the_finished_run_and_add_as_many(
    preset: str, stages: Stages, workspace: Workspace
) -> None:
    assert next_sets(preset, [], "further", DUE, workspace) == ["iterations=2"]
    first = go(preset, ["iterations=2"], workspace)
    go(preset, ["seed=5", "iterations=6"], workspace)  # another run, whose iterations do not count
    stages.calls.clear()
    assert next_sets(preset, [], "further", DUE, workspace) == ["iterations=4"]
    second = go(preset, ["iterations=4"], workspace)
    assert {i for name, i in stages.calls if name == "collect"} == {2, 3}
    assert [row["runs"]["rft"] for row in second.iterations[1:3]] == [
        row["runs"]["rft"] for row in first.iterations[1:]
    ]
    assert next_sets(preset, [], "further", NEXT_DAY, workspace) == ["iterations=6"]


def test_further_iterations_that_did_not_finish_are_wanted_again(
    preset: str, stages: Stages, workspace: Workspace
) -> None:
    go(preset, ["iterations=2"], workspace)
    stages.raises["rft", 3] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        go(preset, ["iterations=4"], workspace)
    assert next_sets(preset, [], "further", NEXT_DAY, workspace) == ["iterations=4"]


def test_when_a_preset_runs_and_what_its_runs_are_do_not_make_it_another_run(
    preset: str, stages: Stages, workspace: Workspace
) -> None:
    go(preset, ["iterations=2"], workspace)
    assert next_sets(preset, ["cron=0 3 * * *", "each_run=further"], "further", DUE, workspace)[-1] == "iterations=4"


def test_a_forced_run_changes_nothing_and_reuses_nothing(preset: str, stages: Stages, workspace: Workspace) -> None:
    go(preset, [], workspace)
    before = len(stages.calls)
    go(preset, next_sets(preset, [], "force", DUE, workspace), workspace, force=True)
    assert len(stages.calls) == 2 * before


def test_a_preset_says_what_its_scheduled_runs_are_and_by_default_they_do_work() -> None:
    assert get_args(presets.EachRun) == ("new_seed", "further", "force", "champion")
    assert {presets.load(name).each_run for name in presets.names()} == {"new_seed"}


def told(argv: str, home: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = cli.main([*argv.split(), "--home", str(home)])
    out, err = capsys.readouterr()
    return status, out if status == 0 else err


def test_a_run_that_was_due_can_be_made_by_hand(
    preset: str, stages: Stages, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(Path(__file__).parents[2] / "data" / "base", home / "data" / "base")
    Path(preset).write_text("iterations = 2\nmethod = 'rft'\ntimezone = 'Europe/Berlin'\n")
    for due in ("2026-11-22T03:00+00:00", "2026-11-22T04:00"):
        status, out = told(f"run {preset} --due {due} --dry-run --json", home, capsys)
        assert status == 0 and json.loads(out)["config"]["seed"] == DUE.timestamp()
    status, out = told(f"run {preset} --plain --quiet", home, capsys)
    assert status == 0, out
    status, out = told(f"run {preset} --due 2026-11-23T04:00 --set each_run=further --dry-run --json", home, capsys)
    assert status == 0 and json.loads(out)["config"]["iterations"] == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("--due yesterday", "--due yesterday: wanted a time like"),
        ("--due 2026-11-22T03:00 --seeds 2", "--due: a sweep"),
    ],
)
def test_a_time_that_is_none_is_one_sentence(
    preset: str, changes: str, said: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, err = told(f"run {preset} {changes}", home, capsys)
    assert status == 2 and said in err and err.count("\n") == 1
