"""The MLflow store: runs, metrics, artifacts and lineage come back."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from stages.frame.types import MissingInput, TurnwiseError, UsageError
from stages.store.runs import MAX_VALUE
from stages.store.tracking import Tracking


def test_a_run_comes_back_with_tags_metrics_and_status(tracking: Tracking) -> None:
    parent = tracking.start("pipeline", "demo", {})
    run_id = tracking.start("critic", "critic 0", {"fingerprint": "f1"}, parent)
    assert tracking.status(run_id) == "RUNNING"
    tracking.record(
        run_id, metrics={"critic/loss": 0.1 + 0.2}, curves={"critic/nll": [3.0, 2.0, 1.0]}, params={"critic.lr": 1e-4}
    )
    tracking.log(run_id, {"critic/late": 7.0}, step=2)
    tracking.finish(run_id)
    assert tracking.metrics(run_id) == {"critic/loss": 0.1 + 0.2, "critic/nll": 1.0, "critic/late": 7.0}
    tags = tracking.tags(run_id)
    assert tags["fingerprint"] == "f1"
    assert tags["mlflow.parentRunId"] == parent
    assert tags["pid"] == str(os.getpid())
    (info,) = tracking.runs("critic", 10)
    assert (info.run_id, info.name, info.status) == (run_id, "critic 0", "FINISHED")
    assert info.ended is not None
    assert info.started <= info.ended <= time.time() + 1
    assert [child.run_id for child in tracking.children(parent)] == [run_id]
    assert tracking.experiment(run_id) == "critic"


def test_curves_keep_every_step(tracking: Tracking) -> None:
    run_id = tracking.start("critic", "critic 0", {})
    values = [float(step) ** 0.5 for step in range(2500)]  # more than MLflow takes at once
    tracking.record(run_id, curves={"critic/nll": values})
    history = tracking._client.get_metric_history(run_id, "critic/nll")
    assert [point.value for point in sorted(history, key=lambda point: point.step)] == values


def test_only_the_newest_finished_run_of_a_fingerprint_is_found(tracking: Tracking) -> None:
    assert tracking.finished("f1") is None
    assert tracking.finished("f1", "critic") is None
    old, new, failed, killed, running, other = (tracking.start("critic", "c", {"fingerprint": "f1"}) for _ in range(6))
    tracking.finish(failed, "FAILED")
    tracking.finish(killed, "KILLED")
    tracking.finish(other, "FINISHED")
    assert tracking.finished("f2") is None
    assert tracking.finished("f1") == other
    for run_id in (old, new):
        time.sleep(0.002)
        assert not tracking.is_finished(run_id)
        tracking.finish(run_id)
        assert tracking.is_finished(run_id)
    assert tracking.finished("f1", "critic") == other  # newest by its start
    assert not tracking.is_finished(running)
    assert not tracking.is_finished("0" * 32)
    assert set(Tracking(tracking.root).finished_runs()) == {old, new, other}


def test_runs_are_listed_newest_first(tracking: Tracking) -> None:
    made = []
    for number in range(5):
        made.append(tracking.start("critic", f"critic {number}", {}))
        time.sleep(0.002)
    assert [info.run_id for info in tracking.runs("critic", 3)] == made[:1:-1]
    assert tracking.runs("nowhere", 3) == []


def test_runs_stay_in_order_when_the_clock_is_set_back(tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's own order is by start time: a forced run would be older than the one that it replaces."""
    day_ms, before = 86_400_000, tracking.start("critic", "before", {"fingerprint": "f1"})
    now = int(time.time() * 1000)
    monkeypatch.setattr("mlflow.tracking._tracking_service.client.get_current_time_millis", lambda: now - day_ms)
    after, last = (tracking.start("critic", name, {"fingerprint": "f1"}) for name in ("after", "last"))
    # the clock was set back
    assert tracking._client.get_run(after).info.start_time < tracking._client.get_run(before).info.start_time
    for run_id in (before, after):
        tracking.finish(run_id)
    assert tracking.finished("f1") == tracking.finished("f1", "critic") == after
    assert [info.run_id for info in tracking.runs("critic", 5)] == [last, after, before]


def test_runs_without_a_number_are_older_than_all_that_have_one_and_in_the_order_of_their_clock(
    tracking: Tracking,
) -> None:
    """An older turnwise did not number its runs."""
    old = []
    for name in ("old 0", "old 1"):
        old.append(tracking.start("critic", name, {"fingerprint": "f1"}))
        tracking._client.delete_tag(old[-1], "sequence")
        time.sleep(0.002)
        tracking.finish(old[-1])
    assert tracking.finished("f1") == old[1]
    new = tracking.start("critic", "new", {"fingerprint": "f1"})
    tracking.finish(new)
    assert tracking.finished("f1") == new
    assert [info.run_id for info in tracking.runs("critic", 5)] == [new, old[1], old[0]]


def test_artifacts_lie_where_they_can_be_read_without_a_copy(tracking: Tracking, tmp_path: Path) -> None:
    run_id = tracking.start("distill", "d", {})
    folder = tmp_path / "made"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "weights.bin").write_bytes(b"123")
    tracking.save(run_id, folder, "adapter")
    tracking.save(run_id, folder / "deep" / "weights.bin", "plots/again.bin")
    tracking.write_json(run_id, "inputs.json", {"critic": ["c1"]})
    again = Tracking(tracking.root)
    assert (again.artifact(run_id, "adapter") / "deep" / "weights.bin").read_bytes() == b"123"
    assert again.artifact(run_id, "plots/again.bin").read_bytes() == b"123"
    # MLflow's page sees them
    assert sorted(file.path for file in again._client.list_artifacts(run_id)) == ["adapter", "inputs.json", "plots"]
    with pytest.raises(
        MissingInput, match=rf"artifact target of distill run {run_id} was wanted.*turnwise rerun distill --of {run_id}"
    ):
        again.artifact(run_id, "target")


def test_a_json_artifact_changes_whole_or_not_at_all(tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline's summary is written again and again, and read after a kill or a full disk."""
    run_id = tracking.start("pipeline", "p", {})
    tracking.write_json(run_id, "summary.json", {"iterations": [1]})
    write = Path.write_text

    def half(path: Path, text: str, **options: Any) -> int:
        write(path, text[: len(text) // 2], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        with pytest.raises(TurnwiseError, match=r"summary\.json could not be written: the disk is full"):
            tracking.write_json(run_id, "summary.json", {"iterations": [1, 2]})
    assert json.loads(tracking.artifact(run_id, "summary.json").read_text()) == {"iterations": [1]}
    tracking.write_json(run_id, "summary.json", {"iterations": [1, 2]})
    assert [file.path for file in tracking._client.list_artifacts(run_id)] == ["summary.json"]


def test_a_moved_project_folder_finds_its_artifacts(
    tracking: Tracking, home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_id = tracking.start("distill", "d", {})
    tracking.write_json(run_id, "inputs.json", {})
    moved = tmp_path_factory.mktemp("moved") / "mlflow"
    (home / "mlflow").rename(moved)
    assert (
        Tracking(moved).artifact(run_id, "inputs.json")
        == moved / "artifacts" / "distill" / run_id / "artifacts" / "inputs.json"
    )


def test_what_mlflow_would_cut_silently_is_cut_with_a_hash(tracking: Tracking) -> None:
    run_id = tracking.start("critic", "c", {"inputs": "x" * 9000})
    tracking.params(run_id, {f"p{number}": number for number in range(150)} | {"long": "y" * 9000})
    assert len(tracking.tags(run_id)["inputs"]) < MAX_VALUE
    params = tracking._client.get_run(run_id).data.params
    assert len(params) == 151
    assert "sha256:" in params["long"]


def test_a_run_is_found_by_the_start_of_its_id(tracking: Tracking) -> None:
    # two of 18 share their first digit
    made = [tracking.start(experiment, "x", {}) for experiment in ["critic", "collect"] * 9]
    for run_id in made:
        assert tracking.find(run_id[:12]) == tracking.find(run_id) == run_id
    shared = next(digit for digit in "0123456789abcdef" if sum(run_id.startswith(digit) for run_id in made) > 1)
    with pytest.raises(UsageError, match="start of several runs"):
        tracking.find(shared)
    for wrong in ("zzzz", "", "%", "a' or '1' = '1"):
        with pytest.raises(UsageError, match="See: turnwise runs"):
            tracking.find(wrong)
    with pytest.raises(MissingInput, match="no such run"):
        tracking.status("0" * 32)


def test_a_deleted_experiment_comes_back_for_a_new_run(tracking: Tracking) -> None:
    tracking.start("critic", "old", {})
    tracking._client.delete_experiment(tracking._client.get_experiment_by_name("critic").experiment_id)
    again = Tracking(tracking.root)
    again.start("critic", "new", {})
    assert again.runs("critic", 5)[0].name == "new"
