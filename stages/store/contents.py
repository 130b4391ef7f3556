"""Hashes of what a config only names: files by their content, a task's environment by its code.

A field's type declares it (`DataPath`, `TaskOptions` in stages/frame/contract.py). A stage's fingerprint holds the
hashes for the sections that it reads. Hashes are kept while the process lives. A code hash is computed once; a file is
read again when its size or time changes.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stages import envs
from stages.frame.contract import FromPath, OfModule, OfTask, Stage
from stages.frame.own import is_own, own_file, own_module
from stages.store.artifacts import sha256


def contents(stage: Stage, run: Any) -> dict[str, str]:
    """Config key -> hash, of all that the sections name which the stage reads.

    run: the RunConfig. Raises UsageError for an environment, or an option of it, that there is not.
    """
    found: dict[str, str] = {}
    for name in {stage.name, *stage.shared}:
        section: BaseModel = getattr(run, name)
        found |= _named(section, name)
        for key, _ in _marked(section, OfModule):
            if is_own(module := getattr(section, key)):
                found[f"{name}.{key}"] = code_hash(own_module(f"{name}.{key}", module, ()).__name__)
        for key, _ in _marked(section, OfTask):
            options = envs.checked_options(run.task.env, {**run.task.options, **getattr(section, key)})
            found |= _named(options, f"{name}.{key}")
    if "task" in stage.shared:
        found["task.env"] = code_hash(envs.module_name(run.task.env))
    return found


def named_paths(stage: Stage, run: Any) -> set[str]:
    """The files and folders that the sections name which the stage reads. run: the RunConfig."""
    found = set()
    for name in {stage.name, *stage.shared}:
        section: BaseModel = getattr(run, name)
        options = [
            envs.checked_options(run.task.env, {**run.task.options, **getattr(section, key)})
            for key, _ in _marked(section, OfTask)
        ]
        for one in (section, *options):
            for key, marker in _marked(one, FromPath):
                path: str = getattr(one, key)
                if path and (not marker.used_with or getattr(one, marker.used_with)):
                    beside = str(Path(path).parent / marker.beside) if marker.beside else path
                    found |= {path, beside}
    if "roles" in stage.shared and "/" in run.roles.prompts:  # its texts are in the fingerprint role by role
        found.add(run.roles.prompts)
    return found


def own_parts(run: Any) -> dict[str, str]:
    """The project's own code and prompts in a run: config key -> its path and the start of its hash.

    run: the RunConfig. Raises UsageError as `contents` does.
    """
    found = {}
    if is_own(run.task.env):
        found["task.env"] = f"{own_file(run.task.env)} {code_hash(envs.module_name(run.task.env))[:12]}"
    if "/" in run.roles.prompts:
        found["roles.prompts"] = f"{os.path.normpath(run.roles.prompts)} {path_hash(run.roles.prompts)[:12]}"
    return found


def path_hash(path: str) -> str:
    """sha256 of a file, or of all files of a folder with their names; "" where there is none to be read."""
    start = Path(path).absolute()
    files = sorted(file for file in start.rglob("*") if file.is_file()) if start.is_dir() else [start]
    try:
        return _digest(
            [
                (str(file.relative_to(start)), _file_hash(str(file), (seen := file.stat()).st_size, seen.st_mtime_ns))
                for file in files
            ]
        )
    except OSError:
        return ""


@cache
def code_hash(module: str) -> str:
    """sha256 of a module and of the modules of its package that it imports, at any depth. Comments and layout do not
    count.

    Each counts with its data, the files `data/<its name>.*` beside it. The package of your own module is the top folder
    of its name in the project folder. Its imports of shipped environments are followed, too.
    """
    shipped, top = f"{envs.__name__}.", module.partition(".")[0]
    own = () if module.startswith(shipped) else (f"{top}.",)
    found: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        spec = _spec(name)
        if name in found or spec is None or spec.origin is None:
            continue
        file = Path(spec.origin)
        if file.suffix != ".py":
            found[name] = path_hash(str(file))
            continue
        tree = ast.parse(file.read_bytes())
        data = [
            (one.name, path_hash(str(one)))
            for one in sorted((file.parent / "data").glob(f"{name.rpartition('.')[2]}.*"))
        ]
        found[name] = _digest([ast.unparse(tree), data])
        named = (*_imported(tree, spec), *_above(name))
        waiting += [each for each in named if each.startswith(shipped) or f"{each}.".startswith(own)]
    return _digest(sorted(found.items()))


def _named(section: BaseModel, name: str) -> dict[str, str]:
    """Config key -> hash of what stands at its path, of the fields of a section that name one."""
    found: dict[str, str] = {}
    for key, marker in _marked(section, FromPath):
        path: str = getattr(section, key)
        if path and (not marker.used_with or getattr(section, marker.used_with)):
            beside = (
                [path_hash(str(Path(path).parent / marker.beside))] if marker.beside and Path(path).is_file() else []
            )
            found[f"{name}.{key}"] = _digest([path_hash(path), *beside])
    return found


def _marked(section: BaseModel, kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """(key, marker) of the fields with a marker of that kind."""
    fields: dict[str, FieldInfo] = type(section).model_fields
    for key, info in fields.items():
        yield from ((key, marker) for marker in info.metadata if isinstance(marker, kind))


def _imported(tree: ast.Module, spec: ModuleSpec) -> Iterator[str]:
    """Full names that a module imports: of modules, and of what may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), spec.parent)
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def _above(module: str) -> Iterator[str]:
    """The packages that a module lies in: their code runs as it is imported."""
    while module := module.rpartition(".")[0]:
        yield module


def _spec(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except ImportError:  # `from package.module import name`: the name is no module, and the module no package
        return None


@cache
def _file_hash(path: str, size: int, mtime_ns: int) -> str:
    return sha256(Path(path))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
