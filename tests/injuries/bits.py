"""A flipped bit in an artifact: told by `turnwise verify` and by whoever reads it, never used; and it can be mended."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from pathlib import Path

from commands import Job

from injuries.bench import Bench, Count, command_of, disturbed, ends_whole

METHODS = ("nlac", "rft", "rft", "self_ac", "sac")  # which keep all kinds of artifacts; the quick one more often
FURTHER = "evaluate.episodes=5"  # reads adapters again, reuses all other stages


def flipped(bench: Bench, rng: random.Random) -> Count:
    """One bit of one artifact, of a kind drawn first."""
    argv = command_of(rng.choice([method for method in METHODS if method in bench.methods]))
    count, home = Count(1, 1), bench.finished(argv)
    kinds = by_kind(home)
    kind = rng.choice(sorted(kinds))
    count.where[kind] += 1
    file = rng.choice(kinds[kind])
    text = bytearray(file.read_bytes())
    place = rng.randrange(len(text))
    text[place] ^= 1 << rng.randrange(8)
    file.write_bytes(text)
    folder = next(parent for parent in file.parents if parent.name == "artifacts")
    name, run_id = str(file.relative_to(folder)), folder.parent.name
    where = f"{name} of {folder.parent.parent.name}, byte {place}"
    told = bench.run(home, "verify", "--json")
    # Where the hashes themselves are hit, it is the file that a hash is of, or the list.
    found = told.json["changed"].get(run_id, []) if told.status == 1 else []
    if not found or (name not in found and name != "sha256.json"):
        count.note("wrong", f"verify says nothing of {where}: {told.out[:300]} {told.err[-500:]}")
    further = (*argv, "--set", FURTHER)
    for command in (argv, further):
        (again,) = bench.run.at_once(home, Job(command))
        disturbed(count, again)
        if again.status == 0:  # it had no need of that artifact, which is as it was left
            ends_whole(count, home, again, bench.expected(command), unread=file)
    if (mended := bench.run(home, "verify", "--mend", "--json")).status != 0:
        count.note("lost", f"verify --mend ended with status {mended.status} for {where}: {mended.err[-500:]}")
    ends_whole(count, home, bench.run(home, *further), bench.expected(further))
    if (last := bench.run(home, "verify", "--json")).status != 0:
        count.note("wrong", f"verify after all was mended, {where}: {last.out[:300]}")
    return count


def by_kind(home: Path) -> dict[str, list[Path]]:
    """Artifacts by the kind of their run and their name, numbers apart."""
    found = defaultdict(list)
    for file in sorted((home / "mlflow" / "artifacts").rglob("*")):
        if file.is_file():
            stage, _, _, *name = file.relative_to(home / "mlflow" / "artifacts").parts
            found[re.sub(r"\d+", "N", "/".join((stage if stage == "pipeline" else "stage", *name)))].append(file)
    return found
