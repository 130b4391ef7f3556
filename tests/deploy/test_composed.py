"""A team's servers as deploy/compose.yaml starts them, but for the images: real MLflow, Prefect, a worker and PostgreSQL.

One set of servers for all tests of the file.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from composed import DEPLOY, Composed
from serving import OVER, until, write_presets
from team import PASSWORD, postgres, s3

from flows.orchestration.server import free_port

pytest.importorskip("flask_wtf", reason="make test-team installs it")
pytestmark = pytest.mark.slow

VALUES = {
    "POSTGRES_PASSWORD": PASSWORD,
    "S3_ACCESS_KEY": "nobody",
    "S3_SECRET_KEY": "nothing-of-anybody",
    "MLFLOW_ADMIN_PASSWORD": "first-of-the-admin",
    "MLFLOW_SECRET_KEY": "signs-the-forms",
    "PREFECT_AUTH": "team:what-it-knows",
}
ADMIN = f"admin:{VALUES['MLFLOW_ADMIN_PASSWORD']}"


@dataclass(frozen=True)
class Running:
    composed: Composed
    home: Path  # the folder of the worker

    def url(self, port: str) -> str:
        return f"http://127.0.0.1:{self.composed.ports[port]}"

    def turnwise(self, module: str, *words: str) -> str:
        """What a command prints that is run where the worker stands."""
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=self.home,
            env=self.composed.environment("worker"),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def asked(url: str, key: str = "", body: Any = None) -> Any:
    """The JSON answer; the number of the status where it is an error. key: USER:PASSWORD."""
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Basic {base64.b64encode(key.encode()).decode()}"} if key else {}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("composed")
    home = folder / "project"
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        server, bucket = stack.enter_context(postgres()), stack.enter_context(s3())
        ports = {"5432": server.port, "9000": int(bucket.rpartition(":")[2])}
        composed = Composed(VALUES, ports | {name: free_port() for name in ("5000", "4200", "8080")}, folder)
        patch.setenv("PATH", f"{server.programs}:/usr/bin:/bin")
        server.ask("create database turnwise")  # as the image does, by POSTGRES_DB
        for line in (DEPLOY / "databases.sql").read_text().splitlines():
            if not line.startswith("--"):
                server.ask(line)
        check = [*composed.check("postgres"), "--port", str(server.port)]
        assert subprocess.run(check, check=False).returncode == 0
        subprocess.run(composed.command("bucket"), env=composed.environment("bucket"), check=True)
        subprocess.run(composed.command("bucket"), env=composed.environment("bucket"), check=True)  # a second start
        home.mkdir()
        for name in ("data", "mlflow"):
            (home / name).mkdir()
        (home / "data" / "base").symlink_to(base)
        (home / "turnwise.toml").write_text(composed.here((DEPLOY / "project" / "turnwise.toml").read_text()))
        write_presets(home)
        for name in ("mlflow", "prefect", "worker"):
            stack.enter_context(composed.up(name, home))
        yield Running(composed, home)


def test_mlflow_lets_in_who_signs_in(running: Running) -> None:
    search = f"{running.url('5000')}/api/2.0/mlflow/experiments/search?max_results=5"
    assert asked(search) == 401
    assert asked(search, "admin:wrong-password") == 401
    assert asked(search, ADMIN)["experiments"]


def test_prefect_lets_in_who_has_the_key(running: Running) -> None:
    count = f"{running.url('4200')}/api/flows/count"
    assert asked(count, body={}) == 401
    assert asked(count, VALUES["PREFECT_AUTH"], {}) >= 0


def test_a_worker_runs_what_turnwise_deploy_wrote_and_mlflow_shows_it(running: Running) -> None:
    wrote = json.loads(running.turnwise("turnwise", "deploy", "--pool", "team", "--preset", "by hand.toml", "--json"))
    assert wrote["next"][0] == "prefect work-pool create team --type process"  # which the worker did
    running.turnwise("turnwise", "init")
    running.turnwise(*wrote["next"][1].split())
    api, key = f"{running.url('4200')}/api", VALUES["PREFECT_AUTH"]
    found = asked(f"{api}/deployments/name/turnwise/project.by-hand", key)
    assert (found["work_pool_name"], found["parameters"]["preset"]) == ("team", "by hand.toml")
    flow_run = asked(f"{api}/deployments/{found['id']}/create_flow_run", key, {"state": {"type": "SCHEDULED"}})["id"]
    assert until(lambda: asked(f"{api}/flow_runs/{flow_run}", key)["state"]["type"] in OVER, 240)
    said = asked(f"{api}/logs/filter", key, {"logs": {"flow_run_id": {"any_": [flow_run]}}})
    state = asked(f"{api}/flow_runs/{flow_run}", key)["state"]
    assert state["type"] == "COMPLETED", [line["message"] for line in said]

    url = f"{running.url('5000')}/api/2.0/mlflow"
    (pipeline,) = [
        one["experiment_id"]
        for one in asked(f"{url}/experiments/search?max_results=50", ADMIN)["experiments"]
        if one["name"] == "pipeline"
    ]
    (run,) = asked(f"{url}/runs/search", ADMIN, {"experiment_ids": [pipeline]})["runs"]
    assert run["info"]["status"] == "FINISHED"
    listed = asked(f"{url}/artifacts/list?run_id={run['info']['run_id']}", ADMIN)  # by the server's own keys
    assert "summary.json" in [file["path"] for file in listed["files"]]
    for log in running.composed.folder.glob("*.log"):
        assert not [value for value in VALUES.values() if len(value) > 6 and value in log.read_text()], log.name
