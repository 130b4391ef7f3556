"""`run.workers=ray` with two real raylets, one of which is killed in the middle of collect."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
import rays
from commands import make_home

from benchmarks.speed.shards import SETS, open_shop
from flows import presets
from flows.pipeline import Call, plain_step
from flows.registry import load_stage
from flows.workspace import open_workspace
from stages.frame.types import UsageError
from stages.store.replay import Replay
from stages.store.shards import EXPERIMENT
from stages.store.tracking import Tracking
from stages.store.workspace import StageRun, silent

pytestmark = pytest.mark.slow
EPISODES, STEP_S = 24, 0.3


@pytest.fixture
def home(empty_store: Path, base: Path, tmp_path: Path) -> Path:
    home = make_home(tmp_path / "home", empty_store, base)
    open_shop(home, STEP_S)
    return home


def collected(home: Path, *sets: str) -> StageRun:
    run = presets.load("tiny", [*SETS, f"collect.first_episodes={EPISODES}", *sets])
    workspace = open_workspace(home)
    return plain_step(workspace, silent)(Call(load_stage("collect"), run, {}, 0))


def rows(home: Path, run_id: str) -> list[tuple[object, ...]]:
    found = Replay(home / "data" / "turnwise.duckdb").rows("turns", [run_id])
    return [(row["episode_id"], row["turn"], row["text"], row["observation"], row["reward"]) for row in found]


def test_a_node_that_is_killed_repeats_only_its_own_shards(home: Path) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    with rays.head() as port, rays.second(port) as second:
        dead: list[int] = []

        def disaster() -> None:
            tracking = Tracking(home / "mlflow")
            until = time.monotonic() + rays.START_S
            while time.monotonic() < until:
                at_work = [info for info in tracking.running() if "shard_of" in info.tags]
                mine = {one.pid for one in second.children(recursive=True)}
                theirs = [info for info in at_work if int(info.tags["pid"]) in mine]
                if theirs and len(at_work) > len(theirs):
                    time.sleep(2 * STEP_S)
                    dead.extend(int(info.tags["pid"]) for info in theirs)
                    rays.kill(second)
                    return
                time.sleep(0.1)

        killer = threading.Thread(target=disaster)
        killer.start()
        done = collected(home, "run.shards=4", "run.workers=ray", f"run.address=127.0.0.1:{port}")
        killer.join()
        assert len(dead) == 1
    tracking = Tracking(home / "mlflow")
    tracking.reap()
    (lost,) = tracking.runs(EXPERIMENT)  # the others were joined, and are gone
    assert lost.status == "KILLED" and int(lost.tags["pid"]) == dead[0]
    # Without shards, and with customers who take no time.
    plain = collected(home, "task.env=service_desk")
    assert rows(home, done.run_id) == rows(home, plain.run_id)
    same = {name: value for name, value in done.metrics.items() if not name.endswith("_s")}
    assert same == {name: value for name, value in plain.metrics.items() if not name.endswith("_s")}


def test_an_address_without_a_cluster_is_told(home: Path) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    with pytest.raises(UsageError, match=r"run\.address: wanted the head of a Ray cluster at 127\.0\.0\.1:1, but none"):
        collected(home, "task.env=service_desk", "run.shards=2", "run.workers=ray", "run.address=127.0.0.1:1")


def test_without_ray_the_extra_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r'run\.workers: "ray" needs Ray, which is not installed\. Run: pip install'):
        collected(home, "task.env=service_desk", "run.shards=2", "run.workers=ray", "run.address=127.0.0.1:1")
