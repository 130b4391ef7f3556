"""A study from its file: methods x tasks x seeds, each method's control, and how all are tuned. Ours.

    turnwise study studies/tiny.toml

The rules of a fair comparison are checked here, before anything runs. Settings are never chosen on seeds of the table.
All tuned methods are tuned over the same number of settings.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo

from flows import parts
from flows.misfits import sentence
from stages.envs import nearest
from stages.frame.contract import Config
from stages.frame.types import UsageError

PRESET = "preset"
"""In the place of a method's name in `settings`: its preset's own settings, which are not tuned."""


def _anchored(preset: str, info: ValidationInfo) -> str:
    return str((info.context or Path()) / preset) if preset.endswith(".toml") else preset


Preset = Annotated[str, AfterValidator(_anchored)]
"""Name of a preset, or a path that ends in .toml and counts from the folder of the study's file."""

Seeds = Annotated[tuple[int, ...], Field(min_length=1)]
BySeed = dict[str, tuple[Any, ...]]


class Method(Config):
    """An arm of the comparison."""

    preset: Preset = Field(description="Preset of its runs: a name, or a path that ends in .toml. [ours]")
    sets: tuple[str, ...] = Field((), description="Changes to the preset, as `--set` takes them. [ours]")
    control: str = Field("", description="Method that its results are compared with, seed by seed. [ours]")
    tasks: tuple[str, ...] = Field((), description="Tasks of its runs. Empty: all. [ours]")
    seeds: int = Field(0, ge=0, description="Number of the table's seeds that it runs, from the first. 0: all. [ours]")
    settings: str = ""
    """Which tuned settings it uses. Empty: its own. A method's name: that method's, with its own `sets` on top, as for an ablation. preset: its preset's. [ours]"""


class Task(Config):
    """What all methods are run on."""

    sets: tuple[str, ...] = Field((), description="Changes to every method's preset. [ours]")
    presets: dict[str, Preset] = Field(default_factory=dict, description="Presets on this task, by method. [ours]")
    seeds: int = Field(0, ge=0, description="Number of the table's seeds that it is run on, as for a method. [ours]")


class Tuning(Config):
    """The part before the table: each method gets the same number of settings, on seeds that the table does not use."""

    seeds: Seeds = Field(description="Seeds of its runs, none of which the table has. [ours]")
    by_seed: BySeed = Field(default_factory=dict, description="As the study's own, for these seeds. [ours]")
    n: int = Field(ge=2, description="Number of settings for each method. The first one is the preset's own. [ours]")
    tasks: tuple[str, ...] = Field((), description="Tasks that tuning runs on. Empty: all. [ours]")
    draw: int = Field(0, ge=0, description="Seed that draws the other settings from the space. [ours]")
    ties: Literal["first", "sooner"] = "first"
    """Which of several settings with the same best mean is chosen: the first, or the one that wins most on the way there, a mean of its validation curve. [ours]"""
    space: dict[str, dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]]]
    """By method: `section.key` -> the values that are tried. [ours]"""


class Study(Config):
    """A whole study."""

    title: str = Field("Study", description="What the report is called. [ours]")
    seeds: Seeds = Field(description="Seeds of the table, the same ones for every method. [ours]")
    sets: tuple[str, ...] = Field((), description="Changes to every preset, below those of task and method. [ours]")
    by_seed: BySeed = Field(default_factory=dict)
    """`section.key` -> one value for each seed, in their order: what a seed draws besides, such as the rule book of a desk. [ours]"""
    source: str = ""
    """Method whose stored episodes every other method learns from that can; empty = each one plays its own. [ours]"""
    level: float = Field(0.6, gt=0, le=1)
    """Validation win rate of which the table says when it was reached. [ours]"""
    methods: dict[str, Method] = Field(min_length=1, description="The arms, by the names of the report. [ours]")
    tasks: dict[str, Task] = Field({"as preset": Task()}, min_length=1, description="The tasks. [ours]")
    tuning: Tuning | None = Field(None, description="How settings are chosen; none = they are the presets'. [ours]")

    @property
    def tuned(self) -> tuple[str, ...]:
        """The methods that are tuned themselves."""
        return tuple(name for name in self.methods if self.tuning and self.settings_of(name) == name)

    @property
    def tuning_tasks(self) -> tuple[str, ...]:
        return () if self.tuning is None else self.tuning.tasks or tuple(self.tasks)

    def settings_of(self, method: str) -> str:
        """The method whose tuned settings this one runs with; PRESET where none are tuned for it."""
        return PRESET if self.tuning is None else self.methods[method].settings or method

    def preset(self, method: str, task: str) -> str:
        return self.tasks[task].presets.get(method, self.methods[method].preset)

    def runs(self, method: str, task: str, seed: int) -> bool:
        """Whether the table has that run. Where both method and task have fewer seeds, the smaller number counts."""
        one = self.methods[method]
        seeds = self.seeds[: one.seeds or None][: self.tasks[task].seeds or None]
        return (not one.tasks or task in one.tasks) and seed in seeds

    def sets_of(self, method: str, task: str, seed: int) -> tuple[str, ...]:
        """What is laid over the preset, the last one on top; the setting and the seed come after it."""
        drawn = [
            f"{key}={json.dumps(values[part.seeds.index(seed)])}"
            for part in (self, self.tuning)
            if part is not None and seed in part.seeds
            for key, values in part.by_seed.items()
        ]
        return (*self.sets, *drawn, *self.tasks[task].sets, *self.methods[method].sets)

    def setting_of(self, method: str, chosen: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """What was tuned for a method. Of another's settings an arm takes all but the keys that it is there to change."""
        source = self.settings_of(method)
        if source == PRESET:
            return ()
        if source == method:
            return chosen[source]
        own = {item.partition("=")[0] for item in self.methods[method].sets}
        return tuple(item for item in chosen[source] if item.partition("=")[0] not in own)

    def grid(self, method: str) -> list[tuple[str, ...]]:
        """Every point of a method's space, as `--set` takes it, in the order of the file."""
        space = self.tuning.space[method] if self.tuning else {}
        return [
            tuple(f"{key}={json.dumps(value)}" for key, value in zip(space, values, strict=True))
            for values in itertools.product(*space.values())
        ]


def read(path: Path) -> Study:
    """The study that a file describes. Raises UsageError for an unknown word, with the nearest known one; for a value
    that does not fit; and for an unfair comparison.
    """
    if not path.is_file():
        raise UsageError(f"There is no study file {path}. Give a file that exists, such as studies/tiny.toml.")
    values = parts.read_toml(path, "study")
    try:
        study = Study.model_validate(values, context=path.resolve().parent)
    except ValidationError as error:
        raise UsageError(f"{path.name}: {sentence(error, Study)}") from None
    for problem in _problems(study):
        raise UsageError(f"{path.name}: {problem}")
    return study


def _problems(study: Study) -> list[str]:
    methods, tasks = list(study.methods), list(study.tasks)
    named = [(f"methods.{name}.control", one.control) for name, one in study.methods.items() if one.control]
    named += [(f"tasks.{name}.presets", method) for name, one in study.tasks.items() for method in one.presets]
    found = [
        f"{key}: there is no method {word!r}{nearest(word, methods)}" for key, word in named if word not in methods
    ]
    asked = [(f"methods.{name}.tasks", task) for name, one in study.methods.items() for task in one.tasks]
    found += [f"{key}: there is no task {word!r}{nearest(word, tasks)}" for key, word in asked if word not in tasks]
    counts = [(f"methods.{name}.seeds", one.seeds) for name, one in study.methods.items()]
    counts += [(f"tasks.{name}.seeds", one.seeds) for name, one in study.tasks.items()]
    found += [
        f"{key}: wanted at most {len(study.seeds)}, as many as the table has; found {n}."
        for key, n in counts
        if n > len(study.seeds)
    ]
    found += [f"{name!r}: a name holds no '/', which --only parts at." for name in (*methods, *tasks) if "/" in name]
    if study.source and study.source not in methods:
        found.append(f"source: there is no method {study.source!r}{nearest(study.source, methods)}")
    elif study.source and (study.methods[study.source].tasks or study.methods[study.source].seeds):
        found.append(f"methods.{study.source}: the others learn from its episodes. Leave out its `tasks` and `seeds`.")
    if study.source and study.tuning is not None:
        found.append(
            "source: on frozen episodes nothing is tuned. Write the settings into the methods' `sets`, and leave out [tuning]."
        )
    found += _repeated("seeds", study.seeds) + _uneven("by_seed", study.by_seed, study.seeds)
    laid = [study.sets, *(one.sets for one in study.methods.values()), *(one.sets for one in study.tasks.values())]
    sets = [item for each in laid for item in each]
    found += [
        f"sets: {item!r} is not allowed here. Write `seeds` in the study instead."
        for item in sets
        if item.startswith("seed=")
    ]
    if study.tuning is not None:
        found += _problems_of_tuning(study, study.tuning)
    elif own := [name for name, one in study.methods.items() if one.settings]:
        found.append(f"methods.{own[0]}.settings: nothing is tuned. Add [tuning], or leave `settings` out.")
    return found


def _problems_of_tuning(study: Study, tuning: Tuning) -> list[str]:
    found = _repeated("tuning.seeds", tuning.seeds) + _uneven("tuning.by_seed", tuning.by_seed, tuning.seeds)
    both = sorted(set(tuning.seeds) & set(study.seeds))
    if both:
        found.append(f"tuning.seeds: {both[0]} is a seed of the table, too. Choose settings on other seeds.")
    found += [
        f"tuning.tasks: there is no task {task!r}{nearest(task, list(study.tasks))}"
        for task in tuning.tasks
        if task not in study.tasks
    ]
    for name, method in study.methods.items():
        source = study.settings_of(name)
        if source == name and name not in tuning.space:
            found.append(
                f"tuning.space: {name} has none. Add [tuning.space.{name}], or name in methods.{name}.settings the method whose settings it uses."
            )
        elif source not in (name, PRESET) and source not in study.tuned:
            words = [PRESET, *study.tuned]
            found.append(f"methods.{name}.settings: {method.settings!r} is not tuned{nearest(source, words)}")
    for name in tuning.space:
        if name not in study.tuned:
            found.append(f"tuning.space: {name!r} is no method that is tuned{nearest(name, list(study.tuned))}")
    return found


def _repeated(key: str, seeds: Sequence[int]) -> list[str]:
    twice = [seed for seed in dict.fromkeys(seeds) if seeds.count(seed) > 1]
    return [f"{key}: {twice[0]} stands there twice."] if twice else []


def _uneven(name: str, by_seed: BySeed, seeds: Sequence[int]) -> list[str]:
    return [
        f"{name}: wanted {len(seeds)} values of {key!r}, one for each seed; found {len(values)}."
        for key, values in by_seed.items()
        if len(values) != len(seeds)
    ]
