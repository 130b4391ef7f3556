"""Learning from the episodes that another run played: what is taken over, what is refused, and a study of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_turnwise import TURNWISE, shell

from flows import played, presets
from flows.pipeline import Call
from flows.registry import load_stage
from stages.frame.types import UsageError
from turnwise import cli


def turnwise(project: Path, *argv: str) -> tuple[int, str, str]:
    return shell(f"{TURNWISE} {' '.join(argv)} --home {project}", project)


@pytest.fixture
def project(home: Path) -> Path:
    (home / "plain.toml").write_text("iterations = 2\n")
    return home


def ran(project: Path, *sets: str) -> dict[str, Any]:
    status, out, err = turnwise(project, "run plain.toml --plain --json", *(f"--set {one}" for one in sets))
    assert status == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.slow
def test_collect_is_the_other_run_s_and_all_that_follows_is_the_run_s_own(project: Path) -> None:
    first = ran(project)
    second = ran(project, "method=rft", f"episodes_of={first['run_id'][:8]}")
    for one, other in zip(first["iterations"][1:], second["iterations"][1:], strict=True):
        assert other["runs"]["collect"] == one["runs"]["collect"] and "collect" in other["reused"]
        assert set(other["runs"]) == {"collect", "rft", "evaluate"}
    own = ran(project, "method=rft")
    assert [row["runs"]["collect"] for row in own["iterations"][1:]][1] != first["iterations"][2]["runs"]["collect"]
    status, out, _ = turnwise(
        project, f"run plain.toml --set method=rft --set episodes_of={first['run_id']} --dry-run --json"
    )
    assert status == 0 and first["iterations"][1]["runs"]["collect"] in out
    status, out, _ = turnwise(project, f"rerun rft --of {second['run_id']} --iteration 0 --downstream --dry-run --json")
    reused = {(one["stage"], one["iteration"]): one["reuse"] for one in json.loads(out)["stages"]}
    assert status == 0 and reused["collect", 1] == first["iterations"][2]["runs"]["collect"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ("task.options.steps=2", r"was played with task.options.steps = None, but this one has 2. Set the same value."),
        (
            "iterations=3",
            r"has episodes of 2 iterations with 1 sweeps, but wanted 3 with 1. Set iterations and sweeps.",
        ),
        (
            "method=grpo",
            "episodes_of: method grpo is on-policy and cannot learn from stored episodes. Leave episodes_of out.",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(project: Path, sets: str, said: str) -> None:
    run_id = ran(project)["run_id"]
    status, _, err = turnwise(
        project, f"run plain.toml --plain --quiet --set method=rft --set episodes_of={run_id} --set {sets}"
    )
    assert status == 2 and err.count("\n") == 1 and said in err


def test_a_stage_s_run_is_no_pipeline_run(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "tiny", "--plain", "--quiet", "--home", str(project), "--set", "episodes_of=abc"]) == 2
    assert "no run starts with 'abc'" in capsys.readouterr().err


def test_without_it_the_step_is_the_one_that_was_given() -> None:
    def inner(call: Call) -> Any:
        raise AssertionError

    nothing: Any = None
    assert played.step(inner, presets.load("demo"), nothing) is inner
    assert load_stage("collect").name == "collect"


STUDY = """
title = "Frozen"
seeds = [1, 2]
source = "nlac"
[methods.nlac]
preset = "plain.toml"
[methods.rft]
preset = "plain.toml"
sets = ["method=rft"]
control = "nlac"
[methods.grpo]
preset = "plain.toml"
sets = ["method=grpo"]
"""


@pytest.mark.slow
def test_a_study_with_a_source_has_all_methods_that_can_learn_from_its_episodes(project: Path) -> None:
    (project / "frozen.toml").write_text(STUDY)
    options = "study frozen.toml --plain --json --jobs 2 --out out"
    status, out, _ = turnwise(project, f"{options} --dry-run")
    assert [one["state"] for one in json.loads(out)].count("to run after nlac") == 2
    status, out, err = turnwise(project, options)
    assert status == 0 and json.loads(out)["missing"] == [], err
    rows = [json.loads(line) for line in (project / "out" / "cells.jsonl").read_text().splitlines()]
    of = {(row["method"], row["seed"]): row for row in rows}
    for seed in (1, 2):
        assert f"episodes_of={of['nlac', seed]['run']}" in of["rft", seed]["sets"]
        assert not any("episodes_of" in one for one in of["grpo", seed]["sets"])
    assert json.loads(turnwise(project, options)[1])["reused"]
    status, out, _ = turnwise(project, "study frozen.toml --plain --json --only rft --out other")
    assert json.loads(out)["missing"] == []


def test_a_source_that_is_no_method_and_one_with_tuning_are_one_sentence(tmp_path: Path) -> None:
    from flows.evidence.study import design

    for change, said in (
        (('source = "nlac"', 'source = "nlca"'), "source: there is no method 'nlca'"),
        (("[methods.nlac]", '[tuning]\nseeds = [9]\nn = 2\n[tuning.space.nlac]\n"critic.lr" = [1, 2]\n[methods.nlac]'), "source: on frozen episodes nothing is tuned"),
    ):  # fmt: skip
        (tmp_path / "frozen.toml").write_text(STUDY.replace(*change))
        with pytest.raises(UsageError, match=said):
            design.read(tmp_path / "frozen.toml")
