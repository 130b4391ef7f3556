"""A preset is made of a task, a method and a model. Each is one TOML in `presets/`; their names make the preset's name.

    turnwise run desk                       # by default the method nlac and the task's own small model
    turnwise run tau_retail+grpo+qwen7b     # in any order

Order: task < model < method; a real model of `size = "small"` stands last, and changes what was tuned for a tiny one.
A part's file has sections with names of their own:

    [small], [large]                    values for the task's own model and small real ones, or for other named models
    [small.on.TASK], [large.on.TASK]    of a method's file: values tuned on a task, also for tasks that extend it
    [on.TASK]                           the same of a model's file

A part or such a section may extend a part of its kind. A task's `default_method` replaces nlac. A method's `tested`
names the tasks that it is tuned or tested on. This module imports little: shell completion loads it.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any

from stages.frame.types import UsageError

FOLDER = Path(__file__).parent / "presets"
KINDS = ("task", "method", "model")
METHOD = "nlac"
SHORT = {"demo": "desk"}
"""Short name -> the task that it is."""
UNTIL = "0.3"
"""The release that drops the earlier names."""
SHOWN = 80  # letters of a name that is quoted in an error


@dataclass(frozen=True)
class Combination:
    """A task, a method and a model; "" is the task's own model. name: leaves out defaults; runs store it."""

    name: str
    task: str
    method: str
    model: str


def files(kind: str) -> dict[str, Path]:
    """The parts of a kind, sorted."""
    return {path.stem: path for path in sorted((FOLDER / f"{kind}s").glob("*.toml"))}


@cache
def kinds() -> dict[str, str]:
    """Every part -> its kind."""
    return {name: kind for kind in KINDS for name in files(kind)}


@cache
def names_of_before() -> dict[str, str]:
    """Name that a preset had -> the combination that it is now."""
    return {old: str(new) for old, new in read_toml(FOLDER / "old.toml", "table").items()}


def tested() -> list[str]:
    """The combinations that are tuned or tested, sorted. "All presets" means these."""
    each = ((method, task) for method in files("method") for task in _read("method", method).get("tested", ()))
    return sorted(_find(f"{task}+{method}").name for method, task in each)


def find(name: str) -> Combination:
    """The combination of a name. An earlier name prints a note on stderr. Raises UsageError with the nearest known part."""
    if name in names_of_before():
        _tell_once(name, names_of_before()[name])
    return _find(names_of_before().get(name, name))


def current(name: str) -> str:
    """The current name of a stored name. The name of your own file stays as it is."""
    try:
        return _find(names_of_before().get(name, name)).name
    except UsageError:
        return name


def before(name: str) -> list[str]:
    """Other names under which runs of this preset may be stored."""
    return [old for old in (*SHORT, *names_of_before()) if old != name and current(old) == name]


@cache
def _tell_once(old: str, new: str) -> None:
    print(f"Preset {old!r} is now {new!r}; the old name works until {UNTIL}.", file=sys.stderr)


def _find(name: str) -> Combination:
    words = [SHORT.get(word, word) for word in name.split("+")]
    for word in words:
        if word not in kinds():
            raise UsageError(_unknown(name, word))
    parts = {kind: [word for word in words if kinds()[word] == kind] for kind in KINDS}
    shown = _shown(name)
    for kind, found in parts.items():
        if len(found) > 1:
            raise UsageError(f"Preset {shown!r} names two {kind}s, {found[0]} and {found[1]}. Leave one of them out.")
    if not parts["task"]:
        raise UsageError(f"Preset {shown!r} names no task. Put one before it, as in {_example(words)}.")
    (task,) = parts["task"]
    default = _default_method(task)
    method, model = next(iter(parts["method"]), default), next(iter(parts["model"]), "")
    told = "+".join(part for part in (task, method if method != default else "", model) if part)
    if model_of(model)[0] == "small" and "path" not in _task(task, "small").get("model", {}):
        first = next(name for name in files("model") if model_of(name)[0] == "large")
        what = f"has no values for a small model like {model}" if model else "has no model of its own"
        raise UsageError(
            f"Preset {shown!r}: the task {task} {what}. Name one, as in {told.removesuffix(f'+{model}')}+{first}."
        )
    return Combination(told, task, method, model)


def _example(words: Sequence[str]) -> str:
    """A tested combination that has these parts, or the first of them."""
    having = [one for one in tested() if set(words) <= set(one.split("+"))]
    return min(having, key=lambda one: not one.startswith("desk"), default=f"desk+{'+'.join(words)}")


def _unknown(name: str, word: str) -> str:
    from stages.envs import nearest  # here, since it imports more than a completion should

    if word.startswith("_"):
        return f"There is no preset {_shown(word)!r}: such files are gone. Extend a combination, such as tau_retail+qwen7b."
    meant = nearest(_shown(word), [*SHORT, *kinds()])
    what = f"no preset {_shown(word)!r}" if word == name else f"no task, method or model {_shown(word)!r}"
    return f"There is {what}{meant} See: turnwise presets"


def _shown(name: str) -> str:
    return name if len(name) <= SHOWN else f"{name[:SHOWN]}..."


def values(combination: Combination) -> dict[str, Any]:
    """The plain values of a combination."""
    size, model = model_of(combination.model)
    task, tasks = _task(combination.task, size), [name for name, _ in _with_parents(combination.task)]
    method = _method(combination.method, size, tasks)
    on = model.pop("on", {})
    model = reduce(laid_over, (on[name] for name in tasks if name in on), model)
    order = (task, method, model) if size == "small" else (task, model, method)
    return reduce(laid_over, order, {})


def model_of(name: str) -> tuple[str, dict[str, Any]]:
    """Size and values of a model; of the task's own, which is small, there are no values."""
    found = _read("model", name) if name else {"size": "small"}
    return found.pop("size", "large"), found


def _with_parents(task: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A task and its file, after those that it extends."""
    found = _read("task", task)
    if parent := found.pop("extends", ""):
        yield from _with_parents(parent)
    yield task, found


@cache
def _default_method(task: str) -> str:
    return str([found.get("default_method", METHOD) for _, found in _with_parents(task)][-1])


def _task(name: str, size: str) -> dict[str, Any]:
    below: dict[str, Any] = {}
    for _, found in _with_parents(name):
        found.pop("default_method", None)
        for section in _of_size(found, size):
            below = laid_over(below, section)
    return below


def _method(name: str, size: str, tasks: Sequence[str]) -> dict[str, Any]:
    """A method's values on a task. tasks: the task's name after the names of those that it extends."""
    found = _read("method", name)
    found.pop("tested", None)
    whole, sized = _of_size(found, size)
    on = sized.pop("on", {})
    sections = [whole, sized, *(on[task] for task in tasks if task in on)]
    parents = [section.pop("extends") for section in sections if "extends" in section]
    below: dict[str, Any] = {}
    for section in [*(_method(parent, size, tasks) for parent in parents), *sections]:
        below = laid_over(below, section)
    return below


def _of_size(found: dict[str, Any], size: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a part's file says of both sizes, and of this one."""
    sizes = {each: found.pop(each, {}) for each in ("small", "large")}
    return found, sizes[size]


def _read(kind: str, name: str) -> dict[str, Any]:
    return read_toml(FOLDER / f"{kind}s" / f"{name}.toml", kind)


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The plain values of a file. Raises UsageError with what the file is, where it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no text, no TOML, a number of 5,000 digits; too deep
        raise UsageError(f"The {what} {path.name} is not readable TOML: {error}.") from None
    except OSError as error:
        raise UsageError(f"The {what} {path} cannot be read: {error.strerror}.") from None


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values over others. A value below stays where there is none above."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = laid_over(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
