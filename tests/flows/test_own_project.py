"""An environment and prompts of the project folder's own: run, reused, run again after an edit, and sent in a bundle."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import RUN, Commands, Done, stage_runs

from flows.evidence.study.sweep import is_sweep, study_text
from stages.llm.roles import FOLDER
from stages.store.tracking import Tracking

DESK = """from stages.envs.service_desk import OPTIONS, lessons, n_wrong, readable, scenarios, truth
from stages.envs import service_desk
from mine.words import GREETING

touched = open("imported", "a").write(GREETING)


def make(options, ask=None):
    return service_desk.make(options, ask)
"""
OWN = (*RUN, "--set", "iterations=1", "--set", "task.env=mine.desk", "--set", "roles.prompts=./prompts")


@pytest.fixture
def project(fresh: Path) -> Path:
    """A project folder with an environment of its own, which leaves a mark as it is imported, and prompts."""
    (fresh / "mine").mkdir()
    (fresh / "mine" / "desk.py").write_text(DESK)
    (fresh / "mine" / "words.py").write_text("GREETING = 'hello'\n")
    shutil.copytree(FOLDER / "service_desk", fresh / "prompts")
    return fresh


def run(command: Commands, home: Path, *more: str) -> Done:
    done = command(home, *OWN, *more)
    assert done.status == 0, done.err
    return done


@pytest.mark.slow
def test_own_code_and_prompts_are_run_reused_and_run_again_where_they_changed(command: Commands, project: Path) -> None:
    first = run(command, project)
    tags = Tracking(project / "mlflow").tags(first.json["run_id"])
    assert [tags[f"own.{key}"].split()[0] for key in ("task.env", "roles.prompts")] == ["mine/desk.py", "prompts"]
    (project / "mine" / "words.py").write_text("# A word.\nGREETING = 'hello'\n")
    again = run(command, project)
    assert (again.ran, again.json["final"]["win_rate"]) == ([], first.json["final"]["win_rate"])
    judge = project / "prompts" / "evaluator.md"
    judge.write_text(judge.read_text() + "Now.\n")
    changed = run(command, project)
    assert changed.reused == ["collect 0", "targets 0", "critic 0"]
    assert changed.ran == ["evaluate base", "evaluate start", "refine 0", "distill 0", "evaluate 0", "evaluate final"]
    (project / "mine" / "words.py").write_text("GREETING = 'good day'\n")
    assert run(command, project).reused == []
    told = command(project, "explain", "collect", "--of", first.json["run_id"], "--json")
    assert "contents.task.env" in told.out, told.out


@pytest.mark.slow
def test_a_bundle_brings_its_prompts_and_never_makes_a_module_be_imported(
    command: Commands, project: Path, tmp_path: Path
) -> None:
    made = run(command, project).json
    bundle, other = tmp_path / "bundle", tmp_path / "other"
    assert command(project, "export", made["run_id"], str(bundle), "--what", "bundle").status == 0
    assert (bundle / "files" / "prompts" / "combine.md").is_file()
    assert not list(bundle.rglob("*.py"))
    (other / "mlflow").mkdir(parents=True)
    shutil.copytree(project / "mine", other / "mine")  # as if it had one of that name
    replayed = command(other, "replay", str(bundle), "--json")
    assert replayed.status == 0, replayed.err
    assert json.loads(replayed.out)["same"]
    refused = command(other, "import", str(bundle))
    assert refused.status == 2
    assert "name the module mine.desk. Its code is not in the bundle" in refused.err
    assert refused.err.count("\n") == 1
    assert not Tracking(other / "mlflow").runs("pipeline", 10)
    assert not (other / "imported").exists()
    taken = command(other, "import", str(bundle), "--module", "mine.desk")
    assert taken.status == 0, taken.err
    assert (other / "prompts" / "combine.md").is_file()
    for look in (("show", made["run_id"]), ("lineage", made["run_id"]), ("runs",)):
        assert command(other, *look).status == 0
    assert not (other / "imported").exists()
    reused = command(other, *OWN)
    assert (reused.status, reused.ran) == (0, []), reused.err
    shutil.rmtree(other / "mine")
    stage = stage_runs(made)["collect 0"]
    gone = command(other, "rerun", "collect", "--of", stage, "--plain")
    assert gone.status == 2
    assert "task.env: there is no module 'mine.desk'" in gone.err


def test_options_of_an_own_environment_are_typed_from_wherever_the_command_is_given(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = DESK.replace("mine.words", "ours.words").replace('open("imported", "a").write(GREETING)', "GREETING")
    (project / "mine" / "desk.py").write_text(text)
    (project / "mine").rename(project / "ours")  # another name, since this process keeps what it imports
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sets = ["task.env=ours.desk", "task.options.tiers=[1, 2]"]
    assert is_sweep("tiny", sets, project)
    assert study_text("tiny", sets, None, project).count("[methods.") == 2
    assert not is_sweep("tiny", ["task.env=ours.desk", "task.options.tiers=2"], project)


def test_an_environment_that_cannot_be_used_ends_the_command_in_one_sentence(command: Commands, project: Path) -> None:
    (project / "mine" / "words.py").write_text("GREETING = nothing\n")
    results: list[Any] = [command(project, *OWN, *more) for more in ((), ("--dry-run",))]
    for done in results:
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        assert "task.env: mine/desk.py cannot be imported: NameError:" in done.err
        assert "(mine/words.py, line 1)" in done.err
