"""Writes what Prefect needs to run a project's deployments in a work pool, on machines that share a store.

    turnwise deploy --pool lab --preset my/nightly.toml
    prefect work-pool create lab --type process
    prefect --no-prompt deploy --all
    prefect worker start --pool lab

The team edits `prefect.yaml`. No secret is in it: a process has the environment of its worker. For the other types
`work-pool.json` refers to them: Docker's to variables of the worker, that of Kubernetes to the Secret `turnwise`.
"""

from __future__ import annotations

import hashlib
import json
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from prefect.deployments.runner import RunnerDeployment
from prefect.types.entrypoint import EntrypointType

from flows.orchestration.deployments import deployments
from flows.orchestration.services import by_name
from flows.report import answer
from flows.shard import shard
from flows.shards import DEPLOYMENT
from flows.workspace import find_home, project_name
from stages.frame.types import UsageError
from stages.store.shared import FILE as SHARED
from stages.store.shared import shared_store

FILE, POOL_FILE, IMAGE = "prefect.yaml", "work-pool.json", "turnwise:team"
SECRET = "turnwise"  # of Kubernetes
KEEP_JOB_S = 3600  # so that a failed one can be looked at
SECRETS = ("PGPASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "MLFLOW_S3_ENDPOINT_URL", "OPENAI_API_KEY", "TURNWISE_ALERT_URL")  # fmt: skip
"""What a container may need of its worker's environment. A variable that the worker lacks is empty there."""
HEAD = """\
# turnwise deploy wrote this; sha256 of what follows: {digest}
"""
SAYS = """\
# Edit it: turnwise then leaves it alone, unless --force is given. Give no secret here, and none as a {{{{ $NAME }}}} either:
# `prefect deploy` would store its value on the server. {secrets}
"""
WHERE = {
    "process": "A run has the environment and the folder of its worker.",
    "docker": f"Containers get them from the worker's environment, by {POOL_FILE}.",
    "kubernetes": f"Jobs get them from the Secret {SECRET}, by {POOL_FILE}.",
}


def deploy(args: Namespace) -> int:
    """turnwise deploy

    Raises UsageError, and then writes nothing.
    """
    home = find_home(args.home, to_write=True)
    if not re.fullmatch(r"[\w.-]+", args.pool, re.ASCII):
        raise UsageError(f"deploy: --pool: wanted a name of letters, digits, '.', '_' and '-', found {args.pool!r}.")
    shared = shared_store(home)
    if shared is None and args.type != "process":
        why = f"a {args.type} job loses what it writes, so its runs belong into a shared store"
        raise UsageError(f"deploy: --type {args.type}: {why}, but {home / SHARED} is not there. Write one first.")
    chosen = by_name(args.preset or ["demo"], "deploy")
    made = deployments(chosen, project_name(home))
    if args.type == "process":  # a shard works in the very folder of the run that wants it, which no container has
        made.append(RunnerDeployment.from_flow(shard, DEPLOYMENT, entrypoint_type=EntrypointType.MODULE_PATH))
    text = _text(made, args, home)
    files = {FILE: HEAD.format(digest=_digest(text)) + text}
    if args.type != "process":
        files[POOL_FILE] = json.dumps(pool_template(args.type), indent=2) + "\n"
    for name, content in files.items():
        if not args.force and is_edited(home / name, content):
            raise UsageError(f"deploy: {home / name} was edited. Move it away, or write over it with --force.")
    for name, content in files.items():
        (home / name).write_text(content, encoding="utf-8")
    next_steps = steps(args.pool, args.type)
    value = {"files": [str(home / name) for name in files], "next": next_steps}
    alone = [] if shared else [f"There is no {SHARED}: each machine keeps its runs to itself."]
    return answer(args, value, [*value["files"], *alone, f"Next, in {home}:", *(f"  {one}" for one in next_steps)])


def steps(pool: str, kind: str) -> list[str]:
    """The commands that register the deployments, and that start a worker."""
    template = f" --base-job-template {POOL_FILE}" if kind != "process" else ""
    return [
        f"prefect work-pool create {pool} --type {kind}{template}",
        "prefect --no-prompt deploy --all",
        f"prefect worker start --pool {pool}",
    ]


def is_edited(file: Path, content: str) -> bool:
    """Whether somebody else than this command wrote what is in the file. content: what it would write now."""
    if not file.exists():
        return False
    head, _, rest = file.read_text(encoding="utf-8", errors="replace").partition("\n")
    return f"{head}\n" != HEAD.format(digest=_digest(rest)) and f"{head}\n{rest}" != content


def job_variables(kind: str) -> dict[str, Any]:
    """What a work pool of this type needs to know. Nothing is mounted: the store is elsewhere."""
    if kind == "process":
        return {"working_dir": "."}
    more: dict[str, Any] = {"networks": [], "volumes": []} if kind == "docker" else {"namespace": "default"}
    return {"image": IMAGE, "image_pull_policy": "IfNotPresent", **more}


def pool_template(kind: str) -> dict[str, Any]:
    """The base job template of a pool whose runs are containers ("docker") or jobs ("kubernetes").

    A worker of Docker replaces {{ $NAME }} in the default of `env` by its own variable when it starts a run. The same in
    prefect.yaml would be replaced by `prefect deploy`, and stored.
    """
    text, table = {"type": "string"}, {"type": "object", "default": {}}
    names = {**dict.fromkeys(("command", "name", "image", "image_pull_policy"), text), "labels": table, "env": table}
    if kind == "docker":
        names |= {name: {"type": "array", "items": text, "default": []} for name in ("networks", "volumes")}
        names["env"] = table | {"default": {name: f"{{{{ ${name} }}}}" for name in SECRETS}}
        configuration: dict[str, Any] = {name: f"{{{{ {name} }}}}" for name in names} | {"auto_remove": True}
    else:
        names["namespace"] = text
        configuration = {name: f"{{{{ {name} }}}}" for name in ("command", "name", "labels", "env", "namespace")}
        configuration["job_manifest"] = _manifest()
    return {"job_configuration": configuration, "variables": {"type": "object", "properties": names}}


def _manifest() -> dict[str, Any]:
    """A job of Kubernetes, with the variables of a Secret."""
    container = {
        "name": "prefect-job",
        "image": "{{ image }}",
        "imagePullPolicy": "{{ image_pull_policy }}",
        "args": "{{ command }}",
        "env": "{{ env }}",
        "envFrom": [{"secretRef": {"name": SECRET}}],
    }
    job = {"parallelism": 1, "completions": 1, "restartPolicy": "Never", "containers": [container]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"labels": "{{ labels }}", "namespace": "{{ namespace }}", "generateName": "{{ name }}-"},
        "spec": {"backoffLimit": 0, "ttlSecondsAfterFinished": KEEP_JOB_S, "template": {"spec": job}},
    }


def _text(made: Iterable[RunnerDeployment], args: Namespace, home: Path) -> str:
    # One object for all of them: YAML then names it once, and one edit changes all.
    pool = {"name": args.pool, "job_variables": job_variables(args.type)}
    here = {"prefect.deployments.steps.set_working_directory": {"directory": "."}}  # where the worker put the run
    written = [_entry(one, pool, home) for one in made]
    value = {"pull": [here], "definitions": {"work_pool": pool}, "deployments": written}
    text = str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=120))
    return SAYS.format(secrets=WHERE[args.type]) + text


def _entry(made: RunnerDeployment, pool: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """One deployment as prefect.yaml has it."""
    entry: dict[str, Any] = {"name": made.name, "entrypoint": made.entrypoint}
    if made.parameters:
        entry["parameters"] = dict(made.parameters) | {"preset": _from_home(made.parameters["preset"], home)}
    if made.schedules:
        entry["schedules"] = [
            {"cron": one.schedule.cron, "timezone": one.schedule.timezone}  # type: ignore[union-attr]
            for one in made.schedules
        ]
    if made.concurrency_options:
        strategy = made.concurrency_options.collision_strategy
        entry["concurrency_limit"] = {"limit": made.concurrency_limit, "collision_strategy": str(strategy.value)}
    # Not the tag of this machine: `turnwise serve` ends what has it.
    return entry | {"tags": [tag for tag in made.tags or () if not tag.startswith("host=")], "work_pool": pool}


def _from_home(preset: str, home: Path) -> str:
    """A file's path from the project folder, because each worker has a project folder of its own."""
    if not preset.endswith(".toml"):
        return preset
    try:
        return str(Path(preset).relative_to(home.resolve()))
    except ValueError:
        where = f"wanted a file in the project folder {home}, where workers look for it, found {preset}"
        raise UsageError(f"deploy: --preset: {where}. Move it there.") from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    def generate_anchor(self, node: yaml.Node) -> str:
        """The only thing that is named twice is the pool."""
        return "pool"
