"""Weights that are deleted: a kill in the middle leaves nothing that looks whole, and who is reading is left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stages.frame.types import Dropped, MissingInput
from stages.store import artifacts
from stages.store.tracking import Tracking

ROOT = Path(__file__).parents[2]
KILLED = """
import os, signal, sys
from pathlib import Path
from stages.store import artifacts

left, real = [int(sys.argv[2])], Path.unlink

def unlink(self, **options):
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    real(self, **options)

Path.unlink = unlink
folder = Path(sys.argv[1])
artifacts.drop(folder, artifacts.weights(folder), lambda: False)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Artifacts of a critic run "r1": two adapters and what is beside them."""
    found = tmp_path / "critic" / "r1" / "artifacts"
    for name in ("adapter", "target"):
        (found / name).mkdir(parents=True)
        (found / name / "adapter_model.safetensors").write_bytes(b"x" * 100)
        (found / name / "adapter_config.json").write_text("{}")
    (found / "config.json").write_text("{}")
    return found


def left(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize(("after", "files"), [(0, 2), (1, 1), (2, 0)])
def test_a_kill_while_files_are_deleted_leaves_none_that_looks_whole(folder: Path, after: int, files: int) -> None:
    """Before the first, between the two, and after both."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(after)], env=environment, check=False)
    assert done.returncode == (-signal.SIGKILL if files else 0)
    assert len(artifacts.weights(folder)) == files
    for path in ("adapter", "target", "target/adapter_model.safetensors"):
        with pytest.raises(
            Dropped, match=rf"artifact {path} of critic run r1 was wanted, but was dropped by turnwise gc"
        ):
            artifacts.existing(folder, path)
    assert artifacts.existing(folder, "config.json").read_text() == "{}"
    assert artifacts.existing(folder, "adapter/adapter_config.json").is_file()
    assert artifacts.drop(folder, artifacts.weights(folder), lambda: False)  # the next gc ends it
    assert artifacts.weights(folder) == {}
    assert len(artifacts.dropped(folder)) == 2


def test_who_began_to_read_before_finds_the_files(folder: Path) -> None:
    before = left(folder)
    told: list[bool] = []

    def wanted() -> bool:
        with pytest.raises(Dropped):  # who begins now is told
            artifacts.existing(folder, "adapter")
        told.append(True)
        return True

    assert not artifacts.drop(folder, artifacts.weights(folder), wanted)
    assert told == [True]
    assert left(folder) == before
    assert artifacts.existing(folder, "adapter").is_dir()


def test_the_sentence_says_what_to_do_and_what_is_missing_is_still_missing(folder: Path) -> None:
    artifacts.drop(folder, ["adapter/adapter_model.safetensors"], lambda: False)
    with pytest.raises(Dropped) as told:
        artifacts.existing(folder, "adapter")
    assert str(told.value).endswith("made again from the inputs of that run. Run: turnwise rerun critic --of r1")
    assert told.value.run_id == "r1"
    assert artifacts.existing(folder, "target").is_dir()
    with pytest.raises(MissingInput, match="does not exist"):
        artifacts.existing(folder, "head")
    assert json.loads((folder / artifacts.DROPPED).read_text()) == ["adapter/adapter_model.safetensors"]


def test_a_stand_in_gives_its_weights_for_the_old_run_and_is_never_reused(home: Path) -> None:
    tracking = Tracking(home / "mlflow")

    def made(text: str, **tags: str) -> str:
        run_id = tracking.start("critic", "critic 0", tags)
        (home / "adapter").mkdir(exist_ok=True)
        (home / "adapter" / "adapter_model.safetensors").write_text(text)
        tracking.save(run_id, home / "adapter", "adapter")
        tracking.finish(run_id)
        return run_id

    old = made("old", fingerprint="f1")
    assert tracking.drop(old, lambda: False)
    assert tracking.tags(old)["dropped"] == "weights"
    made("another result", fingerprint="f2", stands_for=old)
    with pytest.raises(Dropped):
        tracking.artifact(old, "adapter")
    first, second = (made(text, fingerprint="f1", stands_for=old) for text in ("first", "second"))
    assert (tracking.artifact(old, "adapter") / "adapter_model.safetensors").read_text() == "second"
    assert tracking.stand_ins(old) == [second, first]
    tracking.drop(second, lambda: False)
    assert (tracking.artifact(old, "adapter") / "adapter_model.safetensors").read_text() == "first"
    assert tracking.finished("f1", "critic") == old  # whose id what follows was made from
