"""What one task of tau_bench costs beside the LLMs: reset, the calls of its ground truth, and the check of the
database.

    python -m benchmarks.speed.tau_speed --path FOLDER
    python -m benchmarks.speed.tau_speed --path FOLDER --domain airline --tasks 20

ours: nothing is copied at a reset, a record is when it is first edited, and the touched records are compared with the
ground truth's.
plain: a deep copy of the database, the same calls, and sha256(str(everything as sorted tuples)) against a known hash,
as the benchmark does it. Milliseconds of processor time a task, medians over the tasks; ratio: the median of plain /
ours of the same task. The records' texts that `ours` keeps for all episodes are made before. One thread.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

from stages.envs.tau_data import Domain, Name, load_domain, load_tasks
from stages.envs.tau_database import Base, Database, canonical
from stages.envs.tau_tools import TERMINATE

Task = dict[str, Any]


def replayed(domain: Domain, database: Database, task: Task) -> Database:
    for action in task["actions"]:
        if action["name"] != TERMINATE:
            database, _ = domain.call(database, action["name"], action["kwargs"])
    return database


def ours(domain: Domain, task: Task) -> bool:
    return replayed(domain, Database(domain.base), task).changes() == domain.solution(task["actions"])


def plain(domain: Domain, task: Task, wanted: str) -> bool:
    tables = copy.deepcopy({table: dict(records) for table, records in domain.base.tables.items()})
    state = replayed(domain, Database(Base(tables)), task)
    for table, key in state.changes():
        tables[table][key] = state.get(table, key) or {}
    return hashlib.sha256(canonical(tables).encode()).hexdigest() == wanted


def timed(work: Callable[[], bool]) -> float:
    """Milliseconds of processor time."""
    began = time.process_time()
    if not work():
        raise RuntimeError("the ground truth does not reach its own state")
    return 1000 * (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="folder that holds retail/ and airline/")
    parser.add_argument("--domain", choices=get_args(Name), default="retail")
    parser.add_argument("--tasks", type=int, default=30, help="of the test split, the first ones")
    options = parser.parse_args()
    domain = load_domain(options.path, options.domain)
    Database(domain.base).full_hash()
    fast, slow = [], []
    for task in load_tasks(options.path, options.domain, "test")[: options.tasks]:
        wanted = replayed(domain, Database(domain.base), task).full_hash()
        domain.solution(task["actions"])
        fast.append(timed(partial(ours, domain, task)))
        slow.append(timed(partial(plain, domain, task, wanted)))
    ratio = statistics.median(b / a for a, b in zip(fast, slow, strict=True))
    print(
        f"{options.domain}: {len(fast)} tasks, ours {statistics.median(fast):.2f} ms, plain {statistics.median(slow):.0f} ms, ratio {ratio:.0f}"
    )


if __name__ == "__main__":
    main()
