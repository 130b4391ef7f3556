"""What a stage's function may see: its config, and only its inputs from the stores."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.frame.contract import Context, Stage
from stages.frame.types import Engine, Row
from stages.store.workspace import Bar, Workspace


def stage_seed(seed: int, stage: str, iteration: int) -> int:
    """Seed of a stage's Context, 32 bits: the same everywhere, unrelated between stages and iterations."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{stage}/{iteration}".encode()).digest()[:4], "big")


@dataclass(frozen=True)
class Inputs:
    """Replay and artifacts as one stage may see them: of its declared inputs, which are in its fingerprint."""

    stage: str
    run_ids: frozenset[str]
    workspace: Workspace

    def read(
        self,
        table: str,
        run_ids: Sequence[str],
        columns: Sequence[str],
        *,
        by: Sequence[str] = (),
        among: Collection[tuple[Any, ...]] = (),
    ) -> list[Row]:
        self._check(run_ids)
        return self.workspace.replay.read(table, run_ids, columns, by=by, among=among)

    def artifact(self, run_id: str, path: str) -> Path:
        self._check([run_id])
        return self.workspace.tracking.artifact(run_id, path)

    def _check(self, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            if run_id not in self.run_ids:
                raise ValueError(
                    f"{self.stage} reads run {run_id}, which is not among its inputs and so not in its fingerprint"
                )


def context_of(
    stage: Stage, *, run: Any, inputs: Mapping[str, Sequence[str]], iteration: int, workspace: Workspace, engine: Engine, workdir: Path,
    checkpoints: Path, progress: Bar,
) -> Context:  # fmt: skip
    """What the stage's function sees: of the stores its inputs alone."""
    readable = Inputs(stage.name, frozenset(each for runs in inputs.values() for each in runs), workspace)
    seed = stage_seed(run.seed, stage.name, iteration)
    return Context(
        config=getattr(run, stage.name), run=run, iteration=iteration, seed=seed, inputs=inputs, replay=readable, engine=engine,
        artifact=readable.artifact, workdir=workdir, checkpoints=checkpoints, progress=progress,
    )  # fmt: skip
