"""`run.workers=pool`: a real Prefect server, a work pool, and a process that works for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from flows import presets
from flows.leash import Leashed
from flows.orchestration.server import _environment, start_server
from flows.shards import FLOW
from stages.frame.types import UsageError

pytestmark = pytest.mark.slow
HERE = Path(__file__).parents[2]
SETS = ("model.engine=scripted", "roles.max_action_tokens=400", "collect.first_episodes=8")
# Prefect reads the address of its server when it is imported, so all of this runs in processes of its own.
STEPS = (
    "turnwise deploy --pool cpus",
    "prefect work-pool create cpus --type process",
    "prefect --no-prompt deploy --all",
)
COLLECT = """
import json, sys
from pathlib import Path
from flows import presets
from flows.pipeline import Call, plain_step
from flows.registry import load_stage
from flows.workspace import open_workspace
from stages.frame.types import TurnwiseError
from stages.store.workspace import silent
workspace = open_workspace(Path(sys.argv[1]))
try:
    done = plain_step(workspace, silent)(Call(load_stage("collect"), presets.load("tiny", sys.argv[2:]), {}, 0))
except TurnwiseError as error:
    print(json.dumps({"error": str(error)}))
else:
    print(json.dumps({"metrics": done.metrics, "rows": [
        (row["episode_id"], row["turn"], row["text"], row["log_probs"], row["reward"])
        for row in workspace.replay.rows("turns", [done.run_id])
    ]}))
"""


@pytest.fixture
def env(prefect_home: Path) -> Iterator[dict[str, str]]:
    """Variables of processes that know a Prefect server with the pool `cpus`, for which one process works."""
    server = start_server(prefect_home, full=True)
    try:
        own = {"PREFECT_API_URL": server.wait(), "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
        env = {**os.environ, **_environment(prefect_home), **own}
        for step in STEPS:
            subprocess.run([sys.executable, "-m", *step.split()], env=env, cwd=prefect_home, check=True, timeout=120)
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "cpus", "--limit", "2"]
        worker = Leashed(
            [*command, "--install-policy", "never"], log=prefect_home / "worker.log", env=env, cwd=prefect_home
        )
        yield env
        worker.stop()
    finally:
        server.stop()


def collected(home: Path, env: Mapping[str, str], *sets: str) -> dict[str, Any]:
    command = [sys.executable, "-c", COLLECT, str(home), *SETS, *sets]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_workers_of_a_pool_make_shards(prefect_home: Path, env: dict[str, str]) -> None:
    unknown = collected(prefect_home, env, "run.shards=2", "run.workers=pool", "run.pool=gpus")
    assert unknown["error"].startswith(
        f"run.pool: wanted a work pool with the deployment {FLOW}/shard, found none in 'gpus'"
    )
    dealt = collected(prefect_home, env, "run.shards=2", "run.workers=pool", "run.pool=cpus")
    alone = collected(prefect_home, env, "task.at_limit=terminated")
    assert dealt["rows"] == alone["rows"] and len(dealt["rows"]) > 8
    times = {name for name in dealt["metrics"] if name.endswith("_s")}
    assert all(alone["metrics"][name] == value for name, value in dealt["metrics"].items() if name not in times)


def test_a_pool_needs_a_server(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    from threading import Event

    from flows.shards import in_pool

    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    presets.load("tiny", ["run.workers=pool", "run.pool=cpus"])
    with pytest.raises(UsageError, match=r'run\.workers: "pool" needs the Prefect server that has the pool'):
        in_pool("cpus", home, Event()).__enter__()
