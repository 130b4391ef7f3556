"""`turnwise deploy`: the file that it writes, what Prefect makes of it, and a worker that runs from it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import yaml  # type: ignore[import-untyped]
from commands import make_home
from serving import ROOT, Api, prefect_server, until, write_presets

from flows.orchestration.server import free_port
from flows.shards import FLOW
from stages.store.tracking import Tracking
from turnwise import cli

SHARED = '[tracking]\nuri = "postgresql://turnwise@db.lab/turnwise"\nartifacts = "s3://runs/desk"\n'
SECRET = "s3cret-of-the-environment"


@pytest.fixture
def project(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(home)
    (home / "my").mkdir()
    (home / "my" / "nightly.toml").write_text(
        "extends = 'tiny'\ncron = '0 3 * * *'\ntimezone = 'Europe/Berlin'\noverlap = 'queue'\neach_run = 'further'\n"
    )
    return home


def written(project: Path, *words: str) -> dict[str, Any]:
    assert cli.main(["deploy", "--pool", "lab", *words]) == 0
    return dict(yaml.safe_load((project / "prefect.yaml").read_text()))


def test_the_file_has_what_serve_would_register_but_for_this_machine(project: Path) -> None:
    nightly, rerun, shard = written(project, "--preset", "my/nightly.toml")["deployments"]
    name = project.name
    assert nightly == {
        "name": f"{name}.nightly",
        "entrypoint": "flows.orchestration.deployments.pipeline",
        "parameters": {"preset": "my/nightly.toml", "sets": [], "each_run": "further"},
        "schedules": [{"cron": "0 3 * * *", "timezone": "Europe/Berlin"}],
        "concurrency_limit": {"limit": 1, "collision_strategy": "ENQUEUE"},
        "tags": [f"project={name}"],
        "work_pool": {"name": "lab", "job_variables": {"working_dir": "."}},
    }
    assert (rerun["name"], rerun["entrypoint"]) == (f"{name}.rerun", "flows.orchestration.deployments.rerun")
    # As `run.workers=pool` looks for it; containers lack the folder of the run that wants the shard.
    assert (f"{FLOW}/{shard['name']}", shard["entrypoint"]) == ("turnwise-shard/shard", "flows.shard.shard")
    assert shard["work_pool"]["name"] == "lab"


@pytest.mark.parametrize("kind", ["process", "docker", "kubernetes"])
def test_prefects_own_loader_reads_the_file_whole(
    project: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from prefect.cli.deploy._config import _load_deploy_configs_and_actions
    from rich.console import Console

    (project / "turnwise.toml").write_text(SHARED)
    monkeypatch.setenv("PGPASSWORD", SECRET)
    wanted = written(project, "--type", kind)["deployments"]
    assert f"prefect work-pool create lab --type {kind}" in capsys.readouterr().out
    found, actions = _load_deploy_configs_and_actions(project / "prefect.yaml", console=Console())
    assert [(one["name"], one["work_pool"]) for one in found] == [(one["name"], one["work_pool"]) for one in wanted]
    assert actions["pull"] == [{"prefect.deployments.steps.set_working_directory": {"directory": "."}}]
    assert SECRET not in "".join(file.read_text() for file in project.glob("*.*") if file.is_file())


def test_containers_get_secrets_by_the_name_of_the_workers_variable(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.workers.base import BaseJobConfiguration

    (project / "turnwise.toml").write_text(SHARED)
    pool = written(project, "--type", "docker")["definitions"]["work_pool"]
    template = json.loads((project / "work-pool.json").read_text())
    monkeypatch.setenv("PGPASSWORD", SECRET)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    made = BaseJobConfiguration.from_template_and_values(template, pool["job_variables"], client=cast(Any, object()))
    how: Any = asyncio.run(made)
    assert (how.env["PGPASSWORD"], how.env["OPENAI_API_KEY"]) == (SECRET, "")


def test_jobs_of_kubernetes_get_them_from_its_secret(project: Path) -> None:
    (project / "turnwise.toml").write_text(SHARED)
    written(project, "--type", "kubernetes")
    job = json.loads((project / "work-pool.json").read_text())["job_configuration"]["job_manifest"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "turnwise"}}]


def test_an_edited_file_is_written_over_with_force_alone(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "turnwise.toml").write_text(SHARED)
    written(project)
    file, template = project / "prefect.yaml", project / "work-pool.json"
    assert len(written(project, "--preset", "tiny", "--preset", "demo", "--type", "docker")["deployments"]) == 3
    for edited in (file, template):
        edited.write_text(edited.read_text().replace("{", "{ ", 1) + "\n")
        before = file.read_text(), template.read_text()
        assert cli.main(["deploy", "--pool", "other", "--type", "docker"]) == 2
        assert f"{edited} was edited. Move it away, or write over it with --force." in capsys.readouterr().err
        assert (file.read_text(), template.read_text()) == before
        assert written(project, "--force", "--type", "docker")["definitions"]["work_pool"]["name"] == "lab"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--pool", "a b"], "--pool: wanted a name of letters, digits, '.', '_' and '-', found 'a b'"),
        (["--pool", "lab", "--type", "docker"], "so its runs belong into a shared store, but"),
        (["--pool", "lab", "--preset", "my/nothing.toml"], "There is no preset file my/nothing.toml"),
        (["--pool", "lab", "--preset", "my/rerun.toml"], "deploy: --preset my/rerun.toml: the deployment name 'rerun'"),
        (["--pool", "lab", "--preset", "../outside.toml"], "wanted a file in the project folder"),
    ],
)
def test_what_cannot_be_deployed_is_refused_and_nothing_is_written(
    project: Path, arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (project / "my" / "rerun.toml", project.parent / "outside.toml"):
        file.write_text("extends = 'tiny'\n")
    assert cli.main(["deploy", *arguments]) == 2
    assert why in capsys.readouterr().err
    assert not (project / "prefect.yaml").exists()


@contextmanager
def worker(home: Path, environment: Mapping[str, str]) -> Iterator[None]:
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "lab", "--type", "process"]
    with (
        (home / "worker.log").open("wb") as log,
        subprocess.Popen(command, cwd=home, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, empty_store: Path, base: Path) -> Iterator[tuple[Path, Api]]:
    home = make_home(tmp_path_factory.mktemp("team") / "desk", empty_store, base)
    write_presets(home)
    with prefect_server(home, free_port()) as api:
        yield home, api


def run(home: Path, api: Api, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=home, env=environment(home, api), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(home: Path, api: Api) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    told = {"PREFECT_API_URL": api.url, "PREFECT_HOME": str(home / "prefect"), "PREFECT_WORKER_QUERY_SECONDS": "2"}
    return own | told | {"PYTHONPATH": str(ROOT), "DO_NOT_TRACK": "1", "PGPASSWORD": SECRET}


@pytest.mark.slow
def test_a_worker_runs_a_pipeline_and_one_that_is_cancelled_ends(served: tuple[Path, Api]) -> None:
    home, api = served
    presets = [word for name in ("by hand", "endless") for word in ("--preset", f"{name}.toml")]
    wrote = json.loads(run(home, api, "turnwise", "deploy", "--pool", "lab", "--json", *presets))
    for step in wrote["next"][:2]:
        run(home, api, *step.split())
    assert SECRET not in json.dumps([api("/deployments/filter", {}), api("/work_pools/filter", {})])
    with worker(home, environment(home, api)):
        flow_run = api.start("turnwise/desk.by-hand")
        endless = api.start("turnwise/desk.endless")
        assert api.reaches(flow_run)["state"]["type"] == "COMPLETED", api.said(flow_run)
        assert api.reaches(endless, "RUNNING")["state"]["type"] == "RUNNING", api.said(endless)
        tracking = Tracking(home / "mlflow")
        assert until(lambda: len(tracking.runs("pipeline", 10)) == 2, 120)
        api.cancel(endless)
        assert api.reaches(endless)["state"]["type"] == "CANCELLED"
    run(home, api, "turnwise", "runs")  # a busy machine's run may have needed longer to end than Prefect gives it
    assert {one.status for one in tracking.runs("pipeline", 10)} == {"FINISHED", "KILLED"}, api.said(endless)
    assert api.slots_taken("turnwise/desk.endless") == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_prefects_server_takes_the_deployments_of_containers_and_no_secret(served: tuple[Path, Api], kind: str) -> None:
    home, api = served
    (home / "turnwise.toml").write_text(SHARED)
    try:
        words = ["turnwise", "deploy", "--pool", kind, "--type", kind, "--preset", "nightly.toml", "--json", "--force"]
        steps = json.loads(run(home, api, *words))["next"]
    finally:
        (home / "turnwise.toml").unlink()
    for step in steps[:2]:
        run(home, api, *step.split())
    found = api("/deployments/name/turnwise/desk.nightly")
    assert (found["work_pool_name"], found["job_variables"]["image"]) == (kind, "turnwise:team")
    assert [one["schedule"]["cron"] for one in found["schedules"]] == ["* * * * *"]
    pools = api("/work_pools/filter", {})
    assert SECRET not in json.dumps([found, pools])
    (pool,) = [one for one in pools if one["name"] == kind]
    asks = {"docker": '"PGPASSWORD": "{{ $PGPASSWORD }}"', "kubernetes": '"secretRef": {"name": "turnwise"}'}[kind]
    assert asks in json.dumps(pool["base_job_template"])
