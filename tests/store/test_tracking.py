"""The MLflow store: runs, metrics, artifacts and lineage come back; dead runs are told; failures are one sentence."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import until

from stages.frame.types import MissingInput, TurnwiseError, UsageError
from stages.store import machine
from stages.store.runs import MAX_VALUE
from stages.store.tracking import Tracking

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture
def tracking(home: Path) -> Tracking:
    return Tracking(home / "mlflow")


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
    assert (
        tracking._client.get_run(after).info.start_time < tracking._client.get_run(before).info.start_time
    )  # the clock was set back
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
    assert sorted(file.path for file in again._client.list_artifacts(run_id)) == [
        "adapter",
        "inputs.json",
        "plots",
    ]  # MLflow's page sees them
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
    made = [
        tracking.start(experiment, "x", {}) for experiment in ["critic", "collect"] * 9
    ]  # two of 18 share their first digit
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
    """psutil derives a start time from the boot time, which the kernel derives from the clock: a step of the clock
    moves both.
    """
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


def test_a_deleted_experiment_comes_back_for_a_new_run(tracking: Tracking) -> None:
    tracking.start("critic", "old", {})
    tracking._client.delete_experiment(tracking._client.get_experiment_by_name("critic").experiment_id)
    again = Tracking(tracking.root)
    again.start("critic", "new", {})
    assert again.runs("critic", 5)[0].name == "new"


INITIALISE = """
import sys
from pathlib import Path
from typing import Any
from stages.store.tracking import Tracking
tracking = Tracking(Path(sys.argv[1]))
tracking.finish(tracking.start("critic", "c", {}))
"""


def test_two_processes_that_initialise_one_store_at_once_both_succeed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INITIALISE, str(tmp_path / "mlflow")]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) for _ in range(2)]
    errors = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    tracking = Tracking(tmp_path / "mlflow")
    assert [info.status for info in tracking.runs("critic", 5)] == ["FINISHED", "FINISHED"]
    with closing(sqlite3.connect(tracking.db)) as raw:
        assert raw.execute("pragma journal_mode").fetchone() == ("wal",)
    assert not list(tracking.root.glob("*.part*"))


def test_a_creation_that_was_killed_halfway_is_begun_again(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlflow.part").write_bytes(b"half a store")
    (tmp_path / "mlflow.part-wal").write_bytes(b"and its log")

    def initialise(engine: object) -> None:
        assert (tmp_path / "mlflow.part").stat().st_size < 5000  # the leftover is gone
        with (
            closing(sqlite3.connect(empty_store)) as source,
            closing(sqlite3.connect(tmp_path / "mlflow.part")) as target,
        ):
            source.backup(target)

    monkeypatch.setattr(
        "mlflow.store.db.utils._initialize_tables", initialise
    )  # the real one takes seconds, and runs above
    tracking = Tracking(tmp_path)
    tracking.initialise()
    assert tracking.runs("critic", 1) == []


def test_a_store_of_a_newer_mlflow_is_one_sentence(tracking: Tracking) -> None:
    with closing(sqlite3.connect(tracking.db)) as raw:
        raw.execute("update alembic_version set version_num = 'ffffffffffff'")
        raw.commit()
    with pytest.raises(UsageError, match=r"newer MLflow than the one installed .*ffffffffffff.* Install the newer one"):
        tracking.initialise()
    with closing(sqlite3.connect(tracking.db)) as raw:
        assert raw.execute("select version_num from alembic_version").fetchone() == ("ffffffffffff",)


def test_a_damaged_store_is_one_sentence_and_at_once(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"no database at all, and long enough for a header" * 100)
    started = time.monotonic()
    with pytest.raises(
        TurnwiseError, match=r"mlflow.db was wanted, but the file is damaged .*Restore it, or move it away"
    ):
        Tracking(tmp_path).initialise()
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(sqlite3.OperationalError) database or disk is full", "the disk is full. Free some space"),
        ("(sqlite3.OperationalError) disk I/O error", "Look whether the disk is full or failing"),
        ("(sqlite3.OperationalError) database is locked", "another process keeps it locked"),
        ("(sqlite3.OperationalError) attempt to write a readonly database", "Check who owns the folder"),
        ("(sqlite3.DatabaseError) database disk image is malformed", "the file is damaged"),
    ],
)
def test_what_sqlite_says_is_told_in_a_sentence(
    text: str, said: str, tracking: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.exceptions import MlflowException

    run_id = tracking.start("critic", "c", {})

    def fail(*arguments: object) -> None:
        raise MlflowException(text)

    monkeypatch.setattr(tracking._client, "set_terminated", fail)
    with pytest.raises(TurnwiseError, match=said) as caught:
        tracking.finish(run_id)
    assert "\n" not in str(caught.value)


SMALL_DISK = """
import resource, sys
from pathlib import Path
from typing import Any
from stages.store.tracking import Tracking
from stages.frame.types import TurnwiseError
tracking = Tracking(Path(sys.argv[1]))
run_id = tracking.start("critic", "c", {})
size = sum(path.stat().st_size for path in tracking.root.glob("mlflow.db*"))
resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
try:
    tracking.record(run_id, curves={"critic/nll": [0.5] * 20000})
except TurnwiseError as error:
    print(error)
"""


def test_a_store_that_cannot_grow_is_one_sentence_and_goes_on_later(tracking: Tracking) -> None:
    command = [sys.executable, "-c", SMALL_DISK, str(tracking.root)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120, check=False)
    assert "disk is full" in done.stdout, done.stderr
    assert len(done.stdout.splitlines()) == 1
    (dead,) = tracking.reap()
    assert tracking.status(dead) == "KILLED"
    tracking.finish(tracking.start("critic", "again", {}))
