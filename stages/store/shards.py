"""A shard: a part of the episodes or requests of a stage, as a run of its own in the experiment `shard`.

The run that the shards belong to joins them, and has the fingerprint, rows and metrics that it has without shards. A
shard has what is in that fingerprint, which part it is of how many, and the hash of what is asked. So a finished shard
is found again after a kill. Once the run that joins them is finished, its shards are deleted.

Episodes: the shard runs the stage's function up to where its episodes are shared out (`Context.share`), plays its own,
and stops there. Requests carry their own seeds, so they are what is dealt out where roles are asked: seeds of a later
role depend on what all shards have dropped before (docs/explanation/decisions.md).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from stages.frame.contract import Context, Stage, fingerprint
from stages.frame.own import apart
from stages.frame.types import Completion, Engine, Request
from stages.llm.metered import Metered
from stages.store.equal_work import held
from stages.store.execute import INGREDIENTS, ending
from stages.store.notes import code_version
from stages.store.stage_context import context_of
from stages.store.tracking import Tracking
from stages.store.workspace import Workspace, silent

EXPERIMENT = "shard"
RESULT = "result.json"
LEAST = 4
"""Requests of a shard, at least: fewer are no work worth a run."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Shard:
    """What a process needs to know to make one, as plain JSON. number: from 0."""

    run: Mapping[str, Any]  # the whole config
    stage: str
    inputs: Mapping[str, Sequence[str]]
    iteration: int
    joined: str  # id of the run that it belongs to
    joined_key: str  # its fingerprint
    key: str  # the shard's own
    number: int
    count: int
    asked: str  # artifact of that run with all requests; "" where episodes are played

    @property
    def title(self) -> str:
        return f"{self.stage} {self.iteration}, shard {self.number + 1} of {self.count}"


class _Ended(BaseException):
    """Carries a shard's results out of its stage's function. No error, so that nothing on the way takes it for one."""

    def __init__(self, kind: type[Any], results: Sequence[Any]) -> None:
        self.kind, self.results = kind, results


def part_of(items: Sequence[Item], number: int, count: int) -> Sequence[Item]:
    """Neighbours stay together, as prompts that begin alike do."""
    return items[number * len(items) // count : (number + 1) * len(items) // count]


def shards_of(
    context: Context, stage: Stage, count: int, workspace: Workspace, requests: Sequence[Request] = ()
) -> list[Shard]:
    """The shards of the running stage's episodes, or of these requests, which are kept for them in its run."""
    joined, asked = context.workdir.name, ""  # of which the scratch folder has the name
    parts = workspace.tracking.read_json(joined, INGREDIENTS)
    told = json.dumps([asdict(one) for one in requests])
    if requests:
        asked = f"asked-{hashlib.sha256(told.encode()).hexdigest()[:16]}.json"
        workspace.tracking.write_json(joined, asked, json.loads(told))
    return [
        Shard(
            run=context.run.model_dump(mode="json"), stage=stage.name, inputs=context.inputs, iteration=context.iteration,
            joined=joined, joined_key=fingerprint(parts), number=number, count=count, asked=asked,
            key=fingerprint({**parts, "asked": told if requests else "", "shard": [number, count]}),
        )
        for number in range(count)
    ]  # fmt: skip


def run_shard(shard: Shard, stage: Stage, run: Any, workspace: Workspace, engine: Callable[[], Engine]) -> str:
    """Make a shard, or find it made; the id of its run. Raises what the stage raises; the run is then FAILED.

    run: the RunConfig of `shard.run`.
    """
    tracking = workspace.tracking
    with held(workspace.lock(shard.key), _wait), tracking.claimed(shard.key, _wait):
        if done := tracking.finished(shard.key, EXPERIMENT):
            return done
        # Without the tag `stage`, by which runs with rows are known.
        tags = {"fingerprint": shard.key, "shard_of": shard.joined_key, "shard": f"{shard.number + 1}/{shard.count}"}
        run_id = tracking.start(EXPERIMENT, shard.title, {**tags, **code_version()}, shard.joined)
        with ending(run_id, workspace):
            workspace.workdir(run_id).mkdir(parents=True)
            metered = Metered(engine())
            if shard.asked:
                kind, results = _replies(shard, metered, tracking)
            else:
                kind, results = _episodes(shard, stage, run, workspace, metered, run_id)
            adapter: TypeAdapter[Any] = TypeAdapter(list[kind])  # type: ignore[valid-type]
            made = {"results": adapter.dump_python(results, mode="json"), "engine": metered.told()}
            tracking.write_text(run_id, RESULT, json.dumps(made, separators=(",", ":")))
            tracking.seal(run_id)
            tracking.finish(run_id)
    return run_id


def read_shard(run_id: str, kind: type[Result], tracking: Tracking) -> tuple[list[Result], Mapping[str, Any]]:
    """What a finished shard left: its results, and what its engine counted. Raises MissingInput, Changed."""
    told = tracking.read_json(run_id, RESULT)
    adapter: TypeAdapter[list[Result]] = TypeAdapter(list[kind])  # type: ignore[valid-type]
    return adapter.validate_python(told["results"]), told["engine"]


def forget(tracking: Tracking, joined_key: str) -> None:
    """Delete the shards that were made for this fingerprint, but for those that still run."""
    for info in tracking.shards(EXPERIMENT, joined_key):
        if info.status != "RUNNING":
            tracking.remove(info.run_id)


def _wait() -> None:
    """Another process makes the same shard, and is waited for: nothing is to be said to anybody."""


def _replies(shard: Shard, engine: Engine, tracking: Tracking) -> tuple[type[Any], Sequence[Any]]:
    told = part_of(tracking.read_json(shard.joined, shard.asked), shard.number, shard.count)
    requests = [Request.of(one) for one in told]
    for name in sorted({one.adapter for one in requests if one.adapter}):
        run_id, _, folder = name.rpartition("-")  # as `Context.adapter` calls it
        engine.load_adapter(name, tracking.artifact(run_id, folder))
    return Completion, engine.generate(requests)


def _episodes(
    shard: Shard, stage: Stage, run: Any, workspace: Workspace, engine: Engine, run_id: str
) -> tuple[type[Any], Sequence[Any]]:
    context = context_of(
        stage, run=run, inputs=shard.inputs, iteration=shard.iteration, workspace=workspace, engine=engine,
        workdir=workspace.workdir(run_id), checkpoints=Path(workspace.workdir(run_id), "checkpoints"), progress=silent,
    )  # fmt: skip

    def only(
        items: Sequence[Item], work: Callable[[Sequence[Item]], list[Result]], kind: type[Result], done: Any
    ) -> list[Result]:
        raise _Ended(kind, work(part_of(items, shard.number, shard.count)))

    try:
        with apart():  # an environment is foreign code
            stage.run(replace(context, share=only))
    except _Ended as ended:
        return ended.kind, ended.results
    raise ValueError(f"{stage.name} shares out no episodes")
