"""What a finished run wrote is held against its hashes: a changed byte is told, never read, and can be mended."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from commands import RUN, Commands, Ended, stage_runs

from stages.frame.types import Changed, MissingInput
from stages.store import artifacts
from stages.store.tracking import Tracking


def flipped(file: Path) -> None:
    """One bit in the middle; length and time of change stay."""
    text, stat = bytearray(file.read_bytes()), file.stat()
    text[len(text) // 2] ^= 1
    file.write_bytes(text)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "critic" / "r1" / "artifacts"
    (found / "adapter").mkdir(parents=True)
    (found / "adapter" / "adapter_model.safetensors").write_bytes(b"x" * 100)
    (found / "outputs.json").write_text("{}")
    artifacts.seal(found)
    return found


def test_each_file_is_read_as_it_was_written(folder: Path) -> None:
    assert artifacts.existing(folder, "adapter") == folder / "adapter"
    assert artifacts.changed(folder) == []


@pytest.mark.parametrize("name", ["adapter/adapter_model.safetensors", "outputs.json"])
def test_a_flipped_bit_is_one_sentence_and_another_artifact_is_still_read(folder: Path, name: str) -> None:
    flipped(folder / name)
    path, other = name.split("/")[0], "outputs.json" if "/" in name else "adapter"
    with pytest.raises(Changed, match=rf"^artifact {name} of critic run r1 is not what was written: .* turnwise verify --mend, then the same command again$"):  # fmt: skip
        artifacts.existing(folder, path)
    assert artifacts.existing(folder, other) == folder / other
    assert artifacts.changed(folder) == [name]


def test_what_is_cut_is_changed_and_what_is_gone_is_missing(folder: Path) -> None:
    (folder / "outputs.json").write_text("")
    assert artifacts.changed(folder) == ["outputs.json"]
    (folder / "outputs.json").unlink()
    with pytest.raises(MissingInput, match="does not exist"):
        artifacts.existing(folder, "outputs.json")


def test_a_seal_that_cannot_be_read_seals_nothing_and_is_told(folder: Path) -> None:
    (folder / artifacts.SEAL).write_text('{"adapter')
    with pytest.raises(Changed, match=artifacts.SEAL):
        artifacts.existing(folder, "adapter")


def test_a_name_that_changed_in_the_seal_hides_no_file(folder: Path) -> None:
    seal = folder / artifacts.SEAL
    seal.write_text(seal.read_text().replace("adapter_model", "adapter_nodel"))
    assert artifacts.changed(folder) == [artifacts.SEAL]
    with pytest.raises(Changed, match=artifacts.SEAL):
        artifacts.existing(folder, "adapter")


def test_a_file_that_came_after_the_seal_is_no_change(folder: Path) -> None:
    """A kill between a pipeline run's end and the seal of its page leaves one."""
    (folder / "view.html").write_text("<html>")
    assert artifacts.changed(folder) == []


def test_a_run_of_before_there_were_seals_is_read(folder: Path) -> None:
    (folder / artifacts.SEAL).unlink()
    flipped(folder / "adapter" / "adapter_model.safetensors")
    assert artifacts.existing(folder, "adapter").exists() and artifacts.existing(folder, "outputs.json").exists()


@pytest.mark.parametrize("content", ["", '{"met', "[" * 100_000])
@pytest.mark.parametrize("name", ["outputs.json", artifacts.DROPPED])
def test_json_that_is_cut_is_one_sentence_and_listed_without_a_seal_too(folder: Path, name: str, content: str) -> None:
    (folder / artifacts.SEAL).unlink()
    (folder / name).write_text(content)
    with pytest.raises(
        Changed, match=rf"^artifact {name} of critic run r1 is not what was written: .* turnwise verify --mend"
    ):
        artifacts.existing(folder, "outputs.json")
    with pytest.raises(Changed, match=name):
        artifacts.read_json(folder / name)
    assert artifacts.changed(folder) == [name]


def test_dropped_weights_are_no_change(folder: Path) -> None:
    artifacts.drop(folder, artifacts.weights(folder), lambda: False)
    assert artifacts.changed(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "name"), [("distill 1", "adapter/adapter_model.safetensors"), ("critic 1", "outputs.json")])  # fmt: skip
def test_a_changed_artifact_stops_the_run_that_reads_it_and_mended_it_is_what_it_would_have_been(
    finished: Ended, undisturbed: Ended, command: Commands, stage: str, name: str
) -> None:
    run_id = stage_runs(finished.done.json)[stage]
    tracking = Tracking(finished.home / "mlflow")
    flipped(tracking.artifact(run_id, name))
    stopped = command(finished.home, "verify", "--json")
    assert (stopped.status, stopped.json["changed"]) == (1, {run_id: [name]})
    again = command(finished.home, *RUN, "--set", "evaluate.episodes=5")  # reads the adapter, or reuses the critic
    assert again.status == 1 and again.told[-1].endswith("turnwise verify --mend, then the same command again")
    assert command(finished.home, "verify", "--mend", "--json").status == 0
    mended = command(finished.home, *RUN, "--set", "evaluate.episodes=5")
    assert mended.status == 0
    assert stage in mended.ran or "again, because its weights were dropped" in mended.err
    again_run = stage_runs(mended.json)[stage]
    for weights in ("adapter/adapter_model.safetensors", "target/adapter_model.safetensors"):
        made = hashlib.sha256(tracking.artifact(again_run, weights).read_bytes()).hexdigest()
        assert made == undisturbed.seen[stage]["files"][weights]
    assert command(finished.home, "verify", "--json").status == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["summary.json", "config.json", "view.html", "lineage.svg"])
def test_what_a_pipeline_run_keeps_of_its_own_is_sealed(name: str, finished: Ended, command: Commands) -> None:
    run_id = finished.done.json["run_id"]
    flipped(Tracking(finished.home / "mlflow").artifact(run_id, name))
    told = command(finished.home, "verify", "--json")
    assert (told.status, told.json["changed"]) == (1, {run_id: [name]})
    assert command(finished.home, "verify", "--mend").status == 0
    kept = "FINISHED" if name in ("view.html", "lineage.svg") else "FAILED"  # what only shows the run is not the run
    assert Tracking(finished.home / "mlflow").status(run_id) == kept
    assert command(finished.home, *RUN).status == 0
    assert command(finished.home, "verify", "--json").status == 0


@pytest.mark.slow
def test_a_cut_artifact_of_a_run_without_seals_stops_no_command_for_ever(finished: Ended, command: Commands) -> None:
    for note in (finished.home / "mlflow" / "artifacts").rglob(artifacts.SEAL):
        note.unlink()
    runs = stage_runs(finished.done.json)
    folder = Tracking(finished.home / "mlflow").artifact(runs["critic 0"], "outputs.json").parent
    for file in (folder / "outputs.json", *(finished.home / "mlflow" / "artifacts" / "pipeline").rglob("*.json")):
        file.write_bytes(file.read_bytes()[:20])
    stopped = command(finished.home, *RUN)
    assert (stopped.status, len(stopped.told)) == (1, 1)
    assert stopped.told[0].endswith("turnwise verify --mend, then the same command again")
    assert command(finished.home, "runs").status == 0
    assert command(finished.home, "verify", "--mend").status == 0
    again = command(finished.home, *RUN)
    assert (again.status, again.ran.count("critic 0")) == (0, 1)


KINDS = ("config.json", "summary.json", "outputs.json", artifacts.SEAL, "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_artifact_garbled_everywhere_is_one_sentence_of_every_command(
    name: str, finished: Ended, command: Commands
) -> None:
    """Never a traceback: a sentence, or what can still be shown."""
    run_id = finished.done.json["run_id"]
    files = list((finished.home / "mlflow" / "artifacts").rglob(name))
    assert files
    for file in files:
        file.write_bytes(bytes(255 - byte for byte in file.read_bytes()))
    best = ["export", run_id, str(finished.home / "best"), "--what", "adapter"]
    for argv in (["runs"], ["show", run_id], best, [*RUN, "--set", "evaluate.episodes=5"]):
        done = command(finished.home, *argv)
        assert done.status in (0, 1, 2) and "Traceback" not in done.err, (argv, done.err)
        assert done.status == 0 or len(done.told) == 1, (argv, done.err)
