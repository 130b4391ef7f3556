"""Whole commands in two project folders on one PostgreSQL and one S3 store: reuse, kills, restarts, gc, bundles."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import ITERATIONS, RUN, TITLES, Commands, Ended, commands, stage_runs
from team import PASSWORD, Team
from toys import toy_workspace

pytestmark = pytest.mark.slow


def test_a_pipeline_of_one_folder_is_reused_whole_by_another(
    projects: tuple[Path, Path], team_command: Commands, team: Team
) -> None:
    one, two = projects
    first = team_command(one, *RUN)
    assert first.status == 0, first.err
    second = team_command(two, *RUN)
    assert (second.status, second.ran) == (0, []), second.err
    assert stage_runs(second.json) == stage_runs(first.json)
    (two / "data" / "turnwise.duckdb").unlink(missing_ok=True)
    shutil.rmtree(two / "data" / "artifacts-cache")
    shown = team_command(two, "show", first.json["run_id"], "--json")
    assert shown.status == 0 and shown.json["run_id"] == first.json["run_id"], shown.err
    changed = team_command(two, *RUN, "--set", "distill.lr=2e-3")
    assert changed.status == 0, changed.err
    assert "refine 0" in changed.reused and "distill 0" in changed.ran
    assert team_command(one, "verify").status == 0
    assert not [file for file in (one / "mlflow").rglob("*") if file.is_file()]
    for done in (first, second, shown, changed):
        assert PASSWORD not in done.out + done.err + json.dumps(team.server.ask("select * from tags", team.database))


def test_a_pipeline_killed_in_one_folder_goes_on_in_another(
    projects: tuple[Path, Path], team_command: Commands
) -> None:
    one, two = projects
    killed = team_command(one, *RUN, title="critic 1", moment="rows", act="kill")
    assert killed.status == -signal.SIGKILL
    done = team_command(two, *RUN)
    assert done.status == 0, done.err
    assert done.reused[-1] == "targets 1" and done.ran[0] == "critic 1"
    statuses = [info.status for info in toy_workspace(two).tracking.runs("critic")]
    assert sorted(statuses) == ["FINISHED", "FINISHED", "KILLED"]


def test_two_folders_that_begin_the_same_pipeline_at_once_share_its_stages(
    projects: tuple[Path, Path], team_command: Commands
) -> None:
    with commands() as other, ThreadPoolExecutor(2) as pool:
        done = [
            one.result()
            for one in [pool.submit(team_command, projects[0], *RUN), pool.submit(other, projects[1], *RUN)]
        ]
    assert [one.status for one in done] == [0, 0], done[0].err + done[1].err
    ran = Counter(title for one in done for title in one.ran)
    assert ran == Counter(TITLES)
    assert sorted(run for one in done for run in set(stage_runs(one.json).values())) == sorted(
        2 * list(set(stage_runs(done[0].json).values()))
    )


@pytest.mark.parametrize("down_s", [0.0, 5.0])
def test_a_pipeline_whose_database_restarts_goes_on_or_ends_in_a_sentence_and_then_goes_on(
    projects: tuple[Path, Path], team_command: Commands, team: Team, down_s: float
) -> None:
    tracking = toy_workspace(projects[1]).tracking
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(team_command, projects[0], *RUN)
        until = time.monotonic() + 60
        while len(tracking.runs("refine")) < 1:
            assert time.monotonic() < until
            time.sleep(0.1)
        team.server.stop()
        time.sleep(down_s)
        team.server.start()
        done = job.result()
    told = done.told[-1] if done.told else ""
    assert done.status == 0 or (done.status == 1 and "the store postgresql://" in told), done.err
    assert "Traceback" not in done.err
    again = team_command(projects[0], *RUN)
    assert again.status == 0, again.err
    found = Counter(title for one in (done, again) for title in one.ran if title in TITLES)
    assert set(found) <= set(TITLES)
    runs = [info for info in toy_workspace(projects[1]).tracking.runs("collect") if info.status == "FINISHED"]
    assert len(runs) == ITERATIONS


def test_gc_of_one_folder_keeps_what_the_others_runs_need(
    projects: tuple[Path, Path], team_command: Commands, team: Team
) -> None:
    one, two = projects
    done = team_command(one, *RUN)
    assert done.status == 0, done.err
    weights = [name for name in team.objects() if name.endswith(".safetensors")]
    gone = team_command(two, "gc", "--keep", "1", "--yes", "--json")
    assert gone.status == 0, gone.err
    assert [name for name in team.objects() if name.endswith(".safetensors")] == weights != []
    assert {one["why"] for one in gone.json["runs"]} >= {"of the newest iterations"}


def test_a_bundle_is_taken_into_a_shared_store(
    projects: tuple[Path, Path], team_command: Commands, team: Team, finished: Ended
) -> None:
    run = finished.done.json["run_id"]
    assert team_command(finished.home, "export", run, "bundle", "--what", "bundle").status == 0
    taken = team_command(projects[0], "import", str(finished.home / "bundle"))
    assert taken.status == 0, taken.err
    again = team_command(projects[1], *RUN)
    assert (again.status, again.ran) == (0, []), again.err
    assert f"pipeline/{run}/artifacts/summary.json" in team.objects()


def test_doctor_says_whether_the_shared_store_answers(
    projects: tuple[Path, Path], team_command: Commands, team: Team
) -> None:
    assert (
        f"0 finished in postgresql://127.0.0.1:{team.server.port}/{team.database}"
        in team_command(projects[0], "doctor").out
    )
    file = projects[0] / "turnwise.toml"
    file.write_text(file.read_text().replace("s3://runs/", "s3://nowhere/"))
    assert "the artifacts in s3://nowhere" in team_command(projects[0], "doctor").out
