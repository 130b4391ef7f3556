"""`run.workers=ray` with two real raylets, one of which is killed in the middle of collect."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from commands import make_home

from benchmarks.speed.shards import SETS, open_shop
from flows import presets
from flows.orchestration.server import free_port
from flows.pipeline import Call, plain_step
from flows.registry import load_stage
from flows.workspace import open_workspace
from stages.frame.types import UsageError
from stages.store.replay import Replay
from stages.store.shards import EXPERIMENT
from stages.store.tracking import Tracking
from stages.store.workspace import StageRun, silent

pytestmark = pytest.mark.slow
HERE = Path(__file__).parents[2]
EPISODES, STEP_S, START_S = 24, 0.3, 180


@contextmanager
def raylet(*options: str) -> Iterator[psutil.Process]:
    """A node of a Ray cluster with one core, and all that it started, ended by their ids."""
    env = {
        **os.environ,
        "PYTHONPATH": f"{HERE}:{HERE / 'tests'}",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1", *options]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        node = psutil.Process(child.pid)
        try:
            yield node
        finally:
            kill(node)


def kill(node: psutil.Process) -> None:
    """With -9, as when a machine goes down."""
    with suppress(psutil.NoSuchProcess):
        for one in [node, *node.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)


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
    port = free_port()
    with (
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder,  # a socket's path is short
        raylet(
            "--head",
            "--port",
            str(port),
            "--node-ip-address",
            "127.0.0.1",
            "--include-dashboard=false",
            "--temp-dir",
            folder,
        ),
    ):
        waited_for_head(port)
        with raylet("--address", f"127.0.0.1:{port}", "--node-ip-address", "127.0.0.2") as second:
            dead: list[int] = []

            def disaster() -> None:
                tracking = Tracking(home / "mlflow")
                until = time.monotonic() + START_S
                while time.monotonic() < until:
                    at_work = [info for info in tracking.running() if "shard_of" in info.tags]
                    mine = {one.pid for one in second.children(recursive=True)}
                    theirs = [info for info in at_work if int(info.tags["pid"]) in mine]
                    if theirs and len(at_work) > len(theirs):
                        time.sleep(2 * STEP_S)
                        dead.extend(int(info.tags["pid"]) for info in theirs)
                        kill(second)
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


def waited_for_head(port: int) -> None:
    import socket

    until = time.monotonic() + START_S
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise AssertionError("no head of a Ray cluster")


def test_an_address_without_a_cluster_is_told(home: Path) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    with pytest.raises(UsageError, match=r"run\.address: wanted the head of a Ray cluster at 127\.0\.0\.1:1, but none"):
        collected(home, "task.env=service_desk", "run.shards=2", "run.workers=ray", "run.address=127.0.0.1:1")


def test_without_ray_the_extra_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r'run\.workers: "ray" needs Ray, which is not installed\. Run: pip install'):
        collected(home, "task.env=service_desk", "run.shards=2", "run.workers=ray", "run.address=127.0.0.1:1")
