"""The parent run of a pipeline: its description, its curves and its summary. A killed run is shown and rerun from the summary."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

from flows import parts, telling
from flows.lineage import lineage, runs_of, svg
from flows.presets import RunConfig
from flows.registry import METHODS
from flows.telling import Asked, Iteration, Summary
from stages.frame.types import TurnwiseError
from stages.store.contents import own_parts
from stages.store.models import Version
from stages.store.notes import code_version, run_link
from stages.store.runs import NOTE
from stages.store.tracking import Status
from stages.store.workspace import StageRun, Workspace

EXPERIMENT = "pipeline"
SUMMARY = "summary.json"  # artifact of the parent run: what `--json` prints
PICTURE = "lineage.svg"
CURVE = "agent"
"""The prefix of the two curves that a reader wants first. MLflow groups charts by the text before a metric's last slash
and sorts them alphabetically. Stage names come later.
"""
TOTALS = ("stages_s", "cpu_s", "episodes", "env_steps", "generated_tokens")
"""The axes of cost, summed over the iterations; evaluation is left out."""


def outcome(evaluated: StageRun) -> dict[str, Any]:
    """The metrics of one evaluation, named as `--json` prints them: win_rate, win_low, win_high and the rest."""
    return {key.removeprefix("evaluate/"): value for key, value in evaluated.metrics.items()}


def model_name(run: RunConfig, workspace: Workspace) -> str:
    """Name of the preset's registered model. An earlier name stays if its model has a champion."""
    champion = workspace.tracking.models.champion
    return next((old for old in parts.before(run.preset) if champion(old)), run.preset or EXPERIMENT)


def open_book(run: RunConfig, workspace: Workspace, asked: Asked) -> Book:
    """Start the parent run with its name, tags and description."""
    name, commit = telling.run_name(run, asked), code_version()
    source = {
        "mlflow.source.name": asked.command,
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": commit["git_commit"],
    }
    note = telling.note(run, asked, commit, Summary("", run.preset, "RUNNING", 0.0), workspace.tracking.link)
    tags = {
        "preset": run.preset,
        "method": run.method,
        "seed": str(run.seed),
        **commit,
        **(source if asked.command else {}),
        **{f"own.{key}": told for key, told in own_parts(run).items()},
        **asked.tags,
        NOTE: note,
    }
    run_id = workspace.tracking.start(EXPERIMENT, name, tags)
    return Book(run, workspace, asked, commit, Summary(run_id, run.preset, "RUNNING", 0.0))


class Book:
    """The parent run's curves and its summary. They stay up to date, so a killed run can be shown and rerun."""

    def __init__(
        self, run: RunConfig, workspace: Workspace, asked: Asked, commit: Mapping[str, str], summary: Summary
    ) -> None:
        self.run, self.asked, self.commit, self.summary = run, asked, commit, summary
        self._workspace, self._tracking = workspace, workspace.tracking
        self._model: Version | None = None
        self._started = time.perf_counter()
        self._totals = dict.fromkeys(TOTALS, 0.0)

    @property
    def note(self) -> str:
        return telling.note(self.run, self.asked, self.commit, self.summary, self._tracking.link, self._model)

    def register(self) -> Version:
        """Make the final adapter a version of the preset's registered model."""
        final, run_id = self.summary.final, self.summary.run_id
        text = f"The adapter of {run_link(METHODS[self.run.method][-1], final['adapter'], self._tracking.link)}, chosen by {run_link(EXPERIMENT, run_id, self._tracking.link)}."
        figures = telling.figures(self.run, self.asked, self.commit, self.summary)
        self._model = self._tracking.models.register(
            model_name(self.run, self._workspace),
            run_id,
            self._tracking.address(final["adapter"], "adapter"),
            figures=figures,
            note=text,
        )
        return self._model

    def put(self, **changes: Any) -> None:
        self.summary = replace(self.summary, seconds=round(time.perf_counter() - self._started, 3), **changes)
        self._tracking.write_json(self.summary.run_id, SUMMARY, asdict(self.summary))
        for part, tested in ((part, changes[part]) for part in ("base", "final") if part in changes):
            numbers = {f"{part}/{key}": value for key, value in tested.items() if isinstance(value, float)}
            numbers[f"{CURVE}/win_rate_on_test"] = tested["win_rate"]
            self._tracking.log(self.summary.run_id, numbers, tested.get("iteration", -1) + 1)

    def decided(self, verdict: Mapping[str, Any]) -> None:
        """Record the final adapter's result against the champion: in the summary, as metrics and as a tag."""
        self.put(match=verdict)
        numbers = {f"match/{key}": float(value) for key, value in verdict.items() if value is not None}
        self._tracking.log(self.summary.run_id, numbers, self.summary.final["iteration"] + 1)
        self._tracking.tag(self.summary.run_id, "champion", telling.match_text(verdict))

    def add(self, row: Iteration) -> None:
        """Log an iteration's metrics at step iteration + 1. Running totals allow charts of win rate against cost."""
        plain = {
            "iteration": row.iteration,
            **{key: row.metrics.get(f"evaluate/{key}") for key in ("win_rate", "win_low", "win_high")},
            "seconds": round(row.seconds, 3),
            "reused": list(row.reused),
            "runs": dict(row.runs),
        }
        self._totals["stages_s"] += row.seconds if row.iteration >= 0 else 0.0  # the base model's is an evaluation
        self._totals["cpu_s"] += row.cpu_s
        for key, value in row.metrics.items():
            stage, _, what = key.partition("/")
            if what in TOTALS and stage != "evaluate":
                self._totals[what] += value
        totals = {f"{EXPERIMENT}/{key}": value for key, value in self._totals.items()}
        first = {} if row.win_rate is None else {f"{CURVE}/win_rate": row.win_rate}
        self._tracking.log(self.summary.run_id, {**first, **row.metrics, **totals}, row.iteration + 1)
        self.put(iterations=[*self.summary.iterations, {**plain, "metrics": {**row.metrics, **totals}}])

    def draw(self) -> None:
        """Keep a picture of what the run was made from."""
        run_id = self.summary.run_id
        with suppress(TurnwiseError):  # no picture is no reason to fail
            drawn = svg(lineage(runs_of(asdict(self.summary)), self._workspace, pipeline=run_id))
            self._tracking.write_text(run_id, PICTURE, drawn)

    @contextmanager
    def closing(self) -> Iterator[None]:
        try:
            yield
            self.draw()
            self._end("FINISHED")
        except BaseException as error:
            status: Status = "FAILED" if isinstance(error, Exception) else "KILLED"
            # A full disk may stop this, too. Then the run stays RUNNING until its process is found gone.
            with suppress(TurnwiseError, OSError):
                self._end(status, f"{type(error).__name__}: {error}")
            raise

    def _end(self, status: Status, error: str = "") -> None:
        run_id = self.summary.run_id
        self.put(status=status)
        self._tracking.seal(run_id)
        self._tracking.note(run_id, self.note)
        self._tracking.finish(run_id, status, error)
