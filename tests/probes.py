"""What the tests of corpora and of the base models made from them share."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chi2

from stages.corpora import Example
from stages.llm.hf import HfEngine
from stages.llm.roles import ask
from turnwise import cli

QUANTILE = 1 - 1e-6  # by chance beyond it once in a million looks


def last(e: Example) -> str:
    """The last message of its prompt."""
    return str(e.messages[-1]["content"])


def even(found: Counter[Any], kinds: int) -> bool:
    """Chi-square below its QUANTILE for as many of each of so many kinds."""
    expected = found.total() / kinds
    assert expected > 5
    statistic = sum((n - expected) ** 2 / expected for n in found.values()) + expected * (kinds - len(found))
    return bool(statistic < chi2.ppf(QUANTILE, kinds - 1))


def looped(
    preset: str, base: Path, home: Path, capsys: pytest.CaptureFixture[str], small: Mapping[str, Any]
) -> dict[str, float]:
    """The metrics of the last iteration of a small run on a base model that ships; the process works in `home`."""
    (home / "data").mkdir(exist_ok=True)
    (home / "data" / base.name).symlink_to(base)
    sets = [part for key, value in small.items() for part in ("--set", f"{key}={value}")]
    assert cli.main(["run", preset, "--plain", "--quiet", "--json", *sets]) == 0
    run: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert run["status"] == "FINISHED"
    found: dict[str, float] = run["iterations"][-1]["metrics"]
    return found


def answered(engine: HfEngine, base: Path, roles: Collection[str], n: int = 20) -> list[tuple[dict[str, Any], str]]:
    """The first n held-out rows of each role in a base model's folder, each with what the model says, greedily."""
    known = [json.loads(line) for line in (base / "probe.jsonl").read_text().splitlines()]
    rows = [row for role in roles for row in islice((row for row in known if row["role"] == role), n)]
    prompts = [row["messages"] for row in rows]
    replies = ask(engine, prompts, role="probe", adapter=None, temperature=0.0, max_tokens=64, seed=0)
    return [(row, reply.text) for row, (_, reply) in zip(rows, replies, strict=True)]
