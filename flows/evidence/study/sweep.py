"""A sweep: all combinations of the values on a command line, on some seeds. It is a study without tuning. Ours.

    turnwise run demo --set critic.lr=[1e-3,5e-4] --seeds 5

If a key's type is a list or any type, a list is one value. If the key takes one number or text, each element is tried.
`seed=[3,4]` names the seeds.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tomllib
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from flows import presets
from flows.evidence.study.figures import stratified_mean
from flows.evidence.study.rows import Row
from stages import envs
from stages.frame.types import UsageError


def is_sweep(preset: str, sets: Sequence[str], home: Path = Path()) -> bool:
    """Whether a change lists several values for a key that takes one."""
    return any(_listed(item, preset, sets, home) is not None for item in sets)


def study_text(preset: str, sets: Sequence[str], seeds: int | None, home: Path = Path()) -> str:
    """The sweep as a study's file; `turnwise study` repeats it. seeds: how many, counted up from the preset's. home:
    the project folder, which holds a user's own environment.

    Raises UsageError for an empty list, for seeds that are named twice, and as `presets.load` does.
    """
    fixed, axes, named = list[str](), list[list[str]](), list[int]()
    for item in sets:
        values = _listed(item, preset, sets, home)
        if values == []:
            raise UsageError(f"--set {item}: wanted at least one value in the list.")
        if values is None:
            fixed.append(item)
        elif _key(item) == "seed":
            named = [presets.load(preset, [one]).seed for one in dict.fromkeys(values)]
        else:
            axes.append(list(dict.fromkeys(values)))
    if named and seeds is not None:
        raise UsageError("--seeds: --set seed=[...] names the seeds, too. Leave one of them out.")
    if seeds is not None and seeds < 1:
        raise UsageError(f"--seeds {seeds}: wanted at least 1.")
    first = presets.load(preset, fixed).seed
    asked = named or list(range(first, first + (seeds or 1)))
    return _toml(preset, [item for item in fixed if _key(item) != "seed"], itertools.product(*axes), asked, sets)


def results(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """By setting, in the order of the rows: mean of the win rates on test, its interval, their standard deviation, and
    the runs. One seed has neither interval nor deviation.
    """
    found = []
    for setting in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == setting]
        rates = [float(row["final"]) for row in mine]
        mean, many = stratified_mean([rates]), len(rates) > 1
        found.append(
            {
                "setting": setting, "mean": mean.value, "low": mean.low if many else None, "high": mean.high if many else None,
                "sd": statistics.stdev(rates) if many else None, "seeds": [row["seed"] for row in mine],
                "by_seed": rates, "runs": [row["run"] for row in mine],
            }
        )  # fmt: skip
    return found


def _toml(preset: str, sets: Sequence[str], points: Any, seeds: Sequence[int], asked: Sequence[str]) -> str:
    """What JSON writes of texts, numbers and lists of them is TOML, too."""
    file = str(Path(preset).resolve()) if preset.endswith(".toml") else preset
    told = [item for item in asked if _key(item) != "seed"]
    title = f"{' '.join([Path(preset).stem, *told])} on seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    lines = [f"title = {_quoted(title)}", f"seeds = {_quoted(list(seeds))}", f"sets = {_quoted(list(sets))}"]
    for point in points:
        name = ", ".join(point).replace("/", "|") or Path(preset).stem  # a study's names hold no "/"
        lines += [f"[methods.{_quoted(name)}]", f"preset = {_quoted(file)}", f"sets = {_quoted(list(point))}"]
    return "\n".join(lines) + "\n"


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _key(item: str) -> str:
    return item.partition("=")[0].strip()


def _listed(item: str, preset: str, sets: Sequence[str], home: Path) -> list[str] | None:
    """The changes, one an element, that a list stands for; None where it is one value, or no list."""
    key, (_, _, text) = _key(item), item.partition("=")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return None
    if not isinstance(value, list) or (kind := _type_of(key, preset, sets, home)) is None or _takes_list(kind):
        return None
    return [f"{key}={json.dumps(one, ensure_ascii=False, default=str)}" for one in value]


def _type_of(key: str, preset: str, sets: Sequence[str], home: Path) -> Any:
    """The type of a config key, of one of the environment's options as well; None where there is no such key."""
    *sections, last = key.split(".")
    model: Any = presets.run_config()
    if sections in (["task", "options"], ["evaluate", "test_options"]):
        env = next((one.partition("=")[2] for one in reversed(sets) if _key(one) == "task.env"), "")
        env = env.strip("\"'") or presets.load(preset).task.env
        with chdir(home):
            model = envs.options_of(env)
    else:
        for name in sections:
            known = getattr(model, "model_fields", {})
            model = known[name].annotation if name in known else None
    field = model.model_fields.get(last) if isinstance(model, type) and issubclass(model, BaseModel) else None
    return None if field is None else field.annotation


def _takes_list(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if origin in (Union, UnionType):
        return any(map(_takes_list, get_args(kind)))
    if origin is Annotated:
        return _takes_list(get_args(kind)[0])
    return origin is Any or (isinstance(origin, type) and issubclass(origin, list | tuple | set | frozenset))
