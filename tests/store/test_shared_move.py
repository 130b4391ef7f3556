"""`turnwise share`: a project's runs move into a shared store; nothing twice, nothing half, and nothing at home changes."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from commands import RUN, Commands, Ended, stage_runs
from team import Team
from toys import ENVIRONMENT, run_chain, toy_workspace, visible

from flows.keep.share import Shared, share
from stages.frame.types import MissingInput, UsageError
from stages.store.artifacts import sha256
from stages.store.models import VERDICT
from stages.store.workspace import Workspace, silent
from turnwise import cli

KILLED = """
import os, signal, sys
from stages.store.tracking import Tracking
from turnwise import cli
save, saved = Tracking.save, []
def once(self, run_id, local, path):
    save(self, run_id, local, path)
    saved.append(run_id)
    if len(saved) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
Tracking.save = once
cli.main(["share", "--home", sys.argv[1]])
"""


def moved(home: Path) -> Shared:
    return share(toy_workspace(home), silent, lambda text: None)


def seen(home: Path) -> tuple[list[str], dict[str, str]]:
    """All that the embedded store holds: its tables, and its files by their hashes."""
    with closing(sqlite3.connect(home / "mlflow" / "mlflow.db")) as raw:
        tables = list(raw.iterdump())
    return tables, {str(file): sha256(file) for file in (home / "mlflow" / "artifacts").rglob("*") if file.is_file()}


def times(team: Team) -> dict[str, object]:
    """When each object was written."""
    pages = team.client.get_paginator("list_objects_v2").paginate(Bucket="runs", Prefix=f"{team.database}/")
    return {one["Key"]: one["LastModified"] for page in pages for one in page.get("Contents", ())}


@pytest.fixture
def own(home: Path) -> Workspace:
    """A project with three runs of its own."""
    workspace = toy_workspace(home)
    run_chain(workspace)
    return workspace


def test_without_a_shared_store_nothing_is_moved(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["share", "--home", str(home)]) == 2
    assert "share: wanted a turnwise.toml that names the store" in capsys.readouterr().err


@pytest.mark.slow
def test_a_project_without_runs_is_told_so(homes: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="share: wanted finished runs in"):
        moved(homes[0])


@pytest.mark.slow
def test_a_killed_move_goes_on_and_another_folder_reuses_all(
    projects: tuple[Path, Path], team_command: Commands, team: Team, finished: Ended
) -> None:
    before, runs = seen(finished.home), stage_runs(finished.done.json)
    home, two = team.join(finished.home), projects[0]
    killed = subprocess.run([sys.executable, "-c", KILLED, str(home)], env=ENVIRONMENT | team.keys, check=False)
    assert killed.returncode == -signal.SIGKILL
    half = times(team)
    there = toy_workspace(two).tracking.finished_runs()
    assert len(there) == 4
    done = team_command(home, "share", "--json")
    assert done.status == 0, done.err
    assert len(done.json["new"]) + 4 == len(set(runs.values())) + 1 and done.json["known"] == 4
    whole = times(team)
    kept = [key for key in half if key.split("/")[2] in there]
    assert {key: whole[key] for key in kept} == {key: half[key] for key in kept}
    again = team_command(home, "share", "--json")
    assert (again.status, again.json["new"], again.json["known"]) == (0, [], len(set(runs.values())) + 1)
    assert times(team) == whole
    assert seen(home) == before

    reused = team_command(two, *RUN)
    assert (reused.status, reused.ran) == (0, []), reused.err
    assert stage_runs(reused.json) == runs
    for folder in (home, two):
        verified = team_command(folder, "verify")
        assert verified.status == 0, verified.out
    shown = team_command(two, "show", finished.done.json["run_id"], "--json")
    assert shown.json["final"] == finished.done.json["final"]
    lineage = team_command(two, "lineage", runs["distill 1"])
    assert lineage.status == 0 and runs["collect 0"][:8] in lineage.out, lineage.err


@pytest.mark.slow
@pytest.mark.parametrize("bucket", [True, False])
def test_rows_and_files_are_read_as_at_home(own: Workspace, team: Team, homes: tuple[Path, Path], bucket: bool) -> None:
    made = run_chain(own)
    for home in () if bucket else (team.join(own.home), homes[1]):
        text = (home / "turnwise.toml").read_text().partition("artifacts")[0]
        (home / "turnwise.toml").write_text(f'{text}artifacts = "{homes[0] / "all"}"\n')
    done = moved(team.join(own.home) if bucket else own.home)
    assert set(done.new) == {one.run_id for one in made}
    two = toy_workspace(homes[1])
    assert visible(two, run_chain(two)) == visible(own, made)
    assert two.tracking.record_of(made[0].run_id) == own.tracking.record_of(made[0].run_id)


@pytest.mark.slow
def test_runs_that_the_store_has_stay_the_newest(own: Workspace, team: Team, homes: tuple[Path, Path]) -> None:
    theirs = run_chain(toy_workspace(homes[1]))
    assert len(moved(team.join(own.home)).new) == 3
    again = run_chain(toy_workspace(homes[1]))
    assert [one.run_id for one in again] == [one.run_id for one in theirs]


@pytest.mark.slow
def test_versions_keep_verdicts_and_aliases_and_a_champion_stays(
    own: Workspace, team: Team, homes: tuple[Path, Path]
) -> None:
    def registered(workspace: Workspace, force: bool = False) -> None:
        source, parent = run_chain(workspace, force=force)[0], "0" * 32
        figures = {"run": source.run_id, "pipeline": parent, "iteration": 0}
        tracking = workspace.tracking
        version = tracking.models.register("desk", parent, tracking.address(source.run_id, "adapter"), figures=figures)
        against = 1 if force else None
        tracking.models.decide(version, against, {"against": against, "promoted": True})

    registered(own)
    registered(own, force=True)
    home = team.join(own.home)
    assert moved(home).versions == ("desk 1", "desk 2")
    assert moved(home).versions == ()
    models = toy_workspace(homes[0]).tracking.models
    champion = models.champion("desk")
    assert champion is not None and champion.number == 2
    assert json.loads(champion.tags[VERDICT]) == {"against": 1, "promoted": True}
    assert toy_workspace(home).tracking.artifact(champion.tags["run"], "adapter").is_dir()

    other = team.new("empty")
    (home / "turnwise.toml").unlink()
    first = toy_workspace(other.home(homes[0].parent / "three"))
    registered(first)
    assert moved(other.join(home)).versions == ("desk 2", "desk 3")
    after = first.tracking.models.champion("desk")
    assert after is not None and after.number == 1
    versions = {int(one.version): one for one in first.tracking._client.search_model_versions("name = 'desk'")}
    assert json.loads(versions[3].tags[VERDICT])["against"] == 2


@pytest.mark.slow
def test_a_damaged_run_and_those_after_it_are_left_out(own: Workspace, team: Team) -> None:
    made = run_chain(own)
    file = own.tracking.artifact(made[1].run_id, "outputs.json")
    file.write_text(file.read_text() + "\n")
    other = own.tracking.start("source", "source 9", {})
    done = moved(team.join(own.home))
    assert (done.new, done.running) == ((made[0].run_id,), 1)
    assert list(done.left_out) == [made[1].run_id, made[2].run_id]
    assert "is not what was written" in done.left_out[made[1].run_id]
    assert f"names run {made[1].run_id[:8]}" in done.left_out[made[2].run_id]
    with pytest.raises(MissingInput):
        toy_workspace(own.home).tracking.info(other)


@pytest.mark.slow
def test_a_file_that_is_damaged_on_its_way_ends_no_run(
    own: Workspace, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, sent = run_chain(own)[0].run_id, list[str]()
    workspace = toy_workspace(team.join(own.home))
    place = workspace.tracking._place
    send = place.send

    def cut(folder: Path, path: str) -> None:
        if not sent and run_id in str(folder):
            sent.append(path)
            (folder / "adapter" / "weights.bin").write_bytes(b"cut")
        send(folder, path)

    monkeypatch.setattr(place, "send", cut)
    done = share(workspace, silent, lambda text: None)
    assert "damaged on its way" in done.left_out[run_id]
    assert toy_workspace(own.home).tracking.finished_runs() == []
    assert len(moved(own.home).new) == 3
