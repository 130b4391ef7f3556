"""What a stage run needs, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.frame.contract import Context, Outputs, Progress, Stage
from stages.frame.types import Engine
from stages.store.replay import Replay
from stages.store.tracking import Tracking

Bar = Callable[[str, int], Progress]


@dataclass(frozen=True)
class Workspace:
    """Where runs live and what they need. A RunConfig is typed Any here: it belongs to flows, which stand above."""

    home: Path  # holds data/ and mlflow/
    tracking: Tracking
    replay: Replay
    engine: Callable[[Any], Engine]  # from a RunConfig; cached, and loads only when called
    prompt_hashes: Callable[[Any], Mapping[str, str]]  # role -> hash of its prompt file
    model_hash: Callable[[Any], str]  # hash of the base model, without loading it
    # does a stage's work: here, or in several processes
    work: Callable[[Stage, Context], Outputs] = lambda stage, context: stage.run(context)
    # removes the shards that were made for a fingerprint
    forget: Callable[[str], None] = lambda fingerprint: None

    def workdir(self, run_id: str) -> Path:
        """Scratch folder of a running stage."""
        return self.home / "data" / "tmp" / run_id

    def checkpoints(self, fingerprint: str) -> Path:
        """Where a stage that was killed left how far it had come."""
        return self.home / "data" / "checkpoints" / fingerprint

    def lock(self, fingerprint: str) -> Path:
        """What a process holds while it does this work, its checkpoints being its own."""
        return self.home / "data" / "locks" / f"{fingerprint}.lock"


@dataclass(frozen=True)
class StageRun:
    """What came of a stage. metrics, seconds: of the run that did the work, so a reused run gives what it gave then."""

    stage: str
    run_id: str
    iteration: int
    metrics: Mapping[str, float]
    reused: bool
    seconds: float  # of the stage's own function
    cpu_s: float = 0.0  # processor time of it, all threads: comparable between a busy machine and an idle one


class _Silent:
    def advance(self, n: int = 1) -> None:
        return None


def silent(what: str, total: int) -> Progress:
    """A bar that shows nothing."""
    return _Silent()
