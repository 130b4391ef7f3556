"""What was stored under a preset's name of before goes on under its name of today."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fakes import Stages, fake_stages

from flows import parts, presets
from flows.evidence.study import cells
from flows.orchestration.launch import Launcher, launch_run
from flows.orchestration.recurring import next_sets
from flows.report import Display
from flows.telling import Summary
from stages.store.workspace import Workspace

DUE = datetime(2026, 11, 22, 3, 0, tzinfo=UTC)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stages]:
    with fake_stages(monkeypatch) as found:
        found.win_rates |= dict.fromkeys(range(3, 10), 0.5)
        found.won = lambda policy, i: policy is not None
        yield found


@pytest.fixture
def preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A preset that was called "before" and is called "today"."""
    monkeypatch.setattr("flows.orchestration.launch.check_data", lambda run: None)
    monkeypatch.setattr(parts, "before", lambda name: ["before"] if name == "today" else [])
    (tmp_path / "today.toml").write_text("iterations = 2\nmethod = 'rft'\nmatch_episodes = 30\n")
    return str(tmp_path / "today.toml")


def go(preset: str, sets: list[str], workspace: Workspace, called: str) -> Summary:
    run = presets.load(preset, sets).model_copy(update={"preset": called})
    with Display(quiet=True) as display:
        return launch_run(run, workspace, Launcher(workspace.home, None), display, sets=sets)


def test_a_schedule_counts_runs_of_both_names_and_reuses_their_stages(
    preset: str, stages: Stages, workspace: Workspace
) -> None:
    first = go(preset, [], workspace, "before")
    sets = next_sets(preset, [], "further", DUE, workspace)
    assert sets == ["iterations=4"]
    again = go(preset, sets, workspace, "today")
    assert [row["runs"] for row in again.iterations[:3]] == [row["runs"] for row in first.iterations]


def test_a_champion_of_before_is_gone_on_from_and_its_model_goes_on(
    preset: str, stages: Stages, workspace: Workspace
) -> None:
    first = go(preset, next_sets(preset, [], "champion", DUE, workspace), workspace, "before")
    assert first.match["promoted"]
    sets = next_sets(preset, [], "champion", DUE + timedelta(days=1), workspace)
    assert f"goes_on_from={first.run_id}:{first.final['iteration']}" in sets
    second = go(preset, sets, workspace, "today")
    assert second.match["against"] == 1
    assert [one.name for one in workspace.tracking._client.search_registered_models()] == ["before"]


def test_a_stored_run_stands_for_a_cell_whatever_its_preset_was_called() -> None:
    run = presets.load("desk+grpo", ["seed=3"])
    stored = {**json.loads(run.model_dump_json()), "preset": "demo_grpo"}
    assert cells.identity(presets.resolve(stored)) == cells.identity(run)
