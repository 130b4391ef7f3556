"""The fault suite in short: some tries of each kind; `python tests/faults.py --tries 120` is the long form.

Left to that one: Prefect, whose server takes its time, and stores that others hold, which are waited for.
"""

from __future__ import annotations

from pathlib import Path

import faults
import pytest
from commands import Commands
from injuries.bench import Bench, Count

SHORT = {"kill": 2, "signal": 1, "at-once": 1, "disk-full": 1, "engine": 1, "bits": 1}
SEED = 11  # two methods, Ctrl-C, equal and other seeds at once, a wrong answer


@pytest.fixture(scope="module")
def bench(command: Commands, empty_store: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"), empty_store, base, command, command, methods=("nlac", "rft"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHORT)
def test_after_a_fault_the_same_command_ends_as_if_there_had_been_none(kind: str, bench: Bench) -> None:
    count = faults.suffer(bench, kind, range(SHORT[kind]), SEED)
    assert count.is_clean, count.notes
    assert count.tries == SHORT[kind] and count.faults >= count.tries


def test_a_count_that_is_not_0_is_told_and_stands_in_the_table() -> None:
    one, two = Count(tries=2, faults=3), Count(tries=1, faults=1)
    two.note("wrong", "metrics loss of critic 0")
    assert one.is_clean and not two.is_clean
    assert faults.table({"kill": one, "bits": two}).splitlines()[2:] == [
        "| kill | 2 | 3 | 0 | 0 | 0 | 0 |", "| bits | 1 | 1 | 0 | 0 | 1 | 0 |", "| all | 3 | 4 | 0 | 0 | 1 | 0 |",
    ]  # fmt: skip
