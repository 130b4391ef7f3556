"""`python tests/fake_turnwise.py ARGUMENT ...`: the command line over stages that learn nothing, in a process and with
streams of its own.

FAIL_AT: a stage whose engine is down in iteration 0.
"""

from __future__ import annotations

import os
import sys

import pytest
from fakes import fake_stages

from flows import cli, workspace
from stages.frame.types import EngineUnavailable


def main() -> int:
    # The fakes need no model and no prompts.
    workspace.model_hash = lambda run: "base"
    workspace.make_engine = lambda run: None  # type: ignore[assignment, return-value]
    with fake_stages(pytest.MonkeyPatch()) as stages:
        if stage := os.environ.get("FAIL_AT"):
            stages.raises[stage, 0] = EngineUnavailable("nobody answers")
        return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
