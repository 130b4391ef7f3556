"""What runs say of themselves: in their names, descriptions, params, datasets and registered adapters, and in `turnwise
runs` and `show`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from fakes import Stages

from flows import book, presets, registry, telling
from flows.datasets import scenario_sets
from flows.orchestration.launch import Launcher, launch_run
from flows.report import Display, duration
from stages.store.runs import MAX_VALUE, NOTE, differences
from stages.store.tracking import Tracking
from stages.store.workspace import Workspace
from turnwise import cli

LINK = re.compile(r"\]\(#/experiments/(\d+)/runs/(\w{32})\)")


@pytest.fixture
def preset(tmp_path: Path) -> str:
    (tmp_path / "mine.toml").write_text("iterations = 2\n[critic]\nlr = 0.2\n")
    return str(tmp_path / "mine.toml")


def ran(workspace: Workspace, preset: str, *sets: str) -> telling.Summary:
    run = presets.load(preset, sets)
    with Display(quiet=True) as display:
        return launch_run(
            run,
            workspace,
            Launcher(workspace.home, None),
            display,
            sets=list(sets),
            asked=telling.asked(preset, run, sets),
        )


def data_of(workspace: Workspace, run_id: str) -> Any:
    return workspace.tracking._client.get_run(run_id).data


def link_of(workspace: Workspace, experiment: str, run_id: str) -> tuple[str, str]:
    return workspace.tracking.experiment_id(experiment), run_id


def test_two_runs_with_different_settings_differ_in_name_and_params(
    workspace: Workspace, stages: Stages, preset: str
) -> None:
    plain, changed = ran(workspace, preset), ran(workspace, preset, "critic.lr=0.0005", "seed=3")
    names = [workspace.tracking.info(one.run_id).name for one in (plain, changed)]
    assert names == ["mine seed 0", "mine seed 3, critic.lr 0.0005"]
    before, after = (data_of(workspace, one.run_id).params for one in (plain, changed))
    assert differences(before, after) == {
        "critic.lr": ("0.2", "0.0005"), "seed": ("0", "3"), "set.critic.lr": (None, "0.0005"), "set.seed": (None, "3"),
    }  # fmt: skip


def test_the_whole_config_stands_in_the_params(workspace: Workspace, stages: Stages, preset: str) -> None:
    params = data_of(workspace, ran(workspace, preset).run_id).params
    assert (
        params.items()
        >= {
            "critic.lr": "0.2",
            "task.env": "service_desk",
            "model.lora_rank": "32",
            "evaluate.split": "validation",
        }.items()
    )
    assert {key.split(".")[0] for key in params} == presets.run_config().model_fields.keys()


def test_a_value_that_equals_the_preset_is_no_change(preset: str) -> None:
    run = presets.load(preset, ["critic.lr=0.2", "iterations=5"])
    assert telling.asked(preset, run, ["critic.lr=0.2", "iterations=5"]).changed == {"iterations": (2, 5)}


def test_a_name_stays_short() -> None:
    run = presets.load("tiny")
    changed = {f"critic.key{i}": (0, "x" * 500) for i in range(9)}
    assert len(telling.run_name(run, telling.Asked(changed=changed))) < 200
    assert telling.run_name(run, telling.Asked(changed=changed)).endswith(", 6 more")


def test_the_description_says_what_where_and_what_came_of_it(workspace: Workspace, stages: Stages, preset: str) -> None:
    summary = ran(workspace, preset, "critic.lr=0.0005")
    text, commit = data_of(workspace, summary.run_id).tags[NOTE], workspace.tracking.tags(summary.run_id)["git_commit"]
    assert f"Command: `turnwise run {preset} --set critic.lr=0.0005`" in text
    assert "Differs from the preset mine in: `critic.lr` `0.0005` (there `0.2`)." in text
    assert "base model 0.10 (0.00-0.20), adapter of iteration 1 **0.50 (0.40-0.60)**" in text
    assert f"Commit: `{commit}`" in text
    runs = {link_of(workspace, stage, run_id) for row in summary.iterations for stage, run_id in row["runs"].items()}
    runs |= {link_of(workspace, "evaluate", part["run_id"]) for part in (summary.base, summary.final)}
    assert set(LINK.findall(text)) == runs


def test_a_run_that_died_says_how_far_it_came(workspace: Workspace, stages: Stages, preset: str) -> None:
    stages.raises["critic", 1] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        ran(workspace, preset)
    (died,) = workspace.tracking.runs("pipeline", 5)
    text = died.tags[NOTE]
    assert "On validation: 0.10 -> 0.30" in text and "the run is killed" in text


def test_the_description_of_a_long_run_fits_and_keeps_its_end(
    workspace: Workspace, stages: Stages, preset: str
) -> None:
    summary = ran(workspace, preset)
    rows = [{**summary.iterations[2], "iteration": i} for i in range(100)]
    long = telling.Asked("turnwise run mine", {f"critic.key{i}": (0, "x" * 500) for i in range(99)})
    whole = telling.Summary(summary.run_id, "mine", "FINISHED", 1.0, summary.base, summary.final, rows)
    text = telling.note(presets.load(preset), long, {}, whole, workspace.tracking.link)
    assert len(text) <= MAX_VALUE
    assert "| 99 |" in text and "| 0 |" not in text and "earlier rows are left out" in text
    assert "and 79 more" in text


def test_a_stage_run_links_to_its_pipeline_and_to_what_it_read(
    workspace: Workspace, stages: Stages, preset: str
) -> None:
    summary = ran(workspace, preset, "critic.lr=0.0005")
    runs = summary.iterations[2]["runs"]
    info = workspace.tracking.info(runs["critic"])
    assert info.name == "critic 1 of mine seed 0, critic.lr 0.0005"
    read = json.loads(info.tags["inputs"])
    expected = {link_of(workspace, "pipeline", summary.run_id)} | {
        link_of(workspace, name, one) for name, ids in read.items() for one in ids
    }
    assert set(LINK.findall(info.tags[NOTE])) == expected


def test_base_start_and_final_evaluations_are_told_apart_by_name(
    workspace: Workspace, stages: Stages, preset: str
) -> None:
    summary = ran(workspace, preset)
    ids = [summary.base["run_id"], summary.iterations[0]["runs"]["evaluate"], summary.final["run_id"]]
    names = [workspace.tracking.info(run_id).name for run_id in ids]
    assert names == [f"evaluate {part} of mine seed 0" for part in ("base", "start", "final")]


def test_the_win_rate_is_drawn_before_every_other_group(workspace: Workspace, stages: Stages, preset: str) -> None:
    metrics = workspace.tracking.metrics(ran(workspace, preset).run_id)
    groups = {key.rpartition("/")[0] for key in metrics} | set(registry.STAGES) | {"audit"}
    assert min(groups) == book.CURVE
    assert "" not in groups  # MLflow draws these last
    assert {key for key in metrics if key.startswith(f"{book.CURVE}/")} == {"agent/win_rate", "agent/win_rate_on_test"}
    points = workspace.tracking._client.get_metric_history(
        workspace.tracking.runs("pipeline", 1)[0].run_id, "agent/win_rate_on_test"
    )
    assert [(point.step, point.value) for point in points] == [(0, 0.1), (2, 0.5)]


def test_process_tags_are_hidden_from_the_page_and_read_as_before(workspace: Workspace) -> None:
    run_id = workspace.tracking.start("critic", "c", {"stage": "critic"})
    stored = data_of(workspace, run_id).tags
    assert {key for key in stored if not key.startswith("mlflow.")} == {"stage", "sequence"}
    assert workspace.tracking.tags(run_id).keys() >= {"host", "pid", "process_start"}
    assert workspace.tracking.info(run_id).tags.keys() >= {"host", "pid", "process_start"}


def test_a_dead_run_of_a_store_with_plain_process_tags_is_found(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = workspace.tracking.start("critic", "c", {})
    tags = workspace.tracking.tags(dead)
    with Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    for key in ("host", "pid", "process_start"):  # as they were written before
        workspace.tracking._client.delete_tag(dead, f"mlflow.process.{key}")
        workspace.tracking._client.set_tag(dead, key, str(child.pid) if key == "pid" else tags[key])
    assert workspace.tracking.reap() == [dead]


def test_the_scenarios_of_each_split_are_datasets_of_the_run(workspace: Workspace, stages: Stages, preset: str) -> None:
    summary = ran(workspace, preset, "collect.split=train")
    inputs = workspace.tracking._client.get_run(summary.run_id).inputs.dataset_inputs
    found = {one.tags[0].value: (one.dataset.name, json.loads(one.dataset.profile)["num_rows"]) for one in inputs}
    assert found == {
        role: (f"service_desk {role}", n) for role, n in (("train", 2304), ("validation", 864), ("test", 1152))
    }


def test_a_digest_tells_of_the_data_and_of_nothing_else() -> None:
    def digests(*sets: str) -> list[str]:
        return [one.digest for one in scenario_sets(presets.load("tiny", sets))]

    plain = digests()
    assert digests("seed=7", "collect.episodes=9") == plain
    assert len(set(plain)) == 3
    assert not set(digests("task.options.requests=2")) & set(plain)


def versions(workspace: Workspace, name: str = "mine") -> list[Any]:
    return list(workspace.tracking._client.search_model_versions(f"name = '{name}'", order_by=["version_number ASC"]))


def test_the_final_adapter_is_a_version_with_the_runs_figures(
    workspace: Workspace, stages: Stages, preset: str
) -> None:
    summary = ran(workspace, preset, "critic.lr=0.0005")
    (version,) = versions(workspace)
    assert Path(version.source) == workspace.tracking.artifact(str(summary.final["adapter"]), "adapter")
    assert version.run_id == summary.run_id
    figures = {
        "test_win_rate": "0.5",
        "test_win_low": "0.4",
        "base_test_win_rate": "0.1",
        "validation_win_rate": "0.5",
        "set.critic.lr": "0.0005",
    }
    assert (
        version.tags.items()
        >= {**figures, "iteration": "1", "run": summary.final["adapter"], "pipeline": summary.run_id}.items()
    )
    assert "](#/models/mine/versions/1)" in data_of(workspace, summary.run_id).tags[NOTE]


def test_an_adapter_is_registered_once(workspace: Workspace, stages: Stages, preset: str) -> None:
    ran(workspace, preset)
    ran(workspace, preset)  # reuses every stage
    assert len(versions(workspace)) == 1
    ran(workspace, preset, "distill.lr=0.3")
    assert [int(one.version) for one in versions(workspace)] == [1, 2]


REGISTER = """
import sys
from pathlib import Path
from stages.store.tracking import Tracking
tracking, mine = Tracking(Path(sys.argv[1])), sys.argv[2]
run_id = tracking.start("distill", "d", {})
for i in range(3):
    tracking.write_json(run_id, f"adapter{i}/weights.json", i)
print("ready", flush=True)
sys.stdin.readline()
for i in range(3):
    tracking.models.register("both", run_id, tracking.address(run_id, f"adapter{i}"), figures={"of": mine})
"""


@pytest.mark.slow
def test_two_commands_that_register_at_once_both_succeed(workspace: Workspace) -> None:
    root = workspace.tracking.root
    children = [
        Popen([sys.executable, "-c", REGISTER, str(root), str(i)], stdin=-1, stdout=-1, text=True) for i in range(2)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for child in children:
        child.communicate("go\n")
    assert [child.returncode for child in children] == [0, 0]
    found = versions(workspace, "both")
    assert [int(one.version) for one in found] == [1, 2, 3, 4, 5, 6]
    assert sorted(one.tags["of"] for one in found) == ["0"] * 3 + ["1"] * 3


def test_the_registry_is_that_of_the_project_whatever_the_environment_names(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", f"sqlite:///{tmp_path / 'other.db'}")
    tracking = Tracking(workspace.tracking.root)
    run_id = tracking.start("distill", "d", {})
    tracking.write_json(run_id, "adapter/weights.json", 1)
    tracking.models.register("mine", run_id, tracking.address(run_id, "adapter"), figures={})
    assert len(versions(workspace)) == 1
    assert not (tmp_path / "other.db").exists()


def test_a_password_in_a_url_is_written_nowhere(workspace: Workspace, stages: Stages, preset: str) -> None:
    secret = "https://ann:geheim@example.org/v1"
    summary = ran(workspace, preset, f"task.oracle_model={secret}")
    shown = (
        workspace.tracking.root.joinpath("mlflow.db").read_bytes()
        + workspace.tracking.root.joinpath("mlflow.db-wal").read_bytes()
    )
    assert b"geheim" not in shown
    assert b"https://***@example.org/v1" in shown
    assert data_of(workspace, summary.run_id).params["task.oracle_model"] == "https://***@example.org/v1"


def test_runs_tell_seed_changes_and_duration(
    workspace: Workspace,
    stages: Stages,
    preset: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flows.workspace.model_hash", lambda run: "base")
    ran(workspace, preset)
    ran(workspace, preset, "critic.lr=0.0005", "seed=3")
    assert cli.main(["runs", "--home", str(workspace.home), "--json"]) == 0
    newest, oldest = json.loads(capsys.readouterr().out)
    assert (newest["seed"], newest["set"], oldest["seed"], oldest["set"]) == (
        3,
        {"critic.lr": "0.0005", "seed": "3"},
        0,
        {},
    )
    assert newest["seconds"] >= 0
    assert cli.main(["runs", "--home", str(workspace.home)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("mine seed 3, critic.lr 0.0005") and second.endswith("mine seed 0")
    assert re.search(r"FINISHED +\d+ s ", first)


def test_show_of_a_rerun_says_what_was_changed(
    workspace: Workspace,
    stages: Stages,
    preset: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flows.workspace.model_hash", lambda run: "base")
    monkeypatch.setattr("flows.workspace.make_engine", lambda run: None)
    home = ["--home", str(workspace.home)]
    summary = ran(workspace, preset)
    old = summary.iterations[2]["runs"]["critic"]
    cli.main(
        [
            "rerun",
            "critic",
            "--of",
            summary.run_id,
            "--set",
            "critic.lr=0.0005",
            "--set",
            "seed=4",
            "--plain",
            "--json",
            *home,
        ]
    )
    new = json.loads(capsys.readouterr().out)["run_id"]
    assert cli.main(["show", new, *home]) == 0
    text = capsys.readouterr().out
    assert "changed: seed 0 -> 4, critic.lr 0.2 -> 0.0005" in text
    info = workspace.tracking.info(new)
    assert info.name == f"critic 1 of {old[:8]}, seed 4, lr 0.0005"
    assert link_of(workspace, "critic", old) in LINK.findall(info.tags[NOTE])
    cli.main(["rerun", "critic", "--of", new, "--plain", "--json", *home])
    again = json.loads(capsys.readouterr().out)["run_id"]
    cli.main(["show", again, *home])
    assert "changed: nothing" in capsys.readouterr().out


@pytest.mark.parametrize(("seconds", "told"), [(None, "-"), (58.4, "58 s"), (720.0, "12 min"), (12240.0, "3.4 h")])
def test_a_duration_is_told_in_a_readers_unit(seconds: float | None, told: str) -> None:
    assert duration(seconds) == told


def test_differences_name_keys_of_either_side() -> None:
    old: Mapping[str, Any] = {"a": {"b": 1, "c": {}}, "d": 2}
    assert differences(old, {"a": {"b": 3, "c": {"x": 1}}, "d": 2}) == {"a.b": (1, 3), "a.c.x": (None, 1)}
