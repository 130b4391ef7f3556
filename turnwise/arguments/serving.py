"""The commands that serve: ui, serve, deploy; and those that set up: completion, doctor, init."""

from __future__ import annotations

from typing import Any

from turnwise.arguments.command import RUNS, add_set, command, flag, number

SERVICES = "flows.orchestration.services"
TEAM = "flows.orchestration.team"


def add(commands: Any) -> None:
    """Add them to the commands."""
    what = "Open the MLflow UI and a Prefect server on loopback, until Ctrl-C."
    ui = command(commands, "ui", what, "turnwise ui --port 5001", module=SERVICES)
    number(ui, "--port", "port of the MLflow UI; 0 takes a free one (default: 5000)", 5000)

    what = "Serve presets with a schedule as Prefect deployments, until Ctrl-C."
    serve = command(commands, "serve", what, "turnwise serve --preset demo --preset my/nightly.toml", module=SERVICES)
    which = "serve only these (repeatable; default: all); their keys `cron` and `each_run` say when they run and what each run is"
    serve.add_argument("--preset", action="append", metavar="PRESET", help=which)
    number(serve, "--limit", "how many runs go on at once on this machine; others wait (default: 1)", 1)

    what = "Write prefect.yaml: presets as deployments for a work pool, whose workers stand on several machines."
    example = "turnwise deploy --pool lab --preset my/nightly.toml"
    deploy = command(commands, "deploy", what, example, module=TEAM)
    deploy.add_argument("--pool", metavar="NAME", required=True, help="name of the work pool")
    which = "how its workers run a flow: as a process, a container or a job (default: process)"
    deploy.add_argument("--type", choices=("process", "docker", "kubernetes"), default="process", help=which)
    which = "deploy only these (repeatable; default: demo); a file has to be in the project folder"
    deploy.add_argument("--preset", action="append", metavar="PRESET", help=which)
    flag(deploy, "--force", "write over a file that was edited")

    what = 'Print the completion script of a shell. To use it now: eval "$(turnwise completion bash)".'
    completion = command(commands, "completion", what, "turnwise completion bash", module="turnwise.completion")
    completion.add_argument("shell", metavar="SHELL", help="bash, zsh or fish")

    what = "Say what is installed and what is missing: versions, stores, GPU, disk, ports. Exit status 1 if the demo cannot run."
    doctor = command(commands, "doctor", what, "turnwise doctor")
    which = "play ten episodes with this model instead, and ask each role ten times: which replies can be read?"
    doctor.add_argument("--model", metavar="FOLDER", help=which)
    doctor.add_argument("--task", metavar="PRESET", help="the task of --model (default: desk)")
    add_set(doctor)
    what = "Create the stores of a project in this folder. What is there stays."
    command(commands, "init", what, "turnwise init", module=RUNS)
