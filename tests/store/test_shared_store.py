"""Two project folders on one PostgreSQL and one S3 store: what one made, the other reuses, and nothing is made twice."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from commands import HERE, ITERATIONS, RUN, TITLES, Commands, Ended, commands, stage_runs
from team import BUCKET, PASSWORD, Team, postgres, s3
from test_equal_work import both, result, there
from toys import ENVIRONMENT, run_chain, toy_workspace, visible

from stages.frame.types import Changed, Dropped, TurnwiseError
from stages.store import search
from stages.store.runs import hidden
from stages.store.tracking import Tracking
from stages.store.upkeep import changed_runs, recover

pytestmark = pytest.mark.slow
KEYS = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_DEFAULT_REGION": "us-east-1"}
numbers = count()
Start = Callable[..., int]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """Both servers and an empty store in them."""
    with s3() as address, postgres() as server, pytest.MonkeyPatch.context() as patch:
        for key, value in {**KEYS, "MLFLOW_S3_ENDPOINT_URL": address, "PGPASSWORD": PASSWORD}.items():
            patch.setenv(key, value)
        team = Team(server, address, "empty")
        team.client.create_bucket(Bucket=BUCKET)
        server.ask("create database empty")
        toy_workspace(team.home(tmp_path_factory.mktemp("empty"))).tracking.initialise()
        yield team


@pytest.fixture
def team(servers: Team) -> Team:
    """An empty store: making one takes seconds, copying it less."""
    name = f"team{next(numbers)}"
    servers.server.ask("select pg_terminate_backend(pid) from pg_stat_activity where datname = 'empty'")
    servers.server.ask(f"create database {name} template empty")
    return Team(servers.server, servers.s3, name)


@pytest.fixture
def homes(team: Team, tmp_path: Path) -> tuple[Path, Path]:
    return team.home(tmp_path / "one"), team.home(tmp_path / "two")


def test_what_one_folder_made_the_other_reuses_and_reads(homes: tuple[Path, Path], team: Team) -> None:
    one, two = (toy_workspace(home) for home in homes)
    made = run_chain(one)
    found = run_chain(two)
    assert [each.reused for each in made] == [False] * 3
    assert [(each.reused, each.run_id) for each in found] == [(True, each.run_id) for each in made]
    assert visible(two, found) == visible(one, made)
    shutil.rmtree(homes[1] / "data")  # the rows and the cache are made again
    again = toy_workspace(homes[1])
    assert visible(again, run_chain(again)) == visible(one, made)
    assert not list((homes[0] / "mlflow").iterdir())
    assert f"source/{made[0].run_id}/artifacts/sha256.json" in team.objects()
    assert changed_runs(again) == {}


def test_a_stage_after_another_folders_stages_is_made_once(homes: tuple[Path, Path]) -> None:
    one, two = (toy_workspace(home) for home in homes)
    made = run_chain(one)
    run_chain(two, force=True)
    newest = toy_workspace(homes[0])
    assert [each.reused for each in run_chain(newest)] == [True] * 3
    assert len(newest.tracking.runs("source")) == 2
    assert newest.tracking.finished_runs()[-1] == made[0].run_id


def test_damage_in_the_bucket_is_told_and_in_the_cache_is_mended(homes: tuple[Path, Path], team: Team) -> None:
    one, two = (toy_workspace(home) for home in homes)
    run = run_chain(one)[0].run_id
    file = two.tracking.artifact(run, "adapter/weights.bin")
    right = file.read_bytes()
    file.write_bytes(b"cut")
    assert toy_workspace(homes[1]).tracking.artifact(run, "adapter/weights.bin").read_bytes() == right
    key = f"{team.database}/source/{run}/artifacts/adapter/weights.bin"
    team.client.put_object(Bucket=BUCKET, Key=key, Body=b"other")
    with pytest.raises(Changed, match=r"adapter/weights.bin of source run"):
        toy_workspace(homes[1]).tracking.artifact(run, "adapter/weights.bin")
    assert changed_runs(toy_workspace(homes[1])) == {run: ["adapter/weights.bin"]}


def test_weights_that_one_folder_dropped_are_dropped_for_the_other(homes: tuple[Path, Path], team: Team) -> None:
    one, two = (toy_workspace(home).tracking for home in homes)
    run = one.start("distill", "distill 0", {"fingerprint": "f"})
    weights = homes[0] / "adapter_model.safetensors"
    weights.write_bytes(b"weights")
    one.save(run, weights, "adapter/adapter_model.safetensors")
    one.seal(run)
    one.finish(run)
    assert two.weights(run) == {"adapter/adapter_model.safetensors": 7}
    assert two.address(run, "adapter") == f"s3://{BUCKET}/{team.database}/distill/{run}/artifacts/adapter"
    assert not one.drop(run, lambda: True) and not one.is_dropped(run)
    assert two.drop(run, lambda: False)
    with pytest.raises(Dropped):
        Tracking(one.root, one._shared, homes[0] / "data" / "artifacts-cache").artifact(run, "adapter")
    assert [name for name in team.objects() if name.endswith(".safetensors")] == []


@pytest.fixture(scope="module")
def command(servers: Team) -> Iterator[Commands]:
    """Runs `turnwise` commands, which find the servers' secrets in their environment."""
    with commands() as run:
        yield run


@pytest.fixture
def projects(homes: tuple[Path, Path], base: Path) -> tuple[Path, Path]:
    """The two folders, with the tiny model."""
    for home in homes:
        shutil.copytree(base, home / "data" / "base")
    return homes


def test_a_pipeline_of_one_folder_is_reused_whole_by_another(
    projects: tuple[Path, Path], command: Commands, team: Team
) -> None:
    one, two = projects
    first = command(one, *RUN)
    assert first.status == 0, first.err
    second = command(two, *RUN)
    assert (second.status, second.ran) == (0, []), second.err
    assert stage_runs(second.json) == stage_runs(first.json)
    (two / "data" / "turnwise.duckdb").unlink(missing_ok=True)
    shutil.rmtree(two / "data" / "artifacts-cache")
    shown = command(two, "show", first.json["run_id"], "--json")
    assert shown.status == 0 and shown.json["run_id"] == first.json["run_id"], shown.err
    changed = command(two, *RUN, "--set", "distill.lr=2e-3")
    assert changed.status == 0, changed.err
    assert "refine 0" in changed.reused and "distill 0" in changed.ran
    assert command(one, "verify").status == 0
    assert not [file for file in (one / "mlflow").rglob("*") if file.is_file()]
    for done in (first, second, shown, changed):
        assert PASSWORD not in done.out + done.err + json.dumps(team.server.ask("select * from tags", team.database))


def test_a_pipeline_killed_in_one_folder_goes_on_in_another(projects: tuple[Path, Path], command: Commands) -> None:
    one, two = projects
    killed = command(one, *RUN, title="critic 1", moment="rows", act="kill")
    assert killed.status == -signal.SIGKILL
    done = command(two, *RUN)
    assert done.status == 0, done.err
    assert done.reused[-1] == "targets 1" and done.ran[0] == "critic 1"
    statuses = [info.status for info in toy_workspace(two).tracking.runs("critic")]
    assert sorted(statuses) == ["FINISHED", "FINISHED", "KILLED"]


def test_two_folders_that_begin_the_same_pipeline_at_once_share_its_stages(
    projects: tuple[Path, Path], command: Commands
) -> None:
    with commands() as other, ThreadPoolExecutor(2) as pool:
        done = [
            one.result() for one in [pool.submit(command, projects[0], *RUN), pool.submit(other, projects[1], *RUN)]
        ]
    assert [one.status for one in done] == [0, 0], done[0].err + done[1].err
    ran = Counter(title for one in done for title in one.ran)
    assert ran == Counter(TITLES)
    assert sorted(run for one in done for run in set(stage_runs(one.json).values())) == sorted(
        2 * list(set(stage_runs(done[0].json).values()))
    )


@pytest.mark.parametrize("down_s", [0.0, 5.0])
def test_a_pipeline_whose_database_restarts_goes_on_or_ends_in_a_sentence_and_then_goes_on(
    projects: tuple[Path, Path], command: Commands, team: Team, down_s: float
) -> None:
    tracking = toy_workspace(projects[1]).tracking
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(command, projects[0], *RUN)
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
    again = command(projects[0], *RUN)
    assert again.status == 0, again.err
    found = Counter(title for one in (done, again) for title in one.ran if title in TITLES)
    assert set(found) <= set(TITLES)
    runs = [info for info in toy_workspace(projects[1]).tracking.runs("collect") if info.status == "FINISHED"]
    assert len(runs) == ITERATIONS


def test_gc_of_one_folder_keeps_what_the_others_runs_need(
    projects: tuple[Path, Path], command: Commands, team: Team
) -> None:
    one, two = projects
    done = command(one, *RUN)
    assert done.status == 0, done.err
    weights = [name for name in team.objects() if name.endswith(".safetensors")]
    gone = command(two, "gc", "--keep", "1", "--yes", "--json")
    assert gone.status == 0, gone.err
    assert [name for name in team.objects() if name.endswith(".safetensors")] == weights != []
    assert {one["why"] for one in gone.json["runs"]} >= {"of the newest iterations"}


def test_a_bundle_is_taken_into_a_shared_store(
    projects: tuple[Path, Path], command: Commands, team: Team, finished: Ended
) -> None:
    run = finished.done.json["run_id"]
    assert command(finished.home, "export", run, "bundle", "--what", "bundle").status == 0
    taken = command(projects[0], "import", str(finished.home / "bundle"))
    assert taken.status == 0, taken.err
    again = command(projects[1], *RUN)
    assert (again.status, again.ran) == (0, []), again.err
    assert f"pipeline/{run}/artifacts/summary.json" in team.objects()


def test_doctor_says_whether_the_shared_store_answers(
    projects: tuple[Path, Path], command: Commands, team: Team
) -> None:
    assert (
        f"0 finished in postgresql://127.0.0.1:{team.server.port}/{team.database}" in command(projects[0], "doctor").out
    )
    file = projects[0] / "turnwise.toml"
    file.write_text(file.read_text().replace("s3://runs/", "s3://nowhere/"))
    assert "the artifacts in s3://nowhere" in command(projects[0], "doctor").out


def test_two_that_open_a_new_database_at_once_make_one_store(servers: Team, tmp_path: Path) -> None:
    name = f"team{next(numbers)}"
    servers.server.ask(f"create database {name}")
    fresh = Team(servers.server, servers.s3, name)
    script = "import sys, pathlib, toys; toys.toy_workspace(pathlib.Path(sys.argv[1])).tracking.initialise()"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(fresh.home(tmp_path / name))],
            env=os.environ | ENVIRONMENT | KEYS | {"PGPASSWORD": PASSWORD},
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    assert [child.communicate()[1] for child in children] == ["", ""]
    assert [child.returncode for child in children] == [0, 0]


def test_the_queries_answer_as_in_sqlite(homes: tuple[Path, Path], tracking: Tracking) -> None:
    def asked(store: Tracking) -> list[object]:
        parent = store.start("pipeline", "demo 0", {"preset": "demo's"})
        ids = list[str]()
        for i in range(6):
            tags = {"fingerprint": f"f{i % 3}", "stage": "critic", "inputs": json.dumps({"collect": ids[-1:]})}
            ids.append(store.start("critic" if i % 2 else "collect", f"run {i}", tags, parent))
            store.record(
                ids[-1],
                metrics={"critic/loss": math.nan if i == 0 else i / 7, "critic/odd": math.inf},
                params={"seed": i},
            )
            if i < 4:
                store.finish(ids[-1], "FAILED" if i == 2 else "FINISHED")
        name = {run_id: i for i, run_id in enumerate(ids)}
        found = search.search(store.db)
        return [
            [(info.name, info.status, repr(info.metrics), info.params) for info, _ in found],
            [info.name for info in store.runs("critic", 2)],
            [info.name for info in store.children(parent)],
            [info.name for info in store.running()],
            [info.name for info, _ in search.search(store.db, tags={"preset": "demo's"})],
            name[store.find(ids[3][:12])],
            [name[one] for one in search.stage_runs(store.db)],
            [name[one] for one in store.finished_runs()],
            [(name[one], says) for one, says in store.reading(ids[2], "critic")],
            store.finished("f0", "collect") == ids[0],
            search.last_number(store.db),
            [info.name for info, _ in search.load(store.db, [ids[4], "0" * 32, ids[1]])],
        ]

    assert asked(toy_workspace(homes[0]).tracking) == asked(tracking)


@pytest.fixture(scope="module")
def start(servers: Team) -> Iterator[Start]:
    """As that of test_equal_work.py, with this store's keys in the environment."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, str(HERE / "equal_child.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        stdin, stdout = child.stdin, child.stdout
        assert stdin is not None and stdout is not None

        def begin(home: Path, name: str, *, force: bool = False) -> int:
            stdin.write(json.dumps({"home": str(home), "name": name, "force": force}) + "\n")
            stdin.flush()
            return int(stdout.readline())

        yield begin
        stdin.close()


def in_the_middle(start: Start, one: Path, two: Path) -> int:
    """The folder `one` is in the middle of its work, `two` has said that it waits. Gives the first one's process."""
    pid = start(one, "first")
    there(one / "first.working")
    start(two, "second")
    there(two / "second.said")
    return pid


def test_of_two_folders_one_works_and_the_other_waits_and_reuses(start: Start, homes: tuple[Path, Path]) -> None:
    one, two = homes
    pid = in_the_middle(start, one, two)
    (working,) = toy_workspace(one).tracking.running()
    assert (
        there(two / "second.said") == f"waiting for run {working.run_id[:8]} (process {pid}), which does the same work"
    )
    (one / "first.go").touch()
    first, second = result(one, "first"), result(two, "second")
    assert (first["run_id"], first["reused"]) == (working.run_id, False)
    assert second == {**first, "reused": True}


def test_a_killed_holder_frees_its_claim_and_its_run_is_closed(start: Start, homes: tuple[Path, Path]) -> None:
    one, two = homes
    os.kill(in_the_middle(start, one, two), signal.SIGKILL)
    there(two / "second.working")
    recover(toy_workspace(two))
    (two / "second.go").touch()
    assert not result(two, "second")["reused"]
    assert [info.status for info in toy_workspace(one).tracking.runs("source")] == ["FINISHED", "KILLED"]


def test_one_folder_waits_for_itself_as_at_home(start: Start, homes: tuple[Path, Path]) -> None:
    both(start, homes[0])
    (homes[0] / "first.go").touch()
    assert result(homes[0], "second")["reused"]


def test_a_run_of_another_machine_is_dead_when_its_heartbeat_is_old(
    homes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.store.machine.socket.gethostname", lambda: "far")
    far = toy_workspace(homes[0]).tracking
    old, new = far.start("source", "old", {}), far.start("source", "new", {})
    monkeypatch.undo()
    here = toy_workspace(homes[1]).tracking
    assert here.reap() == []
    here.tag(old, *next(iter(hidden({"heartbeat": "1000"}).items())))
    assert here.reap() == [old]
    assert (here.status(old), here.status(new)) == ("KILLED", "RUNNING")


def test_a_machine_that_slept_keeps_the_scratch_folder_of_its_living_run(homes: tuple[Path, Path]) -> None:
    mine = toy_workspace(homes[0])
    run = mine.tracking.start("source", "source 0", {})
    mine.workdir(run).mkdir(parents=True)
    mine.workdir("f" * 32).mkdir()
    toy_workspace(homes[1]).tracking.finish(run, "KILLED", "its process is gone")
    assert recover(toy_workspace(homes[0])) == []
    assert [folder.name for folder in mine.workdir("x").parent.iterdir()] == [run]
    mine.tracking.finish(run)
    assert toy_workspace(homes[1]).tracking.status(run) == "FINISHED"


def test_a_running_run_has_a_heartbeat_until_it_ends(homes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.store.postgres.BEAT_S", 0.2)
    tracking = toy_workspace(homes[0]).tracking
    run = tracking.start("source", "source 0", {})
    tracking.tag(run, *next(iter(hidden({"heartbeat": "1000"}).items())))
    until = time.monotonic() + 30
    while float(tracking.tags(run)["heartbeat"]) < time.time() - 60:
        assert time.monotonic() < until
        time.sleep(0.1)
    tracking.finish(run)
    time.sleep(0.5)
    tracking.tag(run, *next(iter(hidden({"heartbeat": "1000"}).items())))
    time.sleep(0.5)
    assert tracking.tags(run)["heartbeat"] == "1000"


def test_after_a_restart_of_the_database_the_work_goes_on(start: Start, homes: tuple[Path, Path], team: Team) -> None:
    start(homes[0], "first")
    there(homes[0] / "first.working")
    tracking = toy_workspace(homes[1]).tracking
    assert len(tracking.running()) == 1
    team.server.stop()
    with pytest.raises(
        TurnwiseError, match=r"the store postgresql://127\.0\.0\.1:\d+/team\d+ was wanted, but .*refused"
    ) as told:
        tracking.running()
    assert PASSWORD not in str(told.value)
    team.server.start()
    assert len(tracking.running()) == 1  # by a connection that was cut
    (homes[0] / "first.go").touch()
    assert "run_id" in result(homes[0], "first")


def test_a_claim_that_a_restart_broke_is_taken_again(
    homes: tuple[Path, Path], team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.store.postgres.BEAT_S", 0.2)
    held = f"select count(*) from pg_locks where locktype = 'advisory' and database = (select oid from pg_database where datname = '{team.database}')"
    with toy_workspace(homes[0]).tracking.claimed("f", lambda: None):
        assert team.server.ask(held) == [(1,)]
        team.server.stop()
        team.server.start()
        until = time.monotonic() + 30
        while team.server.ask(held) != [(1,)]:
            assert time.monotonic() < until
            time.sleep(0.1)
    until = time.monotonic() + 10
    while team.server.ask(held) != [(0,)]:
        assert time.monotonic() < until
        time.sleep(0.1)


def test_who_waits_lets_the_holder_come_first_after_a_restart(
    homes: tuple[Path, Path], team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.store.postgres.BEAT_S", 1.0)
    monkeypatch.setattr("stages.store.postgres.POLL_S", 0.1)
    one, two = (toy_workspace(home).tracking for home in homes)
    done = list[str]()

    def wait() -> None:
        with two.claimed("f", lambda: done.append("waits")):
            done.append("works")

    with ThreadPoolExecutor(1) as pool, one.claimed("f", lambda: None):
        job = pool.submit(wait)
        until = time.monotonic() + 30
        while not done:
            assert time.monotonic() < until
            time.sleep(0.05)
        # As a restart does, but so quickly that neither of them finds the server away.
        cut = "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory'"
        others = f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{team.database}'"
        team.server.ask(cut)
        team.server.ask(others)
        time.sleep(5)
        assert done == ["waits"]
    job.result(30)
    assert done == ["waits", "works"]


def test_a_folder_that_all_see_does_in_place_of_the_bucket(homes: tuple[Path, Path], tmp_path: Path) -> None:
    for home in homes:
        file = home / "turnwise.toml"
        text = file.read_text().partition("artifacts")[0]
        file.write_text(f'{text}artifacts = "{tmp_path / "all"}"\n')
    one, two = (toy_workspace(home) for home in homes)
    made = run_chain(one)
    assert [each.reused for each in run_chain(two)] == [True] * 3
    assert two.tracking.artifact(made[0].run_id, "adapter").is_relative_to(tmp_path / "all")
    assert visible(two, made) == visible(one, made)


def test_two_places_of_artifacts_on_one_database_are_refused(homes: tuple[Path, Path]) -> None:
    run_chain(toy_workspace(homes[0]))
    file = homes[1] / "turnwise.toml"
    file.write_text(file.read_text().replace('artifacts = "s3://runs/', 'artifacts = "s3://runs/other/'))
    with pytest.raises(TurnwiseError, match=r"this store keeps those of source at s3://runs/team\d+/source, but"):
        toy_workspace(homes[1]).tracking.start("source", "source 0", {})


def test_a_wrong_password_is_one_sentence(homes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", "wrong-one")
    with pytest.raises(TurnwiseError, match=r"password authentication failed.*PGPASSWORD") as told:
        toy_workspace(homes[0]).tracking.running()
    assert "wrong-one" not in str(told.value)


def test_wrong_keys_of_the_bucket_are_one_sentence(homes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_chain(toy_workspace(homes[0]))[0].run_id
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(TurnwiseError, match=r"the artifacts in s3://runs/team\d+ were wanted, but"):
        toy_workspace(homes[1]).tracking.read_json(run, "outputs.json")
