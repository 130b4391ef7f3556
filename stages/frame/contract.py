"""A stage is a name, a version, a config, its upstream stages, the roles it prompts, and one function.

Source: docs/explanation/architecture.md, "Stage contract". The fingerprint is the only cache of turnwise: a finished
run with the same fingerprint is reused. It changes exactly when something changes that can change the result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from stages.frame.types import Engine, Row, UsageError

POLICY_STAGES = ("distill", "rft", "grpo", "sdpo", "self_ac")
"""Stages that leave the policy's adapter; a pipeline has one of them."""


RETIRED_KEY = "retired_key"
"""Type of the error that a retired key raises. Its text names the key."""


class Retired(NamedTuple):
    """A config key that is gone: the value that it had by default, and the key that took its place."""

    value: Any
    now: str


class Config(BaseModel):
    """Base of every config section: frozen; an unknown key is an error, whose text quotes no value, as of a secret.

    RETIRED: keys that the section once had. A stored config may hold them with their old default, and fingerprints keep
    them (`ingredients`). Another value of such a key is an error, which names the key that took its place.
    ADDED: keys that the section got later, each with the value that leaves results as they were. Fingerprints hold such
    a key only with another value, so stored runs keep theirs.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )
    RETIRED: ClassVar[Mapping[str, Retired]] = {}
    ADDED: ClassVar[Mapping[str, Any]] = {}

    def counted(self, exclude: Collection[str] = ()) -> dict[str, Any]:
        """The values that a fingerprint holds, as plain JSON: none of `exclude`."""
        return self.counting(self.model_dump(mode="json"), exclude)

    @classmethod
    def counting(cls, values: Mapping[str, Any], exclude: Collection[str] = ()) -> dict[str, Any]:
        """The same of stored values: an added key that changes nothing does not count."""
        return {k: v for k, v in values.items() if k not in exclude and (k not in cls.ADDED or v != cls.ADDED[k])}

    @model_validator(mode="before")
    @classmethod
    def _without_retired(cls, values: Any) -> Any:
        if not cls.RETIRED or not isinstance(values, Mapping):
            return values
        for key, old in cls.RETIRED.items():
            if key in values and values[key] != old.value:
                raise PydanticCustomError(
                    RETIRED_KEY, "the key {key} is gone; set {now} in its place", {"key": key, "now": old.now}
                )
        return {key: value for key, value in values.items() if key not in cls.RETIRED}


@dataclass(frozen=True)
class FromPath:
    """Marks a config field that names a file or a folder ("" = none), whose content is part of the fingerprint."""

    used_with: str = ""  # key of the same section without which nothing is read
    beside: str = ""  # a file of this name, beside the file that is named, is read as well


@dataclass(frozen=True)
class OfTask:
    """Marks a config field with options of the task's environment, laid over `task.options`."""


@dataclass(frozen=True)
class OfModule:
    """Marks a config field that may name a module of one's own, whose code is then part of the fingerprint."""


DataPath = Annotated[str, FromPath()]
ModuleName = Annotated[str, OfModule()]
TaskOptions = Annotated[dict[str, Any], OfTask()]


class Reader(Protocol):
    """Rows of finished runs, as a stage may read them (implemented by `replay.Replay`)."""

    def read(
        self,
        table: str,
        run_ids: Sequence[str],
        columns: Sequence[str],
        *,
        by: Sequence[str] = (),
        among: Collection[tuple[Any, ...]] = (),
    ) -> list[Row]:
        """These columns of the rows that the runs wrote to `table`: run by run as named, within a run in the order
        written. Raises MissingInput if a run never committed, ValueError for a column that the table does not have.

        Lists of numbers come as `array.array` ("i" for ids, "d" for log-probs): 4 and 8 bytes each. Python's numbers in
        a list would take 32 to 36. by, among: only rows whose values in the columns `by` are one of `among`.
        """


Item = TypeVar("Item")
Result = TypeVar("Result")


class Share(Protocol):
    """Does the bulk of a stage's work, here or dealt out to several processes: one result an item, in their order."""

    def __call__(
        self,
        items: Sequence[Item],
        work: Callable[[Sequence[Item]], list[Result]],
        kind: type[Result],
        done: Callable[[int], None],
    ) -> list[Result]:
        """What `work` makes of the items. It must give each item the same, whichever others it gets with it.

        kind: of a result, a dataclass that JSON can hold. done: is called with how many items are done elsewhere.
        """


def alone(
    items: Sequence[Item],
    work: Callable[[Sequence[Item]], list[Result]],
    kind: type[Result],
    done: Callable[[int], None],
) -> list[Result]:
    """`Share` in this process, where `work` itself tells its progress."""
    return work(items)


class Progress(Protocol):
    """A bar over long work: `advance(n)` when n more units are done."""

    def advance(self, n: int = 1) -> None: ...


@dataclass(frozen=True)
class Outputs:
    """What a stage leaves: metrics (for the curves), rows (for the replay), files (artifacts, by name in the run)."""

    metrics: Mapping[str, float]
    rows: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)  # artifact path -> local file or folder
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)  # metric -> one value a step


@dataclass(frozen=True)
class Context:
    """All that a stage's function sees: no environment variable, no clock and no global seed reaches a result."""

    config: Any  # the stage's own Config
    run: Any  # the RunConfig: task, model, roles; shared by all stages of a pipeline
    iteration: int
    seed: int  # already mixed with stage name and iteration
    inputs: Mapping[str, Sequence[str]]  # upstream stage -> run ids, oldest first; absent = no such run yet
    replay: Reader
    engine: Engine
    artifact: Callable[[str, str], Path]  # (run id, artifact path) -> local path
    workdir: Path  # an empty folder, removed after the run
    checkpoints: Path  # folder of this fingerprint, there or not: it outlives a kill, and goes once the run is finished
    progress: Callable[[str, int], Progress]  # (what, total) -> bar
    share: Share = alone

    def latest(self, stage: str) -> str | None:
        """Run id of the newest input from `stage`, or None."""
        runs = self.inputs.get(stage, ())
        return runs[-1] if runs else None

    @property
    def policy_run(self) -> str | None:
        """Newest run that left a policy; None before the first."""
        return next((run for stage in POLICY_STAGES if (run := self.latest(stage))), None)

    def policy_adapter(self) -> str | None:
        """Name of the newest policy's adapter, loaded into the engine; None = the base model."""
        return next((self.adapter(stage) for stage in POLICY_STAGES if self.latest(stage)), None)

    def adapter(self, stage: str, folder: str = "adapter") -> str | None:
        """Name of the adapter that the newest run of `stage` left, loaded into the engine; None = there is no run."""
        if (run_id := self.latest(stage)) is None:
            return None
        name = f"{run_id}-{folder}"
        self.engine.load_adapter(name, self.artifact(run_id, folder))
        return name


@dataclass(frozen=True)
class Stage:
    """One step of the pipeline. Bump `version` by hand whenever the same inputs would give another result."""

    name: str
    version: int
    config: type[Config]
    inputs: tuple[str, ...]
    roles: tuple[str, ...]
    run: Callable[[Context], Outputs]
    shared: tuple[str, ...] = ("task", "model", "roles")  # sections of the RunConfig that it reads
    outputs: tuple[str, ...] = ()  # tables and artifacts it writes, for `turnwise stages`
    trains: bool = False  # by gradient steps, which several processes can share out
    shares: bool = False  # plays or asks so much that shards of it can be runs of their own
    # upstream stage -> roles that are prompted only where it has a run
    roles_with: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    roles_if_there: tuple[str, ...] = ()  # roles that it may prompt, and does without where a task has none

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections of the RunConfig that it goes by: those that it reads, and how many processes work."""
        return (*self.shared, *(["train"] if self.trains else []), *(["run"] if self.shares else []))


def check_roles(stage: Stage, inputs: Collection[str], prompts: Collection[str], *, where: str) -> None:
    """Raises UsageError where the stage would prompt a role that is none of `prompts`, those of the folder `where`."""
    unused = {role for upstream, roles in stage.roles_with.items() if upstream not in inputs for role in roles}
    if missing := [role for role in stage.roles if role not in prompts and role not in unused]:
        folder = where if "/" in where else f"stages/llm/prompts/{where}"
        raise UsageError(
            f"roles.prompts: {stage.name} prompts the role {missing[0]}, which {folder} has no file for; add {missing[0]}.md to it"
        )


def ingredients(
    stage: Stage,
    config: Config,
    *,
    shared: Mapping[str, Any],
    seed: int,
    iteration: int,
    prompt_hashes: Mapping[str, str],
    model_hash: str,
    inputs: Mapping[str, Iterable[str]],
    contents: Mapping[str, str] = {},
) -> dict[str, Any]:
    """All that can change the stage's result, as plain JSON: what the fingerprint is made of, and nothing else.

    shared: the RunConfig's sections that the stage declares, as plain JSON. inputs: upstream stage -> run ids.
    prompt_hashes: of the roles that the task has prompts for. contents: config key -> hash of what the config names
    there (`stages.store.contents`). A retired key of the config counts with its old default, and an added one not at all
    where it changes nothing, so that stored runs keep their fingerprints. Source: docs/explanation/architecture.md.
    """
    retired = {key: old.value for key, old in config.RETIRED.items()}
    prompted = (*stage.roles, *stage.roles_if_there)
    content: dict[str, Any] = {
        "stage": stage.name,
        "version": stage.version,
        "config": config.counted() | retired,
        "shared": {name: shared[name] for name in stage.shared},
        "seed": seed,
        "iteration": iteration,
        "prompts": {role: prompt_hashes[role] for role in prompted if role in prompt_hashes},
        "model": model_hash,
        "inputs": {name: list(runs) for name, runs in inputs.items() if name in stage.inputs},
    }
    return {**content, "contents": dict(contents)} if contents else content


def fingerprint(content: Mapping[str, Any]) -> str:
    """sha256 of the ingredients; the order of keys changes nothing."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
