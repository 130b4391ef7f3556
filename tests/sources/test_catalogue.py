"""Every data set has a licence and a hash, or stands among the few whose published bytes were never at hand."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from stages.sources.catalogue import TASKS

ROOT = Path(__file__).parents[2]
UNKNOWN = {"things_objects.csv", "24.csv", "retail/tasks_test.jsonl", "airline/tasks_test.jsonl"}
SHIPPED = {"stages/envs/data/twenty_questions.toml", "data/base/general.jsonl", "data/base/probe.jsonl"}


def test_every_published_file_has_a_licence_a_commit_and_a_hash() -> None:
    without = set()
    for made in (made for task in TASKS.values() for made in task.files):
        assert all(of.licence and of.commit for of in made.of), made.name
        known = [made.sha256] if made.sha256 else [of.sha256 for of in made.of]
        if not all(re.fullmatch(r"[0-9a-f]{64}", one) for one in known):
            without.add(made.name)
    assert without == UNKNOWN


def test_what_ships_has_the_licence_and_the_hash_of_the_page() -> None:
    page = (ROOT / "docs" / "reference" / "environments.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| (.+?) \| `([0-9a-f]{64})` \|$", page, re.MULTILINE)
    assert {file for file, _, _ in rows} == SHIPPED
    for file, licence, wanted in rows:
        assert licence.startswith("Apache-2.0")
        assert hashlib.sha256((ROOT / file).read_bytes()).hexdigest() == wanted, file
