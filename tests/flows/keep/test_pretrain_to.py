"""turnwise pretrain --out: a model that lies there is only overwritten by itself, or where --force says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.store.artifacts import sha256
from turnwise.cli import main

SMALL = ["steps=1", "width=16", "layers=1", "heads=2", "batch=2", "parts=1", "general_rows=0", "probe_rows=1"]


def pretrain(home: Path, *more: str) -> int:
    sets = [part for item in SMALL for part in ("--set", f"pretrain.{item}")]
    return main(["pretrain", "--home", str(home), "--out", str(home / "model"), "--quiet", *sets, *more])


def test_a_model_of_another_config_stays_unless_forced_and_the_same_config_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = tmp_path / "model" / "model.safetensors"
    assert pretrain(tmp_path) == 0
    first = sha256(weights)
    assert pretrain(tmp_path) == 0
    assert pretrain(tmp_path, "--set", "seed=1") == 2
    told = "a model lies there that may be another one. Name another folder, or overwrite it with --force."
    assert told in capsys.readouterr().err
    assert sha256(weights) == first
    assert pretrain(tmp_path, "--set", "seed=1", "--force") == 0
    assert sha256(weights) != first
    # A finished run made the first model, but another one lies there now.
    assert pretrain(tmp_path) == 2


def test_a_model_that_no_run_made_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert pretrain(tmp_path) == 2
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]
