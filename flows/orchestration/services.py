"""Keeps servers up until Ctrl-C: MLflow's page and Prefect (`turnwise ui`), or Prefect and the process that runs
deployments (`turnwise serve`).

They listen on 127.0.0.1 only. They end with this process, however it ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from flows import parts, presets
from flows.book import EXPERIMENT
from flows.leash import Leashed
from flows.locks import lock
from flows.orchestration.server import Server, free_port, healthy, is_free, keep_server, stand_in, use_server
from flows.report import emit
from flows.workspace import find_home, open_workspace, project_name, safe_name
from stages.frame.types import TurnwiseError, UsageError

POLL_S = 1.0
LOOK_S = 5.0  # between two looks at a server that another command keeps
RESTART_S = 5.0  # between the end of a service and its next start, so that one that cannot start does not spin
START_TIMEOUT_S = 180.0
LAST_PORT = 65535


def ui(args: Namespace) -> int:
    """turnwise ui"""
    home = find_home(args.home, to_write=True)
    port = _page_port(args.port)
    workspace = open_workspace(home)
    experiment = workspace.tracking.experiment_id(EXPERIMENT)

    def start_page() -> Leashed:
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", workspace.tracking.uri]
        command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
        # Its job runners (seven processes, for scoring traces) have nothing to do here.
        env = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        return Leashed(command, log=home / "mlflow" / "page.log", env=env)

    page = f"http://127.0.0.1:{port}"
    with keep_server(home) as server:
        # Without the last part MLflow opens in its GenAI mode, which hides the charts and the registered models.
        runs = f"{page}/#/experiments/{experiment}/runs?compareRunsMode=CHART&workflowType=machine_learning"
        (home / "mlflow" / "page.json").write_text(json.dumps({"port": port}), encoding="utf-8")  # for links to it
        links = {"runs": runs, "prefect": server.url.removesuffix("/api")}
        _supervise(server, home, start_page, until=lambda: healthy(page, b"OK"), ready=lambda: _tell(args, links))
    return 0


def _page_port(wanted: int) -> int:
    """The port for MLflow's page; any free one for 0."""
    if not 0 <= wanted <= LAST_PORT:
        raise UsageError(
            f"ui: --port {wanted} is no port. Give a number from 1 to {LAST_PORT}, or 0 for any free port."
        )
    if not is_free(wanted):
        raise UsageError(
            f"ui: --port {wanted} is taken or not open to this user. Name another one, or use any free one: turnwise ui --port 0"
        )
    return wanted or free_port()


def serve(args: Namespace) -> int:
    """turnwise serve"""
    home = find_home(args.home, to_write=True)
    if args.limit < 1:
        raise UsageError(f"serve: --limit: wanted at least 1 run at once, found {args.limit}.")
    chosen = by_name(args.preset or [*presets.names(), *parts.SHORT], "serve")
    configs = {name: presets.load(preset) for name, preset in chosen.items()}
    workspace, project = open_workspace(home), project_name(home)
    workspace.tracking.initialise()
    folder = home / "data" / "prefect"
    folder.mkdir(parents=True, exist_ok=True)
    if holder := lock(folder / "serve.lock", f"process {os.getpid()}"):
        raise UsageError(f"serve: {home} is served already, by {holder}. Stop that one first.")
    with keep_server(home) as server:
        use_server(server.url, home)
        from flows.orchestration import flow as orchestrate

        def start_worker() -> Leashed:
            orchestrate.settle(project)
            for name, config in configs.items():
                if config.cron and config.catch_up:
                    orchestrate.catch_up(f"{orchestrate.FLOW_NAME}/{project}.{name}", config.cron, config.timezone)
            # Not `-m`: the flows would then belong to `__main__`, where a run in a process of its own does not find
            # them.
            code = "import json, sys; from flows.orchestration.deployments import work; work(**json.loads(sys.argv[1]))"
            job = json.dumps({"chosen": chosen, "project": project, "limit": args.limit})
            return Leashed([sys.executable, "-c", code, job], log=folder / "deployments.log", env=os.environ, cwd=home)

        def registered() -> bool:
            from flows.orchestration.deployments import READY

            return READY in (folder / "deployments.log").read_text(errors="replace")

        links = {"prefect": server.url.removesuffix("/api")}
        for name, one in configs.items():
            links[f"turnwise/{project}.{name}"] = f"{one.cron} {one.timezone}" if one.cron else "by hand"
        try:
            _supervise(server, home, start_worker, until=registered, ready=lambda: _tell(args, links))
        finally:
            workspace.tracking.reap()  # runs that needed longer to end than they were given
            if healthy(server.url):  # else the next `serve` does it
                orchestrate.retire(project)
    return 0


def by_name(given: Sequence[str], command: str) -> dict[str, str]:
    """Name of a deployment -> its preset. A file has its absolute path, because runs work elsewhere. Raises UsageError
    where a preset cannot be served.
    """
    found: dict[str, str] = {}
    for one in dict.fromkeys(given):
        called = one if one in parts.SHORT else presets.name_of(one)
        name = safe_name(called)
        taken = found | {"rerun": "the deployment that reruns a stage"}
        if name in taken:
            raise UsageError(
                f"{command}: --preset {one}: the deployment name {name!r} already belongs to {taken[name]}. Rename the file."
            )
        if not name:
            raise UsageError(f"{command}: --preset {one}: no deployment can have that name. Rename the file.")
        found[name] = str(Path(one).resolve()) if one.endswith(".toml") else called
    return found


def _supervise(
    server: Server, home: Path, start: Callable[[], Leashed], *, until: Callable[[], bool], ready: Callable[[], None]
) -> None:
    """Keep one service running beside the server until Ctrl-C. Restart it when it ends. Restart the server when the
    command that kept it for both ends.

    Raises TurnwiseError where the service ends before it was ever ready, or where the server is gone for good.
    """
    service = start()
    told = False
    try:
        looked = time.monotonic()
        deadline = looked + START_TIMEOUT_S
        while True:
            if not service.running():
                if not told:
                    raise TurnwiseError(f"a service ended while it started; it said: {service.tail()}")
                print(f"A service ended ({service.tail(1)}); starting it again.", file=sys.stderr)
                time.sleep(RESTART_S)
                service = start()
            if not told and until():
                ready()
                told = True
            if not told and time.monotonic() > deadline:
                raise TurnwiseError(
                    f"a service did not answer within {START_TIMEOUT_S:.0f} s; it said: {service.tail()}"
                )
            if server.owned is not None and not server.owned.running():
                raise TurnwiseError(
                    f"the Prefect server ended; it said: {server.owned.tail()}. Start the command again."
                )
            if server.owned is None and time.monotonic() > looked + LOOK_S:
                if not healthy(server.url) and stand_in(server, home):
                    print("The command that kept the Prefect server ended; it is started again here.", file=sys.stderr)
                looked = time.monotonic()
            time.sleep(POLL_S if told else 0.2)
    except KeyboardInterrupt:
        return  # the way to end it
    finally:
        service.stop()


def _tell(args: Namespace, links: dict[str, str]) -> None:
    if args.json:
        emit(links)
    else:
        width = max(map(len, links))
        print("\n".join(f"{name:<{width}}  {link}" for name, link in links.items()))
        print("Ctrl-C stops what was started here.", file=sys.stderr)
    sys.stdout.flush()
