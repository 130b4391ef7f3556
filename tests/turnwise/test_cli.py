"""The command line: help that costs nothing, results on stdout, one sentence for a mistake, exit status 0, 1 and 2."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import Stages

from benchmarks.timed import timed
from flows import report
from turnwise import cli

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "mlflow", "prefect", "duckdb", "pydantic", "requests", "rich")
Turnwise = Callable[..., tuple[int, str, str]]


@pytest.fixture
def turnwise(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Turnwise:
    """Runs a command in a fresh project folder: exit status, stdout, stderr."""
    (home / "data").mkdir(exist_ok=True)
    (home / "preset.toml").write_text("iterations = 2\n")
    monkeypatch.chdir(home)
    # The fakes need no model and no prompts.
    monkeypatch.setattr("flows.workspace.model_hash", lambda run: "base")
    monkeypatch.setattr("flows.workspace.make_engine", lambda run: None)

    def turnwise(*argv: str) -> tuple[int, str, str]:
        try:
            status = cli.main(argv)
        except SystemExit as exit:
            status = int(exit.code or 0)
        return status, *capsys.readouterr()

    return turnwise


def value(ran: tuple[int, str, str]) -> Any:
    """The JSON value that a command printed."""
    status, out, err = ran
    assert status == 0, err
    return json.loads(out)


def test_help_takes_under_half_a_second_and_imports_nothing_heavy() -> None:
    code = f"import sys; from turnwise import cli; cli.build_parser().format_help(); sys.exit(', '.join(m for m in {HEAVY} if m in sys.modules) or None)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (found.returncode, found.stderr) == (0, "")
    command = [sys.executable, "-m", "turnwise", "--help"]
    # Of the processor, and the quickest of three: what else the machine does is not our business.
    _, times = timed(lambda i: subprocess.run(command, capture_output=True, cwd=ROOT, check=True), repeats=3, first=0)
    assert min(times.cpu) < 0.5


def test_every_command_has_a_sentence_and_an_example() -> None:
    (choices,) = [action.choices for action in cli.build_parser()._actions if action.dest == "command"]
    assert choices is not None
    parsers: dict[str, Any] = dict(choices)
    assert set(parsers) >= {"run", "rerun", "stages", "runs", "show", "export", "pretrain", "data", "serve", "ui"}
    for name, parser in parsers.items():
        assert parser.description.endswith(".")
        example = shlex.split(parser.epilog.removeprefix("example: turnwise "))
        assert example[0] == name
        cli.build_parser().parse_args(example)


def test_a_run_prints_rows_and_where_to_look(turnwise: Turnwise, stages: Stages) -> None:
    status, out, err = turnwise("run", "preset.toml", "--plain")
    assert status == 0
    lines = out.splitlines()
    assert lines[0].split()[0] == "iteration"
    assert [line.split()[0] for line in lines[1:4]] == ["base", "0", "1"]
    assert "0.50 0.40-0.60  ████████████" in lines[3]
    assert "turnwise show" in lines[-1]
    assert "critic 1:" in err


def test_json_is_one_object_on_stdout(turnwise: Turnwise, stages: Stages) -> None:
    status, out, _ = turnwise("run", "preset.toml", "--plain", "--json")
    found = json.loads(out)
    assert status == 0
    assert set(found) == {"run_id", "preset", "status", "seconds", "base", "final", "iterations", "match"}
    assert found["final"]["win_rate"] == 0.5


def test_quiet_leaves_stderr_empty(turnwise: Turnwise, stages: Stages) -> None:
    assert turnwise("run", "preset.toml", "--plain", "--quiet")[2] == ""


def test_a_dry_run_runs_nothing(turnwise: Turnwise, stages: Stages) -> None:
    status, out, _ = turnwise("run", "preset.toml", "--dry-run")
    assert (status, stages.calls) == (0, [])
    assert "15 of 15 stages would run" in out
    config = value(turnwise("run", "preset.toml", "--dry-run", "--json"))["config"]
    assert config["iterations"] == 2


def test_runs_are_listed_newest_first(turnwise: Turnwise, stages: Stages) -> None:
    assert value(turnwise("runs", "--json")) == []
    turnwise("run", "preset.toml", "--plain")
    turnwise("run", "preset.toml", "--plain", "--set", "seed=1", "--set", "iterations=0")
    newest, oldest = value(turnwise("runs", "--json"))
    assert {"run_id", "name", "preset", "seed", "set", "status", "started", "seconds", "final"} == set(newest)
    assert (newest["final"], oldest["final"]["win_rate"], oldest["preset"]) == ({}, 0.5, "preset")
    assert newest["started"] >= oldest["started"]
    assert "FINISHED" in turnwise("runs")[1]


def test_a_rerun_compares_with_the_old_run(turnwise: Turnwise, stages: Stages) -> None:
    run_id = value(turnwise("run", "preset.toml", "--plain", "--json"))["run_id"]
    status, out, _ = turnwise("rerun", "critic", "--of", run_id[:8], "--set", "critic.lr=0.5", "--plain", "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["metrics"]["critic/lr"], found["old_metrics"]["critic/lr"], found["reused"]) == (0.5, 0.1, False)
    assert (
        value(turnwise("rerun", "critic", "--of", run_id, "--set", "critic.lr=0.5", "--plain", "--json"))["reused"]
        is True
    )
    assert value(turnwise("rerun", "critic", "--of", run_id, "--plain", "--json"))["reused"] is False
    assert "reuse" in turnwise("rerun", "critic", "--of", run_id, "--set", "critic.lr=0.5", "--dry-run")[1]


def test_a_pipeline_and_a_stage_run_are_shown(turnwise: Turnwise, stages: Stages) -> None:
    run = value(turnwise("run", "preset.toml", "--plain", "--json"))
    shown = turnwise("show", run["run_id"][:10])[1]
    assert "iteration 1" in shown and run["iterations"][2]["runs"]["critic"][:8] in shown
    assert value(turnwise("show", run["run_id"], "--json")) == run
    assert Path("mlflow", "artifacts", "pipeline", run["run_id"], "artifacts", "view.html").is_file()
    critic = turnwise("show", run["iterations"][2]["runs"]["critic"])[1]
    assert critic.startswith("critic run") and "critic/lr" in critic and "input targets" in critic


def test_an_adapter_is_exported_to_a_new_folder_only(turnwise: Turnwise, stages: Stages, tmp_path: Path) -> None:
    run_id = value(turnwise("run", "preset.toml", "--plain", "--json"))["run_id"]
    assert turnwise("export", run_id, "out", "--what", "adapter")[0] == 0
    assert (tmp_path / "out" / "weights").read_text() == "distill 1 0.1"
    status, _, err = turnwise("export", run_id, "out", "--what", "adapter")
    assert (status, "wanted a new or empty folder" in err) == (2, True)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["run", "dmeo", "--plain"], "did you mean 'demo'"),
        (["run", "preset.toml", "--plain", "--set", "critic.lrr=1"], "did you mean 'lr'"),
        (["run", "none.toml", "--plain"], "no preset file"),
        (["show", "zzzz"], "No run and no episode starts with 'zzzz'"),
        (["rerun", "critic", "--of", "ffff", "--plain"], "no run starts with"),
        (["stages", "critc"], "did you mean 'critic'"),
        (["runs", "--home", "nowhere"], "--home"),
        (["runs", "--home", "n" * 5000], "is no folder"),
        (["runs", "--limit", "0"], "--limit 0: wanted at least 1"),
        (["claims", "--jobs", "0"], "--jobs 0: wanted at least 1"),
        (["runs", "--limit", "-3"], "--limit -3: wanted at least 1"),
        (["runs", "--stage", "critc"], "there is no stage 'critc'; did you mean 'critic'? Stages: pipeline, "),
        (["run", "grpo", "--plain"], "'grpo' names no task. Put one before it, as in desk+grpo."),
        (["run", "d" * 5000, "--plain"], "There is no preset 'ddd"),
        (["run", "d" * 5000 + ".toml", "--plain"], "There is no preset file ...ddd"),
        (["export", "ffff", "o" * 5000], "File name too long"),
        (["pretrain", "--out", "/dev/null"], "--out /dev/null: File exists. Name a folder that can be written."),
        (
            ["run", "preset.toml", "--plain", "--set", "iterations=1000000000"],
            "iterations: input should be less than or equal to 10000",
        ),
        (["run"], "PRESET"),
        (["runn"], "invalid choice"),
        ([], "COMMAND"),
    ],
)
def test_wrong_usage_is_status_2_and_one_sentence(
    turnwise: Turnwise, stages: Stages, argv: list[str], told: str
) -> None:
    status, out, err = turnwise(*argv)
    assert (status, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "status", "told"),
    [
        (["runs"], 0, "No runs of pipeline in"),
        (["runs", "--stage", "critic"], 0, "No runs of critic in"),
        (["show", "abc"], 2, "No run and no episode starts with 'abc'"),
        (["export", "abc", "out"], 2, "no run starts with 'abc'"),
        (["rerun", "critic", "--of", "abc", "--dry-run"], 2, "no run starts with 'abc'"),
        (["verify"], 0, "Every stored row belongs to a finished run"),
        (["run", "preset.toml", "--dry-run"], 0, "would run, 0 would be reused"),
        (["data", "list"], 0, "turnwise data fetch NAME"),
        (["gc"], 0, "Nothing to free"),
    ],
)
def test_a_command_that_reads_leaves_an_empty_folder_empty(
    argv: list[str], status: int, told: str, stages: Stages, tmp_path: Path, turnwise: Turnwise
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    found, out, err = turnwise(*argv, "--home", str(folder))
    assert (found, list(folder.iterdir())) == (status, [])
    assert told in out + err


def test_a_failure_is_status_1_and_names_its_kind(turnwise: Turnwise, stages: Stages) -> None:
    from stages.frame.types import EngineUnavailable

    stages.raises["critic", 0] = EngineUnavailable("the engine at http://127.0.0.1:1/v1 timed out")
    status, _, err = turnwise("run", "preset.toml", "--plain", "--quiet")
    assert (status, err) == (1, "turnwise: EngineUnavailable: the engine at http://127.0.0.1:1/v1 timed out\n")


def test_an_interrupt_is_status_1_and_says_how_to_go_on(turnwise: Turnwise, stages: Stages) -> None:
    stages.raises["critic", 0] = KeyboardInterrupt()
    status, _, err = turnwise("run", "preset.toml", "--plain", "--quiet")
    assert (status, err.count("\n")) == (1, 1)
    assert "the same command goes on" in err
    assert value(turnwise("runs", "--json"))[0]["status"] == "KILLED"
    assert turnwise("run", "preset.toml", "--plain", "--quiet")[0] == 0


def test_numbers_that_json_lacks_become_null(capsys: pytest.CaptureFixture[str]) -> None:
    report.emit({"a": float("nan"), "b": [float("inf"), 1.0]})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.0]}


def test_a_model_that_is_not_there_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    assert (
        cli.main(["run", "tiny", "--plain", "--quiet", "--home", str(home), "--set", "model.path=no/such/model"]) == 2
    )
    assert "model.path: no model that transformers can load at 'no/such/model'" in capsys.readouterr().err
