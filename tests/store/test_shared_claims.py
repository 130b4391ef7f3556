"""Who works on a shared store: claims, heartbeats, and restarts of the database in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import HERE
from team import PASSWORD, Team
from test_equal_work import assert_the_second_waits_and_reuses, both, result, there
from toys import toy_workspace

from stages.frame.types import TurnwiseError
from stages.store.postgres import is_away
from stages.store.runs import hidden
from stages.store.upkeep import recover

pytestmark = pytest.mark.slow
Start = Callable[..., int]


@pytest.fixture(scope="module")
def start(team_servers: Team) -> Iterator[Start]:
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
    assert_the_second_waits_and_reuses(one, two, pid)


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


def test_a_connection_that_was_cut_while_nobody_asked_is_opened_anew(homes: tuple[Path, Path], team: Team) -> None:
    tracking = toy_workspace(homes[0]).tracking
    for mode in ("immediate", "fast"):
        assert tracking.running() == []
        team.server.stop(mode)
        team.server.start()
    assert tracking.running() == []


@pytest.mark.parametrize("kind", ["DatabaseError", "OperationalError"])
def test_a_cut_connection_is_known_by_what_psycopg2_says(kind: str) -> None:
    error = type(kind, (Exception,), {"__module__": "psycopg2"})
    assert is_away(error("server closed the connection unexpectedly\n\tThis probably means"))
    assert is_away(error('column "x" does not exist')) == (kind == "OperationalError")


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
