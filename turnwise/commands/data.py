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
from flows.report import Display, emit
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
        return _list(into, models, as_json=args.json)
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
            print(
                f"{name}: the published file has {_published_rows(task, name):,} rows; this is a part of it.",
                file=sys.stderr,
            )
    print(f"{folder}. Use: turnwise run PRESET {_sets(task, folder, home)}")
    return 0


def _model(args: Namespace, home: Path, into: Path) -> int:
    os.chdir(home)
    if isinstance(model := MODELS[args.task], Warmed):
        shipped.bring(model.adapter)
    folder = fetch_model(args.task, into, source=None if args.source is None else args.source.resolve())
    shown = folder.relative_to(home) if folder.is_relative_to(home) else folder
    if args.json:
        emit({"folder": str(folder)})
    else:
        print(f"{folder}. Use: turnwise run PRESET --set model.path={shown}")
    return 0


def _list(into: Path, models: Path, *, as_json: bool) -> int:
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
        state = "present" if (models / model.name).exists() else "absent"
        rows.append({"task": model.name, "what": model.what, "state": state, "files": []})
    if as_json:
        emit(rows)
        return 0
    for row in rows:
        print(f"{row['task']:<18}{row['state']:<9}{row['what']}")
        for file in row["files"]:
            print(f"{'':<18}{file['name']:<27}{file['rows']:>6,} rows  {file['licence']}")
    print("To fetch one: turnwise data fetch NAME")
    return 0


def _published_rows(task: catalogue.TaskData, name: str) -> int:
    return next(made.rows for made in task.files if made.name == name)


def _sets(task: catalogue.TaskData, folder: Path, home: Path) -> str:
    """The `--set` of a run that plays the task on this data. Of several forms it is the first."""
    shown = folder.relative_to(home) if folder.is_relative_to(home) else folder
    options = task.readings(str(shown))[0].options
    return " ".join(
        [f"--set task.env={task.name}", *(f"--set task.options.{key}={value}" for key, value in options.items())]
    )
