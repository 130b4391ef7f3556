"""Says whether a stage would run or be reused, and why.

It compares the ingredients of the fingerprint (`stages/frame/contract.py`): those of the call, and those that each
finished run kept. Two runs differ in a field here exactly where their fingerprints differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.pipeline import Call
from stages.frame.contract import fingerprint
from stages.frame.sections import WAYS
from stages.frame.types import MissingInput, TurnwiseError
from stages.store.execute import INGREDIENTS, lineage_inputs, stage_ingredients
from stages.store.runs import RunInfo
from stages.store.workspace import Workspace

HASHED = {"model": "model_hash"}  # the config has a section of the name
NOT_KEPT = ("model", "prompts", "contents")  # of runs of before 2026-11-23

Fields = Mapping[tuple[str, ...], Any]
"""Place of a field, like ("critic", "lr") -> its value."""


@dataclass(frozen=True)
class Near:
    """The finished run with the fewest differing fields, the newest of equals. not_kept: ingredients that it did not keep."""

    run_id: str
    name: str
    differs: Mapping[str, tuple[Any, Any]]  # field -> that run's value and the call's; None where there is none
    not_kept: Sequence[str] = ()


@dataclass(frozen=True)
class Explained:
    """What a call would do. inputs: upstream stage -> its runs, whose names say what pipeline run made them."""

    title: str
    fingerprint: str
    reuse: str | None
    nearest: Near | None
    fields: Mapping[str, Any]  # "critic.lr" -> its value
    inputs: Mapping[str, Sequence[Mapping[str, str]]]


def explained(call: Call, workspace: Workspace) -> Explained:
    """What `execute` would do with this call. Raises UsageError as `stage_ingredients` does."""
    content = stage_ingredients(
        call.stage, run=call.run, inputs=call.inputs, iteration=call.iteration, workspace=workspace
    )
    key, tracking = fingerprint(content), workspace.tracking
    inputs = {
        name: [{"run_id": run_id, "name": named(tracking.info(run_id))} for run_id in runs]
        for name, runs in content["inputs"].items()
    }
    reuse = tracking.finished(key, call.stage.name)
    near = None if reuse else nearest_run(content, call.run, workspace)
    every = {".".join(place): value for place, value in fields(content).items()}
    return Explained(call.title, key, reuse, near, every, inputs)


def fields(content: Mapping[str, Any]) -> Fields:
    """The ingredients one by one, by their place. Config keys have their `--set` names."""
    rest = {HASHED.get(key, key): value for key, value in content.items() if key not in ("config", "shared")}
    return dict([*_leaves(rest), *_leaves({content["stage"]: content["config"], **content["shared"]})])


def differing(old: Fields, new: Fields) -> dict[str, tuple[Any, Any]]:
    """The fields whose JSON differs, because the JSON is hashed: 1 is not 1.0. None stands for a missing field."""
    found = [
        place
        for place in {**old, **new}
        if place not in old or place not in new or _json(old[place]) != _json(new[place])
    ]
    # A section that was empty and is not now: its fields say so.
    inner = {place[:n] for place in found for n in range(1, len(place))}
    return {".".join(place): (old.get(place), new.get(place)) for place in found if place not in inner}


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def nearest_run(content: Mapping[str, Any], run: Any, workspace: Workspace) -> Near | None:
    """The finished run of the same stage that differs in the fewest fields; None where there is none. run: a RunConfig."""
    best: Near | None = None
    for info in workspace.tracking.runs(content["stage"]):
        kept = _kept(info.run_id, run, workspace) if info.status == "FINISHED" else None
        if kept is None:
            continue
        missing = [part for part in NOT_KEPT if part in content] if "model" not in kept else []
        known = fields({key: value for key, value in content.items() if key not in missing})
        near = Near(info.run_id, named(info), differing(fields(kept), known), missing)
        if best is None or len(near.differs) < len(best.differs):
            best = near
    return best


def named(info: RunInfo) -> str:
    """What a stage run is called, with the pipeline run that made it."""
    pipeline = info.tags.get("pipeline")
    return f"{info.name}, in run {pipeline[:8]}" if pipeline else info.name


def _kept(run_id: str, run: Any, workspace: Workspace) -> dict[str, Any] | None:
    """The ingredients of a stored run, as far as it kept them; None where its files are gone or changed. run: a RunConfig."""

    def read(name: str) -> dict[str, Any]:
        return dict(workspace.tracking.read_json(run_id, name))

    try:
        try:
            return read(INGREDIENTS)
        except MissingInput:
            stored = read("config.json")
            sections = dict(stored["config"])
            own = {"config": getattr(run, stored["stage"]).counting(sections.pop(stored["stage"]))}
            own["shared"] = {name: getattr(run, name).counting(section, WAYS) for name, section in sections.items()}
            return {**stored, **own, "inputs": lineage_inputs(workspace, run_id)}
    except TurnwiseError:
        return None


def _leaves(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value
