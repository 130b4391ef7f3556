"""`turnwise rerun critic --of RUN --set critic.lr=...` over the real stages: stored targets are read, nothing stored is
changed.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commands import NLAC, RUN, TITLES, Commands, Done, Ended, assert_same_result, stage_runs, titles_by_status

from stages.store.replay import Replay
from stages.store.tables import TABLES
from stages.store.tracking import Tracking

LR = 0.01  # a hundred times the preset's
OPTIONS = ("--plain", "--json", "--quiet")

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Stored:
    """Everything in a folder: rows of each table, bytes of each artifact, status, tags and metrics of each run."""

    n_rows: dict[str, int]
    files: dict[Path, bytes]
    runs: dict[str, Any]


def stored(home: Path) -> Stored:
    tracking, replay = Tracking(home / "mlflow"), Replay(home / "data" / "turnwise.duckdb")
    runs = {info.run_id: info for name in ("pipeline", *NLAC) for info in tracking.runs(name, 1000)}
    files = {
        path.relative_to(home): path.read_bytes()
        for path in (home / "mlflow" / "artifacts").rglob("*")
        if path.is_file()
    }
    return Stored({table: replay.count(table, list(runs)) for table in TABLES}, files, runs)


@dataclass(frozen=True)
class Again:
    """A finished run, and its last critic made again with another learning rate."""

    home: Path
    ended: Done
    done: Done
    before: Stored
    after: Stored

    @property
    def old(self) -> str:
        return stage_runs(self.ended.json)["critic 1"]

    @property
    def new(self) -> str:
        return str(self.done.json["run_id"])


@pytest.fixture(scope="module")
def again(undisturbed: Ended, command: Commands, tmp_path_factory: pytest.TempPathFactory) -> Again:
    home, ended = Path(shutil.copytree(undisturbed.home, tmp_path_factory.mktemp("rerun") / "home")), undisturbed.done
    before = stored(home)
    done = command(home, "rerun", "critic", "--of", ended.json["run_id"], "--set", f"critic.lr={LR}", *OPTIONS)
    assert (done.status, done.told) == (0, [])
    return Again(home, ended, done, before, stored(home))


def test_only_the_stage_itself_ran_and_no_episode_was_added(again: Again) -> None:
    assert again.after.runs.keys() - again.before.runs.keys() == {again.new}
    more = {table: again.after.n_rows[table] - n for table, n in again.before.n_rows.items()}
    assert again.before.n_rows["episodes"] > 0 and again.before.n_rows["targets"] > 0
    assert more == dict.fromkeys(TABLES, 0) | {"commits": 1, "priorities": 8}
    assert titles_by_status(again.home) == {"FINISHED": Counter(["pipeline", *TITLES, "critic 1"])}


def test_it_learned_from_the_same_targets_at_another_rate(again: Again) -> None:
    tracking, replay = Tracking(again.home / "mlflow"), Replay(again.home / "data" / "turnwise.duckdb")
    old, new = (json.loads(tracking.artifact(run_id, "config.json").read_text()) for run_id in (again.old, again.new))
    assert new["config"]["critic"].pop("lr") == LR != old["config"]["critic"].pop("lr")
    assert new == old
    inputs = [json.loads(tracking.artifact(run_id, "inputs.json").read_text()) for run_id in (again.old, again.new)]
    assert inputs[0] == inputs[1]
    trained = [
        {(row["episode_id"], row["turn"]) for row in replay.rows("priorities", [run_id])}
        for run_id in (again.old, again.new)
    ]
    assert (
        trained[0]
        == trained[1]
        == {(row["episode_id"], row["turn"]) for row in replay.rows("targets", inputs[1]["targets"])}
    )
    # The first step's loss is met before anything is learned, so it says that rows, order and start were the same.
    metrics, before = again.done.json["metrics"], again.done.json["old_metrics"]
    assert metrics["critic/loss_first"] == before["critic/loss_first"]
    assert metrics["critic/loss"] < before["critic/loss"] < metrics["critic/loss_first"]
    weights = [
        tracking.artifact(run_id, "adapter/adapter_model.safetensors").read_bytes() for run_id in (again.old, again.new)
    ]
    assert weights[0] != weights[1]


def test_it_is_linked_to_the_old_run(again: Again, command: Commands) -> None:
    tags = again.after.runs[again.new].tags
    assert (tags["rerun_of"], tags["part"], tags["iteration"]) == (again.old, "rerun", "1")
    assert "pipeline" not in tags  # it is no part of the run that it was made from
    assert again.done.json["rerun_of"] == again.old
    assert f"rerun_of: {again.old}" in command(again.home, "show", again.new).out
    listed = command(again.home, "runs", "--stage", "critic", "--json").json
    assert (listed[0]["run_id"], listed[0]["rerun_of"]) == (again.new, again.old)


def test_nothing_that_was_stored_changed(again: Again, undisturbed: Ended) -> None:
    assert {path: again.after.files[path] for path in again.before.files} == again.before.files
    assert {run_id: again.after.runs[run_id] for run_id in again.before.runs} == again.before.runs
    assert_same_result(again.home, again.ended, undisturbed)


def test_the_run_it_came_from_still_reuses_its_own_critic(again: Again, command: Commands) -> None:
    done = command(again.home, *RUN)
    assert (done.status, done.reused) == (0, list(TITLES))
    assert stage_runs(done.json) == stage_runs(again.ended.json)


def test_the_same_rerun_is_reused_and_one_without_a_change_gives_the_same_weights(
    again: Again, command: Commands
) -> None:
    of = again.ended.json["run_id"]
    same = command(again.home, "rerun", "critic", "--of", of, "--set", f"critic.lr={LR}", *OPTIONS)
    assert (same.json["run_id"], same.json["reused"]) == (again.new, True)
    forced = command(again.home, "rerun", "critic", "--of", of, *OPTIONS).json
    assert not forced["reused"]
    tracking = Tracking(again.home / "mlflow")
    for path in ("adapter/adapter_model.safetensors", "target/adapter_model.safetensors"):
        assert tracking.artifact(forced["run_id"], path).read_bytes() == tracking.artifact(again.old, path).read_bytes()
