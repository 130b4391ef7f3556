"""A preset is a whole run: a task, a method and a model (`flows/parts.py`), or your own TOML, which holds only what
differs.

    turnwise run demo --set critic.lr=1e-4 --set roles.frozen=adapter

Order: default < the preset that it `extends`, less what it `drops` < TOML < --set. An unknown key is an error that
names the nearest known key.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, create_model

from flows import parts, registry
from flows.misfits import SHOWN, quoted, sentence
from stages.frame.contract import Config
from stages.frame.sections import ModelConfig, RolesConfig, ShardConfig, TaskConfig, TrainConfig
from stages.frame.types import UsageError
from stages.llm.roles import load_roles

EachRun = Literal["new_seed", "further", "force", "champion"]
SCHEDULING = ("cron", "timezone", "overlap", "catch_up", "timeout_h", "each_run", "match_episodes")
"""Keys that say when and how a preset is served. No result of a stage depends on them."""
WANTS = (
    # None of these judges parts of a reply.
    *((method, "task.agent", "react") for method in ("nlac", "hindsight", "nlql", "nlrl", "sac")),
    ("nlac", "refine.futures_of", "successor"),
    ("hindsight", "refine.futures_of", "episode"),
    ("nlql", "pick.by", "verdict"),
    ("nlql", "pick.futures_of", "successor"),
    ("nlrl", "pick.by", "verdict"),
    ("nlrl", "pick.futures_of", "rollouts"),
    ("sac", "pick.by", "value"),
)
"""(method, key, the one value that the method works with). Other methods use other values of these keys."""

ON_POLICY = ("self_ac", "grpo", "sdpo")
"""Methods that cannot learn from episodes which another policy played."""


class RunConfig(Config):
    """A whole run. The class that `run_config` returns also has one section for each stage: that stage's Config."""

    preset: str = Field("", description="Name of the preset that the run was made from. [ours]")
    seed: int = Field(0, ge=0, description="Mixed with stage name and iteration into every stage's seed. [ours]")
    iterations: int = Field(4, ge=0, le=10_000)
    """Rounds of collecting and learning. A higher number continues a finished run. [ours]"""
    method: Literal["nlac", "hindsight", "self_ac", "nlql", "nlrl", "sac", "rft", "grpo", "sdpo"] = "nlac"
    """Which stages an iteration runs: NLAC, Self-AC or a baseline. [ours]"""
    episodes_of: str = ""
    """Learn from this pipeline run's episodes instead of own ones. Not for on-policy methods. [ours]"""
    sweeps: int = Field(1, ge=1)
    """Iterations in one round. Each iteration makes targets and trains the critic; a round collects and improves the policy once. So values flow back this many states a round. [ours; paper: every step makes its own targets]"""
    evaluate_every: int = Field(1, ge=1)
    """Iterations (with `sweeps`: rounds) between two evaluations. The last one is always evaluated. [ours]"""
    goes_on_from: str = Field("", pattern=r"^([0-9a-f]+:\d+)?$")
    """Continue after this iteration of another pipeline run, with a new seed. Example: 3f9c0a1b:3. [ours]"""
    cron: str = ""
    """When `turnwise serve` starts the preset, like '0 3 * * *'. Empty: only by hand. [ours]"""
    timezone: str = Field("UTC", description="Time zone of `cron`, by its name, like Europe/Berlin. [ours]")
    overlap: Literal["cancel", "queue"] = "cancel"
    """What happens to a run that is due while another run of the preset is going: cancel it, or queue it. [ours]"""
    catch_up: bool = False
    """When `turnwise serve` starts, make up for the last run that was missed. [ours]"""
    timeout_h: float = Field(0.0, ge=0)
    """Stop a deployment's run after this many hours, as by Ctrl-C. 0: never. [ours]"""
    each_run: EachRun = "new_seed"
    """What each scheduled run does. new_seed: its due time in Unix seconds is the seed. further: `iterations` more of the same run. force: everything once more. champion: `iterations` more from the champion; a better adapter takes its place. [ours]"""
    match_episodes: int = Field(400, ge=2)
    """Scenarios on which a run with each_run=champion is compared with the champion. [ours]"""
    task: TaskConfig = Field(default_factory=TaskConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    roles: RolesConfig = Field(default_factory=RolesConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    run: ShardConfig = Field(default_factory=ShardConfig)

    @property
    def lag(self) -> int:
        """That of collect, a section of the class that `run_config` returns."""
        found: int = getattr(self, "collect").lag  # noqa: B009
        return found

    @property
    def first_iteration(self) -> int:
        """The first of its own iterations. Earlier ones belong to another run."""
        return int(self.goes_on_from.partition(":")[2]) + 1 if self.goes_on_from else 0


@cache
def run_config() -> type[RunConfig]:
    """RunConfig with the section of every stage. Made on first use, because it imports the stages' modules."""
    sections: dict[str, Any] = {}
    for name in registry.STAGES:
        config = registry.load_stage(name).config
        sections[name] = (config, Field(default_factory=config))
    made: type[RunConfig] = create_model("RunConfig", __base__=RunConfig, __doc__=RunConfig.__doc__, **sections)
    return made


def names() -> list[str]:
    """All presets: the combinations that are tuned or tested."""
    return parts.tested()


def name_of(preset: str) -> str:
    """The name of a preset's runs: the current name, or that of its file. Raises UsageError with the nearest name."""
    return _file(preset).stem if preset.endswith(".toml") else parts.find(preset).name


def _file(preset: str, folder: str = "") -> Path:
    """The file at a path. folder: where it counts from."""
    preset = os.path.join(folder, preset)
    shown = preset if len(preset) <= SHOWN else f"...{preset[-SHOWN:]}"  # the name of a file stands at its end
    if not os.path.isfile(preset):  # not Path's, which raises where a name is too long
        raise UsageError(f"There is no preset file {shown}. Give a file that exists, or a name. See: turnwise presets")
    return Path(preset)


def load(preset: str, sets: Sequence[str] = ()) -> RunConfig:
    """The config of a preset, a name or a path that ends in .toml, with `section.key=value` changes.

    Raises UsageError for an unknown preset, section or key, with the nearest known one. Also for a value that does not
    fit, with its key, and for values that contradict each other.
    """
    run = resolve({**_values(preset), "preset": name_of(preset)}, sets)
    # Not in `resolve`, nor in the model: the config of a stored stage run has no method, and reads back with the
    # default one.
    for method, key, wanted in WANTS:
        section, name = key.split(".")
        found = getattr(getattr(run, section, None), name, wanted)
        if run.method == method and found != wanted:
            raise UsageError(
                f"{key}: method {method} needs {wanted}, but found {found!r}. Set this value, or choose another method."
            )
    if run.lag and run.method in ON_POLICY:
        raise UsageError(f"collect.lag: method {run.method} is on-policy, so its newest policy must play. Set it to 0.")
    if run.episodes_of and run.method in ON_POLICY:
        raise UsageError(
            f"episodes_of: method {run.method} is on-policy and cannot learn from stored episodes. Leave episodes_of out."
        )
    if not preset.endswith(".toml"):
        _check_prompts(run)
    return run


def _check_prompts(run: RunConfig) -> None:
    """Raises UsageError where the task's prompts lack a role that the method asks. Your own prompts are read later."""
    if "/" in run.roles.prompts:
        return
    asked = {role for stage in registry.METHODS[run.method] for role in registry.load_stage(stage).roles}
    if lacking := sorted(asked - set(load_roles(run.roles.prompts).templates)):
        raise UsageError(
            f"roles.prompts: method {run.method} asks {', '.join(lacking)}, but the prompts {run.roles.prompts} lack it. "
            "Choose another method, such as self_ac, or set other prompts."
        )


def _values(preset: str, above: tuple[Path, ...] = (), folder: str = "") -> dict[str, Any]:
    """The plain values of a preset. A file's values lie over those of the presets that it `extends`: a name or a list,
    the last one on top. The keys that it `drops` are left out. A path in `extends` counts from the file's own folder.
    """
    if not preset.endswith(".toml"):
        return parts.values(parts.find(preset))
    path = _file(preset, folder)
    chain = (*above, path)
    if path in above:
        circle = " -> ".join(one.stem for one in chain)
        raise UsageError(f"The presets {circle} extend each other in a circle. Remove `extends` from one of them.")
    values, below = parts.read_toml(path, "preset"), dict[str, Any]()
    for parent in _listed(values, "extends", path, "the name of a preset"):
        below = parts.laid_over(below, _values(parent, chain, str(path.parent)))
    for key in _listed(values, "drops", path, "a key, like task.options"):
        _drop(below, key, path)
    return parts.laid_over(below, values)


def _listed(values: dict[str, Any], key: str, path: Path, wanted: str) -> list[str]:
    """Takes out and returns the text or the list of texts at a key of a preset file."""
    found = values.pop(key, [])
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise UsageError(f"The preset {path.name}: {key} wants {wanted}, or a list of them.")
    return found


def _drop(values: dict[str, Any], key: str, path: Path) -> None:
    """Take a key, a whole section too, out of nested values. Raises UsageError where it is not there."""
    *sections, last = key.split(".")
    for name in sections:
        values = values.get(name, {}) if isinstance(values, dict) else {}
    if not isinstance(values, dict) or last not in values:
        raise UsageError(
            f"The preset {path.name}: drops: it inherits no {quoted(key)!r}. Leave it out, or name a key that it inherits."
        )
    del values[last]


def resolve(values: Mapping[str, Any], sets: Sequence[str] = ()) -> RunConfig:
    """Nested plain values, then `sets` over them, checked. Also reads back the config that a run stored."""
    merged = deepcopy(dict(values))
    for item in sets:
        _apply(merged, item)
    try:
        return run_config().model_validate(merged)
    except ValidationError as error:
        raise UsageError(sentence(error, run_config())) from None


def change(run: RunConfig, section: str, **values: Any) -> RunConfig:
    """A copy of `run` with keys of one section replaced, checked again."""
    plain = run.model_dump(mode="json")
    plain[section].update(values)
    return resolve(plain)


def _apply(values: dict[str, Any], item: str) -> None:
    """Write one `section.key=value` into nested values. The value is read as TOML, and as text where that fails."""
    key, equals, text = item.partition("=")
    *parents, last = key.strip().split(".")
    if not equals or not last or not all(parents):
        raise UsageError(f"--set {quoted(item)}: wanted section.key=value, for example --set critic.lr=1e-4.")
    for name in parents:
        inner = values.setdefault(name, {})
        if not isinstance(inner, dict):
            raise UsageError(f"--set {quoted(item)}: {name!r} is a value and has no keys.")
        values = inner
    try:
        values[last] = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        values[last] = text
