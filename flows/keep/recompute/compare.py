"""What a stage run stored, and where a value that was found differs from it by more than rounding."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from stages.frame.types import Row

TOLERANCE = 1e-6  # of a number, relative to it where it is above 1
NOT_COMPARED = ("run_id", "seconds")
SHOWN = 60  # characters of a value in a report


@dataclass(frozen=True)
class Stored:
    """What a finished stage run left. has_model: whether its base model is at hand."""

    run_id: str
    stage: str
    metrics: Mapping[str, float]
    rows: Callable[[str], list[Row]]
    artifacts: Path
    has_model: bool
    is_dropped: bool


@dataclass(frozen=True)
class Difference:
    """where: the metric, row or file, in words."""

    where: str
    stored: str
    recomputed: str


@dataclass(frozen=True)
class Compared:
    """What was compared: how many values, the largest difference of two numbers that passed, and what did not."""

    values: int = 0
    largest: float = 0.0
    differences: tuple[Difference, ...] = ()
    what: tuple[str, ...] = ()  # in words: "16 rows of episodes", "24 metrics"
    names: frozenset[str] = frozenset()  # metrics and files that were compared

    def __add__(self, other: Compared) -> Compared:
        return Compared(
            self.values + other.values,
            max(self.largest, other.largest),
            self.differences + other.differences,
            self.what + other.what,
            self.names | other.names,
        )


def total(parts: Iterable[Compared]) -> Compared:
    return reduce(Compared.__add__, parts, Compared())


def compare(where: str, stored: Any, found: Any) -> Compared:
    """Numbers to the tolerance, lists and mappings element by element, all else as it is."""
    if isinstance(stored, (bool, str)) or stored is None or found is None:
        return Compared(1) if stored == found else _differ(where, stored, found)
    if isinstance(stored, (int, float)) and isinstance(found, (int, float)):
        return _numbers(where, float(stored), float(found))
    if isinstance(stored, Mapping) and isinstance(found, Mapping):
        if odd := sorted(stored.keys() ^ found.keys()):
            return _differ(f"{where}.{odd[0]}", stored.get(odd[0]), found.get(odd[0]))
        return total(compare(f"{where}.{key}", stored[key], found[key]) for key in stored)
    if isinstance(stored, (list, tuple, array)) and isinstance(found, (list, tuple, array)):
        if len(stored) != len(found):
            return _differ(f"length of {where}", len(stored), len(found))
        if list(stored) == list(found):
            return Compared(len(stored))
        return total(compare(f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(stored, found, strict=True)))
    return Compared(1) if stored == found else _differ(where, stored, found)


def metrics(stored: Mapping[str, float], found: Mapping[str, float]) -> Compared:
    """The metrics that were recomputed. Times are none of them."""
    names = [name for name in found if not name.endswith("_s")]
    done = total(compare(f"metric {name}", stored.get(name), found[name]) for name in names)
    return done + Compared(what=(f"{len(names)} metrics",), names=frozenset(names))


def rows(table: str, stored: Sequence[Row], found: Sequence[Row]) -> Compared:
    """Row by row, in their order; a difference names the row by its number from 0 and by what it is of."""
    if len(stored) != len(found):
        return _differ(f"rows of {table}", len(stored), len(found))
    done = Compared(what=(f"{len(stored)} rows of {table}",) if stored else ())
    for number, (old, new) in enumerate(zip(stored, found, strict=True)):
        of = " turn ".join(str(old[key]) for key in ("episode_id", "turn") if key in old)
        columns = [name for name in old if name not in NOT_COMPARED]
        done += total(compare(f"{table} row {number} ({of}), {name}", old[name], new.get(name)) for name in columns)
    return done


def replies(said: Iterable[tuple[str, str, Sequence[int]]], decode: Callable[[Sequence[int]], str]) -> Compared:
    """(where, text, token ids) of replies. The ids decode to the text, with or without the end token. A reply without
    ids did not come from an engine.
    """
    done, n = [], 0
    for where, text, ids in said:
        if len(ids):
            found = [decode(ids), decode(ids[:-1])]
            same = text.strip() in (one.strip() for one in found)
            done.append(compare(f"{where}: text of its ids", text, text if same else found[0]))
            n += 1
    return total(done) + Compared(what=(f"{n} replies",) if n else ())


def left(stored: Stored, found: Mapping[str, Path]) -> Compared:
    """All files that a stage left; none where its weights were dropped."""
    there = {} if stored.is_dropped else found
    return total(files(name, stored.artifacts / name, file) for name, file in there.items())


def files(name: str, stored: Path, found: Path) -> Compared:
    """An artifact, a file or a folder: tensors and tables by their numbers, JSON by its values. Others are not compared."""
    if found.is_dir():
        parts = sorted(one.name for one in found.iterdir())
        return total(files(f"{name}/{one}", stored / one, found / one) for one in parts)
    if not stored.is_file():
        return _differ(name, "no such file", found.name)
    if found.suffix == ".safetensors":
        return _tensors(name, stored, found) + Compared(what=(name,), names=frozenset({name}))
    if found.suffix == ".json":
        same = compare(name, *(_unordered(json.loads(one.read_text())) for one in (stored, found)))
        return same + Compared(names=frozenset({name}))
    if found.suffix == ".parquet":
        import pyarrow.parquet as pq

        same = compare(name, *(pq.read_table(one).to_pydict() for one in (stored, found)))
        return same + Compared(what=(name,), names=frozenset({name}))
    return Compared()


def _tensors(name: str, stored: Path, found: Path) -> Compared:
    from safetensors.torch import load_file

    old, new = load_file(stored), load_file(found)
    if odd := sorted(old.keys() ^ new.keys()):
        return _differ(f"{name}: tensor {odd[0]}", odd[0] in old, odd[0] in new)
    return total(_tensor(f"{name}: {key}", old[key], new[key]) for key in sorted(old))


def _tensor(where: str, old: Any, new: Any) -> Compared:
    if old.shape != new.shape or old.dtype != new.dtype:
        return _differ(where, f"{old.dtype} {tuple(old.shape)}", f"{new.dtype} {tuple(new.shape)}")
    if not old.numel():
        return Compared()
    a, b = old.double().flatten(), new.double().flatten()
    over = (a - b).abs() / a.abs().clamp(min=1.0)
    at = int(over.nan_to_num(nan=math.inf).argmax())
    if float(over[at]) <= TOLERANCE:
        return Compared(old.numel(), float(over[at]))
    return _differ(f"{where}[{at}]", float(a[at]), float(b[at]))


def _numbers(where: str, stored: float, found: float) -> Compared:
    if stored == found or (math.isnan(stored) and math.isnan(found)):
        return Compared(1)
    gap = abs(stored - found) / max(1.0, abs(stored))
    return Compared(1, gap) if gap <= TOLERANCE else _differ(where, stored, found)


def _differ(where: str, stored: Any, found: Any) -> Compared:
    return Compared(1, 0.0, (Difference(where, _short(stored), _short(found)),))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _unordered(value: Any) -> Any:
    """Lists of words in one order: peft writes sets."""
    if isinstance(value, dict):
        return {key: _unordered(one) for key, one in value.items()}
    return sorted(value) if isinstance(value, list) and all(isinstance(one, str) for one in value) else value
