"""Convert published files for the environments: bytes in, bytes out, and nothing in them is ever executed. Ours.

Each function raises ValueError, KeyError or TypeError for content in an unknown form.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import math
import re
from collections.abc import Iterable
from typing import Any


def unchanged(raw: bytes) -> bytes:
    return raw


def json_lines(rows: Iterable[dict[str, Any]]) -> bytes:
    """One object a line, text as it is."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def math_train(raw: bytes) -> bytes:
    """DeepScaleR's MATH problems as id, problem, answer, level (its `diffculty`; 0 = none), subject."""
    return json_lines(
        {
            "id": f"math-train-{number}",
            "problem": row["problem"],
            "answer": row["answer"],
            "level": _level(row["diffculty"] if "diffculty" in row else row["level"]),
            "subject": row["type"],
        }
        for number, row in enumerate(json.loads(raw))
    )


def _level(value: Any) -> int:
    """5 of 5.0, "5" and "Level 5"; 0 of None, NaN and "Level ?"."""
    if isinstance(value, str):
        found = re.search(r"[1-5]", value)
        return int(found[0]) if found else 0
    return int(value) if value is not None and math.isfinite(value) else 0


def things(raw: bytes) -> bytes:
    """The THINGS concepts as id, object, senses: senses in brackets dropped, equal names merged, 1,854 -> 1,823.

    id: the place in the order of first appearance. senses: the original names that had a sense, parted by '; '.
    Source: evanthebouncy/20Q-selfplay, whose README counts the same 1,823.
    """
    senses: dict[str, list[str]] = {}
    for row in csv.DictReader(io.StringIO(raw.decode("utf-8-sig"))):
        concept = row["THINGS-concept"].strip()
        name = re.sub(r"\s*\([^)]*\)", "", concept).strip()
        senses.setdefault(name, []).extend([concept] if concept != name else [])
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("id", "object", "senses"))
    writer.writerows((number, name, "; ".join(found)) for number, (name, found) in enumerate(senses.items()))
    return out.getvalue().encode()


def lmrl_gym(raw: bytes) -> bytes:
    """The word list in LMRL-Gym's data.py as category, object, variants. The file is parsed, never run."""
    for node in ast.parse(raw).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(name, ast.Name) and name.id == "DEFAULT_OBJECT_DICT" for name in node.targets
        ):
            words: dict[str, list[str]] = ast.literal_eval(node.value)
            named = ((category, entry.split(";")) for category, entries in words.items() for entry in entries)
            return json_lines(
                {"category": category, "object": names[0], "variants": names} for category, names in named
            )
    raise ValueError("there is no DEFAULT_OBJECT_DICT in it")


def tau_tasks(raw: bytes, *, name: str) -> bytes:
    """tau-bench's list of Task(...), parsed and never run, as one task a line. name: what its ids begin with."""
    for node in ast.parse(raw).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.List):
            return json_lines(_tau_task(entry, f"{name}-{index}", index) for index, entry in enumerate(node.value.elts))
    raise ValueError("there is no list of tasks in it")


def _tau_task(entry: ast.expr, name: str, index: int) -> dict[str, Any]:
    given = _keywords(entry, "Task")
    actions = given.pop("actions")
    if not isinstance(actions, ast.List):
        raise ValueError(f"task {index} has no list of actions")
    told = {key: ast.literal_eval(value) for key, value in given.items()}
    done = [{key: ast.literal_eval(value) for key, value in _keywords(one, "Action").items()} for one in actions.elts]
    return {
        "id": name,
        "index": index,
        "user_id": told["user_id"],
        "instruction": told["instruction"],
        "actions": [{"name": action["name"], "kwargs": action["kwargs"]} for action in done],
        "outputs": told["outputs"],
        "annotator": told["annotator"],
    }


def _keywords(entry: ast.expr, name: str) -> dict[str, ast.expr]:
    """What is named in a call of `name`."""
    if not (
        isinstance(entry, ast.Call) and isinstance(entry.func, ast.Name) and entry.func.id == name and not entry.args
    ):
        raise ValueError(f"wanted {name}(...), found {ast.unparse(entry)[:60]}")
    return {keyword.arg: keyword.value for keyword in entry.keywords if keyword.arg is not None}


def tau_tools(*raws: bytes) -> bytes:
    """What get_info() of tau-bench's tools returns, one file a tool. The files are parsed, never run."""
    return (json.dumps([_tau_tool(raw) for raw in raws], indent=1, ensure_ascii=False) + "\n").encode()


def _tau_tool(raw: bytes) -> Any:
    for node in ast.walk(ast.parse(raw)):
        if (
            isinstance(node, ast.FunctionDef)
            and node.name == "get_info"
            and isinstance(node.body[-1], ast.Return)
            and node.body[-1].value
        ):
            return ast.literal_eval(node.body[-1].value)
    raise ValueError("there is no get_info in it")
