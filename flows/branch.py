"""A pipeline run that leaves another one at a stage of an iteration. It shows what a changed stage is worth.

    turnwise rerun critic --of RUN --set critic.lr=1e-4 --through evaluate
    turnwise rerun critic --of RUN --set critic.lr=1e-4 --iteration 0 --downstream

Earlier stage runs are the old run's own. They are not made again, even if the code has changed. From there on stages
run as in any pipeline, or are reused by their fingerprint. A change holds for the named stage in every iteration from
there on. Each other stage keeps its config of the old run.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from flows import presets, rerun
from flows.book import EXPERIMENT
from flows.pipeline import LAST, Call, Step
from flows.presets import RunConfig
from flows.registry import METHODS
from flows.telling import Asked, Changes, Summary, changes_told
from stages.frame.contract import Stage
from stages.frame.types import UsageError
from stages.store.execute import stored_run
from stages.store.runs import differences, without_password
from stages.store.workspace import StageRun, Workspace

FIGURES = ("win_rate", "win_low", "win_high")


@dataclass(frozen=True)
class Branch:
    """Where a pipeline run leaves an old one, and what differs from there on."""

    of: str  # the old pipeline run
    stage: str
    iteration: int
    through: str  # the last stage of the last iteration
    changed: RunConfig  # what the named stage runs with
    old: RunConfig  # of the old pipeline run
    run: RunConfig  # of the new pipeline run
    rows: Sequence[Mapping[str, str]]  # the old run's stage runs of the base model and of each iteration
    base: str  # the old run's evaluation of the base model on the test split
    changes: Changes  # of the named stage's config

    def asked(self, sets: Sequence[str]) -> Asked:
        """How the new run was asked for, and its links to the old one."""
        extent = ["--downstream"] if "downstream" in self._extent else ["--through", self.through]
        start = ["turnwise", "rerun", self.stage, "--of", self.of[:8], "--iteration", str(self.iteration)]
        command = shlex.join([*start, *extent, *(part for item in sets for part in ("--set", item))])
        leaves = f"rerun {self.stage} {self.iteration} of {self.of[:8]}"
        tags = {
            "rerun_of": self.of,
            "rerun_from": f"{self.stage} {self.iteration}",
            "changed": changes_told(self.changes),
        }
        return Asked(without_password(command), self.changes, leaves, tags)

    @property
    def parameters(self) -> dict[str, Any]:
        """Its command-line arguments, without --set."""
        return {"stage": self.stage, "of": self.of, "iteration": self.iteration, **self._extent}

    @property
    def _extent(self) -> dict[str, Any]:
        return {"downstream": True} if self.run.iterations > self.iteration + 1 else {"through": self.through}

    def step(self, inner: Step, workspace: Workspace) -> Step:
        """A step that returns the old run's stage runs before the branch. `inner` runs the rest with their configs."""
        kept, config = self._kept(), cache(lambda run_id: rerun.stored_config(run_id, workspace))

        def step(call: Call) -> StageRun:
            if run_id := kept.get((call.part, call.iteration, call.stage.name)):
                return stored_run(call.stage, run_id, call.iteration, workspace.tracking)
            named = call.stage.name == self.stage and call.iteration >= self.iteration
            run = self.changed if named else config(old) if (old := self._newest(call)) else self.old
            return inner(replace(call, run=presets.change(run, LAST, split="test") if call.part == "final" else run))

        return step

    def _kept(self) -> dict[tuple[str, int, str], str]:
        """(part, iteration, stage) -> the old run's stage run, for all before the branch."""
        names = (*METHODS[self.run.method], LAST)
        before = {
            ("iteration", i, name): row[name]
            for i, row in enumerate(self.rows[1:])
            for name in names
            if name in row and (i, names.index(name)) < (self.iteration, names.index(self.stage))
        }
        return {("base", -1, LAST): self.base, ("start", -1, LAST): self.rows[0][LAST], **before}

    def _newest(self, call: Call) -> str | None:
        """The old run's run of this stage in this iteration, or in the newest one before that has it."""
        return next(
            (row[call.stage.name] for row in reversed(self.rows[: call.iteration + 2]) if call.stage.name in row), None
        )


def prepare(
    stage: str,
    of: str,
    workspace: Workspace,
    *,
    sets: Sequence[str] = (),
    iteration: int | None = None,
    through: str | None = None,
) -> Branch:
    """Find the stored runs and read back their configs.

    of: a pipeline run, a stage run of one, or a rerun of that, whose changes are taken over. A pipeline run is left at
    `iteration`, or at the last one that has the stage. through: the last stage to run, in that iteration. None runs all
    that follows, later iterations included. Raises UsageError as `rerun.prepare` does, or where `through` does not
    follow.
    """
    again = rerun.prepare(stage, of, workspace, sets=sets, iteration=iteration)
    at = again.call.iteration
    pipeline, origin = _pipeline_of(of, again.old, workspace)
    summary = rerun.stored_summary(workspace, pipeline)
    rows = [row["runs"] for row in summary["iterations"]]
    if at < 0 or at + 1 >= len(rows) or rows[at + 1].get(stage) != origin:
        raise UsageError(
            f"--of {of}: wanted a run of {stage} in a finished iteration of a pipeline run, found none. See: turnwise show {pipeline[:8]}"
        )
    stored = workspace.tracking.read_json(pipeline, "config.json")
    old = presets.resolve(stored)
    _check_through(stage, through, old)
    before, after = (_own(run, again.call.stage) for run in (rerun.stored_config(origin, workspace), again.call.run))
    run = presets.resolve({**stored, **after, "iterations": old.iterations if through is None else at + 1})
    changes = differences(before, after)
    return Branch(
        pipeline, stage, at, through or LAST, again.call.run, old, run, rows, summary["base"]["run_id"], changes
    )


def compare(branch: Branch, summary: Summary, workspace: Workspace) -> list[dict[str, Any]]:
    """Results of the old and the new run: `what`, `old` and `new`, figures by name, empty where a run has none.

    These are the win rates of each iteration from the branch on, and of the final adapters on the test split. A branch
    that ends before `evaluate` gives the metrics of its last stage.
    """
    runs = {
        "old": rerun.stored_summary(workspace, branch.of),
        "new": {"iterations": summary.iterations, "final": summary.final},
    }
    if branch.through != LAST:
        metrics = {which: _metrics_of(branch, run) for which, run in runs.items()}
        return [{"what": f"{branch.through} {branch.iteration}", **metrics}]
    rows = []
    for i in range(branch.iteration, branch.run.iterations):
        figures = {
            which: _figures(row) for which, run in runs.items() for row in run["iterations"] if row["iteration"] == i
        }
        rows.append({"what": f"iteration {i}", "old": {}, "new": {}, **figures})
    found = [*rows, {"what": "final, test", **{which: _figures(run["final"]) for which, run in runs.items()}}]
    return [row for row in found if row["old"] or row["new"]]


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: row[key] for key in FIGURES if row.get(key) is not None}


def _metrics_of(branch: Branch, run: Mapping[str, Any]) -> dict[str, float]:
    metrics: Mapping[str, float] = next(
        (row["metrics"] for row in run["iterations"] if row["iteration"] == branch.iteration), {}
    )
    return {key: value for key, value in metrics.items() if key.startswith(f"{branch.through}/")}


def _pipeline_of(of: str, run_id: str, workspace: Workspace) -> tuple[str, str]:
    """The pipeline run that `of` names or belongs to; and that pipeline's stage run, which `run_id` is or repeats."""
    tracking = workspace.tracking
    if tracking.experiment(named := tracking.find(of)) == EXPERIMENT:
        return named, run_id
    while not (pipeline := (tags := tracking.tags(run_id)).get("pipeline")):
        if not (run_id := tags.get("rerun_of", "")):
            raise UsageError(
                f"--of {of}: wanted a run that belongs to a pipeline run, found one that does not. See: turnwise runs"
            )
    return pipeline, run_id


def _own(run: RunConfig, stage: Stage) -> dict[str, Any]:
    """What the stage reads of a config, as plain values."""
    return run.model_dump(mode="json", include={stage.name, *stage.shared, "seed"})


def _check_through(stage: str, through: str | None, run: RunConfig) -> None:
    names = (*METHODS[run.method], LAST)
    following = names[names.index(stage) :]
    if through is not None and through not in following:
        raise UsageError(
            f"--through {through}: wanted {stage} or a stage that follows it, one of {', '.join(following)}."
        )
