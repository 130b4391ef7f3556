"""The cells of a study: one pipeline run for each method, task and seed; and the settings to tune each method over.
Ours.

A cell is an ordinary run: `turnwise run PRESET --set ...` makes the same one. Its config finds it again, as long as the
fingerprints of all its stages still match (docs/explanation/architecture.md).
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from flows import pipeline, played, presets, rerun
from flows.book import EXPERIMENT
from flows.evidence.study.design import PRESET, Study
from flows.evidence.study.elsewhere import RECIPE, recipe
from flows.evidence.study.rows import Row, best_validation, mean_validation, row
from flows.pipeline import Call
from flows.presets import RunConfig
from stages.frame.types import UsageError
from stages.store.workspace import StageRun, Workspace

UNREAD = ("preset", "train", "run", *presets.SCHEDULING)  # keys of a whole run that no result depends on

Setting = tuple[str, ...]
"""Changes to a preset, as `--set` takes them; () = none, the preset's own settings."""


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    part: Literal["tuning", "table"]
    method: str
    task: str
    seed: int
    preset: str  # name or file
    sets: Setting  # all changes to it but the seed
    setting: Setting  # those of them that were tuned
    run: RunConfig

    @property
    def title(self) -> str:
        return f"{self.method} / {self.task} / seed {self.seed}{''.join(f' {item}' for item in self.setting)}"

    @property
    def key(self) -> str:
        return identity(self.run)


def identity(run: RunConfig) -> str:
    """All of a config that a result depends on, as text."""
    return json.dumps(run.model_dump(mode="json", exclude=set(UNREAD)), sort_keys=True)


def settings(study: Study, method: str) -> list[Setting]:
    """The settings to tune a method over: its preset's own, then n - 1 others. These are drawn without replacement from
    its space; `tuning.draw` and the method's name are the seed.

    Raises UsageError where the space has fewer, or an invalid key or value.
    """
    assert study.tuning is not None
    task, n = study.tuning_tasks[0], study.tuning.n
    own = _config(study, method, task, (), 0)
    others = [point for point in study.grid(method) if _config(study, method, task, point, 0) != own]
    if len(others) < n - 1:
        raise UsageError(
            f"tuning.space.{method}: wanted {n - 1} settings that differ from the preset's, so that all methods have n = {n}; found {len(others)}."
        )
    return [(), *random.Random(f"{study.tuning.draw} {method}").sample(others, n - 1)]


def tuning_cells(study: Study) -> list[Cell]:
    """Seed by seed, so that all methods have come equally far whenever a study is stopped."""
    seeds = study.tuning.seeds if study.tuning else ()
    asked = [(method, setting) for method in study.tuned for setting in settings(study, method)]
    return [
        _cell(study, "tuning", method, task, setting, seed)
        for seed in seeds
        for task in study.tuning_tasks
        for method, setting in asked
    ]


def table_cells(study: Study, chosen: Mapping[str, Setting]) -> list[Cell]:
    """chosen: method -> its setting, for tuned methods. A method whose setting is not known yet has no cells.

    The cells are as if each played its own episodes: see `with_episodes`.
    """
    return [
        _cell(study, "table", method, task, study.setting_of(method, chosen), seed)
        for seed in study.seeds
        for task in study.tasks
        for method in study.methods
        if study.runs(method, task, seed) and ((source := study.settings_of(method)) == PRESET or source in chosen)
    ]


def with_episodes(
    study: Study, cells: Sequence[Cell], played: Mapping[tuple[str, int], str]
) -> tuple[list[Cell], list[Cell]]:
    """These cells with the episodes that they learn from, and the cells that wait for the source's run. played: (task,
    seed) -> id of the source's run. Without a source all cells stay as they are.
    """
    ready, waiting = list[Cell](), list[Cell]()
    for cell in cells:
        if not study.source or cell.method == study.source or cell.run.method in presets.ON_POLICY:
            ready.append(cell)
        elif run_id := played.get((cell.task, cell.seed)):
            sets = (*cell.sets, f"episodes_of={run_id}")
            run = presets.load(cell.preset, [*sets, f"seed={cell.seed}"])
            ready.append(replace(cell, sets=sets, run=run))
        else:
            waiting.append(cell)
    return ready, waiting


def choose(study: Study, rows: Sequence[Row]) -> dict[str, Setting]:
    """The setting of each tuned method with the highest mean of its tuning runs' best validation win rates; of equals as
    `tuning.ties` says. A method with a missing run is left out: otherwise its settings would be compared unfairly.
    """
    chosen = {}
    for method in study.tuned:
        assert study.tuning is not None
        wanted = len(study.tuning.seeds) * len(study.tuning_tasks)
        means: dict[Setting, tuple[float, float]] = {}
        for setting in settings(study, method):
            found = [
                one
                for one in rows
                if (one["part"], one["method"], tuple(one["setting"])) == ("tuning", method, setting)
            ]
            if len(found) == wanted:
                means[setting] = standing(found, study.tuning.ties)
        if len(means) == study.tuning.n:
            chosen[method] = max(means, key=lambda setting: means[setting])
    return chosen


def standing(runs: Sequence[Row], ties: str) -> tuple[float, float]:
    """By which a setting's tuning runs are ranked: mean of their best validation win rates, then as `ties` says."""
    on_the_way = statistics.mean(map(mean_validation, runs)) if ties == "sooner" else 0.0
    return statistics.mean(map(best_validation, runs)), on_the_way


def finished(workspace: Workspace, cells: Collection[Cell], elsewhere: Mapping[str, Row]) -> dict[str, str | Row]:
    """key of a cell -> the run that finished here, or the row of one that finished elsewhere: `elsewhere`, by recipe."""
    here = stored(workspace, cells)
    left = {cell.key: recipe(cell.run, workspace) for cell in cells if elsewhere and cell.key not in here}
    return {**here, **{key: elsewhere[made] for key, made in left.items() if made in elsewhere}}


def stored(workspace: Workspace, cells: Collection[Cell]) -> dict[str, str]:
    """key of a cell -> the newest pipeline run that finished with its config, and would come out the same today."""
    wanted = {cell.key: cell for cell in cells}
    seeds = {str(cell.seed) for cell in cells}
    found: dict[str, str] = {}
    for info in workspace.tracking.runs(EXPERIMENT) if cells else ():
        # A run that left another one half-way has the config of its last stages alone.
        if info.status != "FINISHED" or "rerun_of" in info.tags or info.tags.get("seed") not in seeds:
            continue
        key = _stored_identity(workspace, info.run_id)
        if key in wanted and key not in found and is_current(wanted[key].run, info.run_id, workspace):
            found[key] = info.run_id
    return found


def is_current(run: RunConfig, run_id: str, workspace: Workspace) -> bool:
    """Whether the base model's evaluation and each stage of the last iteration still have the fingerprint of today.

    A changed stage version, prompt, base model or task code affects every iteration. So one iteration is enough.
    """
    summary = rerun.stored_summary(workspace, run_id)
    runs = {row["iteration"]: row["runs"] for row in summary["iterations"]}
    if not summary["final"] or len(runs) != run.iterations + 1:
        return False
    same: list[bool] = []

    def step(call: Call) -> StageRun:
        old = summary["base"]["run_id"] if call.part == "base" else runs[call.iteration].get(call.stage.name, "")
        if call.iteration in (-1, run.iterations - 1):
            same.append(bool(old) and rerun.is_same(call, old, workspace))
        return StageRun(call.stage.name, old, call.iteration, {}, True, 0.0)

    pipeline.evaluate_base(run, step)
    for _ in pipeline.iterate(run, played.step(step, run, workspace)):
        pass
    return all(same)


def row_of(cell: Cell, found: str | Row, workspace: Workspace) -> Row:
    """The row of a cell whose run finished: found is its id, or its row where it finished elsewhere."""
    place = {"part": cell.part, "method": cell.method, "task": cell.task, "setting": list(cell.setting)}
    if not isinstance(found, str):
        return {**found, **place}
    commit = workspace.tracking.tags(found).get("git_commit", "")[:7]
    kept = row(rerun.stored_summary(workspace, found), cell.run.preset, cell.seed, cell.sets, commit)
    return {**place, "run": found, RECIPE: recipe(cell.run, workspace), **kept}


def _cell(study: Study, part: Literal["tuning", "table"], method: str, task: str, setting: Setting, seed: int) -> Cell:
    sets = (*study.sets_of(method, task, seed), *setting)
    return Cell(
        part, method, task, seed, study.preset(method, task), sets, setting, _config(study, method, task, setting, seed)
    )


def _config(study: Study, method: str, task: str, setting: Setting, seed: int) -> RunConfig:
    try:
        return presets.load(study.preset(method, task), [*study.sets_of(method, task, seed), *setting, f"seed={seed}"])
    except UsageError as error:
        raise UsageError(f"{method} / {task}{''.join(f' {item}' for item in setting)}: {error}") from None


@cache
def _stored_identity(workspace: Workspace, run_id: str) -> str:
    """That of a finished run's config, which stays as it is; "" where a key of it is not known any more."""
    stored = workspace.tracking.read_json(run_id, "config.json")
    try:
        return identity(presets.resolve(stored))
    except UsageError:
        return ""
