"""The data of tau_bench as a user has it on disk: databases, policies, tool definitions and tasks of a domain. None
ships with the package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from stages.envs import tau_airline, tau_retail
from stages.envs.files import bad_file, read_rows, text_of, whole_text_of
from stages.envs.splits import place
from stages.envs.tau_database import Base, Changes, Database
from stages.envs.tau_tools import Tool, call
from stages.frame.types import UsageError

Name = Literal["retail", "airline"]
TABLES: dict[Name, tuple[str, ...]] = {
    "retail": ("orders", "products", "users"),
    "airline": ("flights", "reservations", "users"),
}
TOOLS: dict[Name, Mapping[str, Tool]] = {"retail": tau_retail.TOOLS, "airline": tau_airline.TOOLS}
FILES = {"train": "tasks_train.jsonl", "validation": "tasks_dev.jsonl", "test": "tasks_test.jsonl"}
WANTED = 'Wanted one task a line: {"id": ..., "instruction": ..., "actions": [{"name": ..., "kwargs": {...}}], "outputs": [...]}.'
_GET_IT = "Run: turnwise data fetch tau_bench, and set task.options.path to the folder that holds retail/ and airline/."


@dataclass(frozen=True)
class Domain:
    """One domain, loaded. `base` is shared by all episodes; `solutions` keeps what each task's ground truth changes."""

    name: Name
    base: Base
    policy: str
    definitions: Sequence[Mapping[str, Any]]
    solutions: dict[str, Changes] = field(default_factory=dict)

    def call(self, database: Database, name: str, arguments: Mapping[str, Any]) -> tuple[Database, str]:
        return call(TOOLS[self.name], database, name, arguments)

    def solution(self, actions: Sequence[Mapping[str, Any]]) -> Changes:
        """What the actions of a ground truth leave changed. Their errors are part of it; a transfer changes nothing."""
        key = json.dumps(actions)
        if key not in self.solutions:
            database = Database(self.base)
            for action in actions:
                database, _ = self.call(database, action["name"], action["kwargs"])
            self.solutions[key] = database.changes()
        return self.solutions[key]


@lru_cache(maxsize=2)
def load_domain(path: str, name: Name) -> Domain:
    """Loaded once a process: environments and the report share it. Raises UsageError for what is missing or cannot be
    read.
    """
    folder = _folder(path, name)
    tables = {table: _object(folder / f"{table}.json", dict) for table in TABLES[name]}
    definitions = _object(folder / "tools.json", list)
    unknown = [tool for definition in definitions if (tool := _tool_name(definition, folder)) not in TOOLS[name]]
    if unknown:
        raise bad_file(
            folder / "tools.json", f"the tool {unknown[0]!r} is none of {name}'s", "Take the file of tau-bench 59a200c."
        )
    return Domain(name, Base(tables), _text(folder / "policy.md"), definitions)


def load_tasks(path: str, name: Name, split: str) -> list[dict[str, Any]]:
    """Tasks of a split as plain JSON. Raises UsageError, also for a split that the domain has none of."""
    file = _folder(path, name) / FILES[split]
    if not file.exists():
        offered = ", ".join(known for known, other in FILES.items() if (file.parent / other).exists()) or "none"
        advice = (
            " Train on retail, or on tasks of your own; never on the test tasks."
            if name == "airline" and split == "train"
            else ""
        )
        raise UsageError(
            f"tau_bench has no split {split!r} of {name}: there is no {file.name} in {str(file.parent)!r}, only {offered}.{advice}"
        )
    return [_task(row, file, where) for where, row in read_rows(file, WANTED)]


def split_tasks(path: str, name: Name, split: str, held_out: int, seed: int) -> list[dict[str, Any]]:
    """The same with so many of the training tasks, chosen by a seeded hash of their ids, in validation instead. Raises
    UsageError.
    """
    tasks = load_tasks(path, name, split)
    if split == "test" or not held_out:
        return tasks
    train = tasks if split == "train" else load_tasks(path, name, "train")
    if held_out >= len(train):
        raise UsageError(
            f"task.options.validation_tasks of tau_bench: wanted fewer than the {len(train)} training tasks, found {held_out}."
        )
    chosen = {task["id"] for task in sorted(train, key=lambda task: place(task["id"], seed))[:held_out]}
    if split == "train":
        return [task for task in train if task["id"] not in chosen]
    return tasks + [task for task in train if task["id"] in chosen]


def _task(row: dict[str, Any], file: Path, where: str) -> dict[str, Any]:
    actions, outputs = row.get("actions"), row.get("outputs", [])
    right = isinstance(actions, list) and all(
        isinstance(a, dict) and isinstance(a.get("name"), str) and isinstance(a.get("kwargs"), dict) for a in actions
    )
    if not right:
        raise bad_file(file, f"{where} has no list 'actions' of names and kwargs", WANTED)
    if not isinstance(outputs, list) or not all(isinstance(output, str) for output in outputs):
        raise bad_file(file, f"{where} has 'outputs' that are no list of texts", WANTED)
    name, instruction = text_of(row, "id", file, where, WANTED), whole_text_of(row, "instruction", file, where, WANTED)
    return {"id": name, "instruction": instruction, "actions": actions, "outputs": outputs}


def _folder(path: str, name: Name) -> Path:
    if not path:
        raise UsageError(f"task.options.path: tau_bench ships no data. {_GET_IT}")
    folder = Path(path) / name
    if not folder.is_dir():
        raise UsageError(f"task.options.path: there is no folder {name!r} in {path!r}. {_GET_IT}")
    return folder


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise UsageError(f"task.options.path: cannot read {str(file)!r}: {reason}. {_GET_IT}") from error


def _object(file: Path, kind: type) -> Any:
    try:
        found = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise bad_file(file, "there is no JSON", _GET_IT) from error
    if not isinstance(found, kind):
        raise bad_file(file, f"the JSON is no {'object' if kind is dict else 'list'}", _GET_IT)
    return found


def _tool_name(definition: Any, folder: Path) -> str:
    try:
        return str(definition["function"]["name"])
    except (TypeError, LookupError):
        raise bad_file(
            folder / "tools.json", "a tool has no function with a name", "Wanted OpenAI's function format."
        ) from None
