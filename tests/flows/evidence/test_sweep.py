"""A list in --set is a value where the key's type is a list, and a sweep where it is not; what a sweep is and shows."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fake_turnwise import TURNWISE, shell

from flows import presets
from flows.evidence.study import design
from flows.evidence.study.sweep import is_sweep, results, study_text
from stages.frame.types import UsageError
from stages.store.tracking import Tracking
from turnwise.commands.sweep import table


@pytest.mark.parametrize(
    ("item", "swept"),
    [
        ("critic.lr=[1e-3, 5e-4]", True),
        ("seed=[3, 4]", True),
        ('method=["nlac", "rft"]', True),
        ("task.options.requests=[2, 3]", True),
        ('evaluate.win_words=["pass", "yes"]', False),
        ("critic.lr=1e-3", False),
        ("critic.no_such_key=[1, 2]", False),  # which the run then refuses, with the nearest right one
        ("roles.prompts=[not toml", False),
    ],
)
def test_a_list_is_several_values_only_where_the_key_takes_one(item: str, swept: bool) -> None:
    assert is_sweep("demo", [item]) == swept


def test_a_list_for_a_key_that_is_a_list_stays_one_value() -> None:
    item = 'evaluate.win_words=["pass", "yes"]'
    run: Any = presets.load("demo", [item])
    assert run.evaluate.win_words == ("pass", "yes")
    study = tomllib.loads(study_text("demo", [item], 2))
    assert (study["sets"], study["seeds"], list(study["methods"])) == ([item], [0, 1], ["demo"])


def test_options_take_lists_as_their_own_environment_types_them() -> None:
    levels = "task.options.levels=[1, 2]"
    assert not is_sweep("demo", ["task.env=math", levels])
    assert not is_sweep("math+qwen7b", [levels])


def test_a_sweep_has_every_combination_and_is_a_study_that_can_be_repeated(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('extends = "demo"\nseed = 5\n')
    sets = ["critic.lr=[1e-3, 5e-4]", "iterations=2", 'method=["nlac", "rft"]']
    (file := tmp_path / "sweep.toml").write_text(study_text(str(own), sets, 3))
    study = design.read(file)
    assert study.seeds == (5, 6, 7)
    assert study.title == f"own {' '.join(sets)} on seeds 5, 6, 7"
    made = [
        presets.load(study.preset(name, "as preset"), study.sets_of(name, "as preset", 5)) for name in study.methods
    ]
    found = [(run.critic.lr, run.method, run.iterations) for run in made]  # type: ignore[attr-defined]
    assert found == [(1e-3, "nlac", 2), (1e-3, "rft", 2), (5e-4, "nlac", 2), (5e-4, "rft", 2)]


@pytest.mark.parametrize(
    ("sets", "seeds", "told"),
    [
        (["critic.lr=[]"], None, "--set critic.lr=[]: wanted at least one value"),
        (["seed=[1, 2]"], 3, "--seeds: --set seed=[...] names the seeds, too"),
        ([], 0, "--seeds 0: wanted at least 1"),
        (["critic.no_such_key=[1, 2]"], 2, "no_such_key"),
    ],
)
def test_a_sweep_that_cannot_be_is_one_sentence(sets: list[str], seeds: int | None, told: str) -> None:
    with pytest.raises(UsageError) as error:
        study_text("demo", sets, seeds)
    assert told in str(error.value)


def test_the_table_has_mean_interval_and_deviation_and_of_one_seed_the_mean_alone() -> None:
    rows = [
        {"method": "a", "final": rate, "seed": seed, "run": f"r{seed}"} for seed, rate in enumerate((0.2, 0.4, 0.6))
    ]
    three, one = results([*rows, {"method": "b", "final": 0.5, "seed": 0, "run": "r3"}])
    assert (three["mean"], three["sd"], three["seeds"]) == (pytest.approx(0.4), pytest.approx(0.2), [0, 1, 2])
    assert three["low"] < 0.4 < three["high"]
    assert (one["mean"], one["low"], one["sd"]) == (0.5, None, None)
    assert table([three, one])[2].split() == ["b", "0.50", "-", "0.50"]


@pytest.mark.slow
def test_a_sweep_runs_all_once_groups_them_and_shows_one_table(home: Path) -> None:
    (home / "plain.toml").write_text("iterations = 1\n")
    command = f"{TURNWISE} run plain.toml --plain --quiet --set critic.lr='[0.5, 0.25]' --seeds 2 --jobs 2"
    status, out, err = shell(f"{command} --json", home)
    assert status == 0, err
    found = json.loads(out)
    assert [one["setting"] for one in found["results"]] == ["critic.lr=0.5", "critic.lr=0.25"]
    tracking = Tracking(home / "mlflow")
    runs = tracking.runs("pipeline", 10)
    assert {info.run_id for info in runs} == {run_id for one in found["results"] for run_id in one["runs"]}
    assert {info.tags["group"] for info in runs} == {found["group"]} == {"plain critic.lr=[0.5, 0.25] on seeds 0, 1"}
    status, out, err = shell(command, home)
    assert (status, len(tracking.runs("pipeline", 10))) == (0, 4)
    assert "critic.lr=0.25" in out and "0.30 [0.30, 0.30]" in out
    status, out, _ = shell(f"{command} --dry-run", home)
    assert out.endswith("4 of 4 runs are finished, 0 to run.\n")


@pytest.mark.parametrize(
    ("options", "told"), [("--seeds 2 --force", "--force"), ("--jobs 2", "--jobs: this is one run")]
)
def test_options_that_do_not_go_with_it_are_refused(home: Path, options: str, told: str) -> None:
    (home / "plain.toml").write_text("")
    status, _, err = shell(f"{TURNWISE} run plain.toml {options}", home)
    assert (status, told in err, err.count("\n")) == (2, True, 1)
