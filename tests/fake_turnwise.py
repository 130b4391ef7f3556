"""`python tests/fake_turnwise.py ARGUMENT ...`: the command line over stages that learn nothing, in a process and with
streams of its own.

FAIL_AT: a stage whose engine is down in iteration 0.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import fake_stages

from flows import workspace
from flows.evidence.study import children
from stages.frame.types import EngineUnavailable
from turnwise import cli

TURNWISE = shlex.join([sys.executable, __file__])


def shell(command: str, folder: Path, **environment: str) -> tuple[int, str, str]:
    """Exit status of the last command of the line that failed, stdout, stderr."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def main() -> int:
    # The fakes need no model and no prompts.
    workspace.model_hash = lambda run: "base"
    workspace.make_engine = lambda run: None  # type: ignore[assignment, return-value]
    children.TURNWISE = (sys.executable, __file__)  # a study's runs are of the fakes, too
    with fake_stages(pytest.MonkeyPatch()) as stages:
        if stage := os.environ.get("FAIL_AT"):
            stages.raises[stage, 0] = EngineUnavailable("nobody answers")
        return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
