"""The commands that serve: ui, serve; and those that set up: completion, doctor, init."""

from __future__ import annotations

from typing import Any

from turnwise.arguments.command import command


def add(commands: Any) -> None:
    """Add them to the commands."""
    ui = command(
        commands,
        "ui",
        "Serve MLflow's page and a Prefect server on loopback until Ctrl-C.",
        "turnwise ui --port 5001",
        module="flows.orchestration.services",
    )
    ui.add_argument(
        "--port", type=int, default=5000, metavar="N", help="port of MLflow's page; 0 for any free one (default: 5000)"
    )
    what = "Serve the presets as Prefect deployments, with their schedules, until Ctrl-C."
    serve = command(
        commands,
        "serve",
        what,
        "turnwise serve --preset demo --preset my/nightly.toml",
        module="flows.orchestration.services",
    )
    which = "only these (repeatable; default: all); their keys `cron` and `each_run` say when they run, and whether each run is new_seed, further or force"
    serve.add_argument("--preset", action="append", metavar="PRESET", help=which)
    serve.add_argument(
        "--limit", type=int, default=1, metavar="N", help="runs at once on this machine; the others wait (default: 1)"
    )
    what = 'Print what makes a shell complete commands, presets, stages and runs; for this shell: eval "$(turnwise completion bash)".'
    completion = command(commands, "completion", what, "turnwise completion bash", module="turnwise.completion")
    completion.add_argument("shell", metavar="SHELL", help="bash, zsh or fish")
    what = "Say what is installed and what is there: stores, GPU, disk, ports, and what each preset lacks; exit status 1 where the demo cannot run."
    command(commands, "doctor", what, "turnwise doctor", module="turnwise.commands.doctor")
    command(commands, "init", "Create the stores of this folder; what is there stays.", "turnwise init")
