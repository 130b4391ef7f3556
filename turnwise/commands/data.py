"""`turnwise data`: fetches the published data of a task once into data/tasks, or a small model into data/models.

turnwise data fetch game24
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from flows import shipped
from flows.report import Display, answer, emit
from flows.workspace import find_home
from stages.frame.types import UsageError
from stages.sources import catalogue, fetch
from stages.sources.download import download
from stages.sources.models import MODELS, Warmed, fetch_model


def data(args: Namespace) -> int:
    """turnwise data fetch TASK, turnwise data list"""
    home = find_home(args.home)
    into = home / "data" / "tasks" if args.into is None else args.into.resolve()
    models = home / "data" / "models" if args.into is None else into
    if args.action == "list":
        return _list(args, into, models)
    if args.task is None:
        raise UsageError(
            f"data fetch: wanted a task or a model. Tasks: {', '.join(catalogue.TASKS)}. Models: {', '.join(MODELS)}."
        )
    if args.task in MODELS:
        return _model(args, home, models)
    task = fetch.task_data(args.task)
    with Display(quiet=args.quiet) as display:
        manifest = fetch.fetch(task, into, partial(download, bar=display.bar), source=args.source)
    folder = into / task.name
    if args.json:
        emit({"folder": str(folder), **manifest})
        return 0
    for name, entry in manifest["files"].items():
        print(f"{name:<27}{entry['rows']:>6,} rows  checked by {entry['check']:<7} {entry['licence']}")
        if entry["check"] == "read":
            rows = next(made.rows for made in task.files if made.name == name)
            print(f"{name}: the published file has {rows:,} rows; this is a part of it.", file=sys.stderr)
    print(f"{folder}. Use: turnwise run PRESET {_sets(task, folder, home)}")
    return 0


def _model(args: Namespace, home: Path, into: Path) -> int:
    os.chdir(home)
    if isinstance(model := MODELS[args.task], Warmed):
        shipped.bring(model.adapter)
    folder = fetch_model(args.task, into, source=None if args.source is None else args.source.resolve())
    shown = folder.relative_to(home) if folder.is_relative_to(home) else folder
    return answer(args, {"folder": str(folder)}, [f"{folder}. Use: turnwise run PRESET --set model.path={shown}"])


def _list(args: Namespace, into: Path, models: Path) -> int:
    rows: list[dict[str, Any]] = []
    for task in catalogue.TASKS.values():
        files = [
            {
                "name": f.name,
                "rows": f.rows,
                "sources": [of.url for of in f.of],
                "licence": f.of[0].licence,
                "known_sha256": bool(f.sha256),
            }
            for f in task.files
        ]
        rows.append({"task": task.name, "what": task.what, "state": fetch.state(task, into), "files": files})
    for model in MODELS.values():
        there = "present" if (models / model.name).exists() else "absent"
        rows.append({"task": model.name, "what": model.what, "state": there, "files": []})
    lines = []
    for row in rows:
        lines.append(f"{row['task']:<18}{row['state']:<9}{row['what']}")
        lines += [f"{'':<18}{one['name']:<27}{one['rows']:>6,} rows  {one['licence']}" for one in row["files"]]
    return answer(args, rows, [*lines, "To fetch one: turnwise data fetch NAME"])


def _sets(task: catalogue.TaskData, folder: Path, home: Path) -> str:
    """The `--set` of a run that plays the task on this data. Of several forms it is the first."""
    shown = folder.relative_to(home) if folder.is_relative_to(home) else folder
    options = task.readings(str(shown))[0].options
    return " ".join(
        [f"--set task.env={task.name}", *(f"--set task.options.{key}={value}" for key, value in options.items())]
    )
