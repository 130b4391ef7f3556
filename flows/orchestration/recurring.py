"""Decides what a deployment's next run changes. Without a change, the whole preset would be reused.

The answer is a list of `--set` changes, so the command line can repeat a scheduled run.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from flows import parts, presets
from flows.book import EXPERIMENT, model_name
from stages.frame.types import MissingInput, UsageError
from stages.store.runs import RunInfo
from stages.store.workspace import Workspace

TIMES = ("iterations", *presets.SCHEDULING)  # say how much and when, and nothing of what a run is
AWAY = ("EngineUnavailable", "SimulatorError")  # errors that are no fault of the run, as the tag `error` begins


def next_sets(
    preset: str, sets: Sequence[str], each_run: presets.EachRun, due: datetime, workspace: Workspace
) -> list[str]:
    """The changes of a run that fell due at `due`: `sets`, and what `each_run` adds to them.

    new_seed: the due time in Unix seconds as seed, unless `sets` name one. further: the preset's iterations on top of
    those of the longest finished run that differs in nothing else. force: nothing; the caller forces the run. champion:
    as many iterations after the champion's, with a new seed. If the run before did the same and was stopped, its seed
    is kept and it goes on.
    """
    run = presets.load(preset, sets)
    sets = list(sets)
    if (each_run == "champion") != (run.each_run == "champion"):
        sets.append(f"each_run={each_run}")
    seed = [] if "seed" in {item.partition("=")[0].strip() for item in sets} else [f"seed={int(due.timestamp())}"]
    if each_run == "new_seed":
        return [*sets, *seed]
    if each_run == "further":
        return [*sets, f"iterations={_finished_iterations(run, workspace) + run.iterations}"]
    if each_run == "champion":
        own = _after_champion(run, workspace)
        stopped = _stopped_seed(presets.load(preset, [*sets, *own]), workspace) if seed else None
        return [*sets, *own, *(seed if stopped is None else [f"seed={stopped}"])]
    return sets


def _after_champion(run: presets.RunConfig, workspace: Workspace) -> list[str]:
    champion = workspace.tracking.models.champion(model_name(run, workspace))
    if champion is None:
        return []
    last = int(champion.tags["iteration"])
    return [f"goes_on_from={champion.tags['pipeline']}:{last}", f"iterations={last + 1 + run.iterations}"]


def _stopped_seed(run: presets.RunConfig, workspace: Workspace) -> int | None:
    """Seed of the preset's newest run, if that run was stopped and differs only in the seed. A person, a kill, a time
    limit or a lost engine may have stopped it.
    """
    newest = next((one for one in _runs_of(run.preset, workspace)), None)
    if newest is None or not (newest.status == "KILLED" or newest.tags.get("error", "").startswith(AWAY)):
        return None
    stored = _config(newest.run_id, run.preset, workspace)
    alike = stored is not None and stored.model_copy(update={"seed": run.seed}) == run
    return stored.seed if stored is not None and alike else None


def _finished_iterations(run: presets.RunConfig, workspace: Workspace) -> int:
    """Iterations of the longest finished pipeline run of this config; 0 where there is none."""
    finished = [info.run_id for info in _runs_of(run.preset, workspace) if info.status == "FINISHED"]
    stored = [_config(run_id, run.preset, workspace) for run_id in finished]
    alike = [one for one in stored if one is not None and _timeless(one) == _timeless(run)]
    return max((one.iterations for one in alike), default=0)


def _runs_of(preset: str, workspace: Workspace) -> list[RunInfo]:
    """Newest first. Includes runs under earlier names of the preset."""
    names = (preset, *parts.before(preset))
    return [info for info in workspace.tracking.runs(EXPERIMENT, 1000) if info.tags.get("preset") in names]


def _config(run_id: str, preset: str, workspace: Workspace) -> presets.RunConfig | None:
    """Its config, with the preset's current name. None where a run died before it wrote its config, or where another
    version's config does not fit this turnwise.
    """
    try:
        return presets.resolve({**workspace.tracking.read_json(run_id, "config.json"), "preset": preset})
    except (MissingInput, UsageError):
        return None


def _timeless(run: presets.RunConfig) -> dict[str, Any]:
    return run.model_dump(mode="json", exclude=set(TIMES))
