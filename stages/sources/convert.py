"""Published files as the environments read them: bytes in, bytes out, and nothing of them is ever executed. Ours.

Each function raises ValueError, KeyError or TypeError for content in another form than the one it knows.
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
    """DeepScaleR's list of MATH problems as id, problem, answer, level, subject. Its level stands under `diffculty`; 0 = it has none."""
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
    """The THINGS concepts as id, object, senses: the sense in brackets is dropped, equal names are merged, 1,854 -> 1,823.

    id: the place among the objects in the order of first appearance. senses: the original names that had a sense, parted by '; '.
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
        if isinstance(node, ast.Assign) and any(isinstance(name, ast.Name) and name.id == "DEFAULT_OBJECT_DICT" for name in node.targets):
            words: dict[str, list[str]] = ast.literal_eval(node.value)
            named = ((category, entry.split(";")) for category, entries in words.items() for entry in entries)
            return json_lines({"category": category, "object": names[0], "variants": names} for category, names in named)
    raise ValueError("there is no DEFAULT_OBJECT_DICT in it")
