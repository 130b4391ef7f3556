"""turnwise doctor: what is there and what is missing, a line each; it changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Commands, Ended

from flows import presets, shipped
from turnwise.commands.doctor import lacking


def test_a_project_folder_that_can_run_the_demo_is_said_to(finished: Ended, command: Commands) -> None:
    done = command(finished.home, "doctor", "--json")
    assert (done.status, done.json["ready"]) == (0, True)
    said = {one["what"]: one for one in done.json["lines"]}
    assert said["runs"]["ok"] and said["runs"]["said"].split()[0].isdigit()
    assert said["rows"]["ok"] and said["rows"]["said"].startswith("data/turnwise.duckdb")
    text = command(finished.home, "doctor")
    assert text.out.splitlines()[-1] == "The demo can run: turnwise run demo"
    assert "Qwen/Qwen2.5-7B-Instruct' here; it is fetched from the hub" in text.out


def test_an_empty_folder_without_a_model_is_told_and_stays_empty(tmp_path: Path, command: Commands) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = command(empty, "doctor")
    assert done.status == 1
    assert "there is no model 'data/base' here; make it: turnwise pretrain" in done.out
    assert done.out.splitlines()[-1].startswith("The demo cannot run")
    assert {path.name for path in empty.iterdir()} <= {"out.txt", "err.txt"}  # the test's own


def test_a_damaged_store_is_told(finished: Ended, command: Commands) -> None:
    (finished.home / "mlflow" / "mlflow.db").write_bytes(b"no database" * 100)
    done = command(finished.home, "doctor")
    print(done.out)
    assert "mlflow/mlflow.db cannot be read (" in done.out


def test_what_a_preset_lacks_names_what_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(lacking(presets.load("demo"))) == []
    said = list(
        lacking(presets.load("demo", ["model.engine=vllm", "critic.general_path=none.jsonl", "critic.general_rows=3"]))
    )
    assert said == [
        "pip install 'turnwise[vllm]'",
        "there are no general rows at 'none.jsonl'; put some there, or mix none: --set critic.general_rows=0",
    ]


def test_a_model_of_the_wheel_is_copied_once_and_what_is_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    carried = tmp_path / "shipped" / "data" / "base"
    carried.mkdir(parents=True)
    (carried / "config.json").write_text("{}")
    (tmp_path / "shipped" / "studies").mkdir()
    (tmp_path / "shipped" / "studies" / "tiny.toml").write_text("")
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "shipped")
    monkeypatch.chdir(home)
    assert shipped.there("data/base/config.json") and not shipped.there("data/other")
    assert shipped.study(home / "studies" / "tiny.toml") == tmp_path / "shipped" / "studies" / "tiny.toml"
    for _ in range(2):
        shipped.bring("data/base/general.jsonl")
    assert (home / "data" / "base" / "config.json").read_text() == "{}"
    assert capsys.readouterr().err.count("is copied") == 1
    (home / "data" / "base" / "config.json").unlink()
    shipped.bring("data/base")
    assert not (home / "data" / "base" / "config.json").exists()
    assert not shipped.there("data/base/config.json")
    shipped.bring("data/none")
    shipped.bring("/data/base")
    assert [path.name for path in (home / "data").iterdir()] == ["base"]
