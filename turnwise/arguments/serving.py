"""The commands that serve: ui, serve; and those that set up: completion, doctor, init."""

from __future__ import annotations

from typing import Any

from turnwise.arguments.command import add_set, command


def add(commands: Any) -> None:
    """Add them to the commands."""
    ui = command(
        commands,
        "ui",
        "Open the MLflow UI and a Prefect server on loopback, until Ctrl-C.",
        "turnwise ui --port 5001",
        module="flows.orchestration.services",
    )
    ui.add_argument(
        "--port", type=int, default=5000, metavar="N", help="port of the MLflow UI; 0 takes a free one (default: 5000)"
    )
    what = "Serve presets with a schedule as Prefect deployments, until Ctrl-C."
    serve = command(
        commands,
        "serve",
        what,
        "turnwise serve --preset demo --preset my/nightly.toml",
        module="flows.orchestration.services",
    )
    which = "serve only these (repeatable; default: all); their keys `cron` and `each_run` say when they run and what each run is"
    serve.add_argument("--preset", action="append", metavar="PRESET", help=which)
    serve.add_argument(
        "--limit",
        type=int,
        default=1,
        metavar="N",
        help="how many runs go on at once on this machine; others wait (default: 1)",
    )
    what = 'Print the completion script of a shell. To use it now: eval "$(turnwise completion bash)".'
    completion = command(commands, "completion", what, "turnwise completion bash", module="turnwise.completion")
    completion.add_argument("shell", metavar="SHELL", help="bash, zsh or fish")
    what = "Say what is installed and what is missing: versions, stores, GPU, disk, ports. Exit status 1 if the demo cannot run."
    doctor = command(commands, "doctor", what, "turnwise doctor", module="turnwise.commands.doctor")
    which = "play ten episodes with this model instead, and ask each role ten times: which replies can be read?"
    doctor.add_argument("--model", metavar="FOLDER", help=which)
    doctor.add_argument("--task", metavar="PRESET", help="the task of --model (default: desk)")
    add_set(doctor)
    command(commands, "init", "Create the stores of a project in this folder. What is there stays.", "turnwise init")
