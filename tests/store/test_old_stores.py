"""A replay of each schema that there was, written by the code of its time and kept here, is read with nothing lost."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from old_stores import CERTIFICATE, ROWS, RUN

from stages.store.replay import Replay
from stages.store.tables import SCHEMA_VERSION, TABLES

STORES = Path(__file__).parent / "stores"


@pytest.mark.parametrize("schema", range(1, SCHEMA_VERSION + 1))
def test_a_stored_replay_of_every_schema_is_read_and_written_on(schema: int, tmp_path: Path) -> None:
    """One that is missing here for a new schema is made by committing `old_stores.ROWS` with the code of that schema."""
    path = tmp_path / "turnwise.duckdb"
    path.write_bytes(gzip.decompress((STORES / f"schema{schema}.duckdb.gz").read_bytes()))
    replay = Replay(path)
    wanted = ROWS if schema == 1 else {**ROWS, "certificates": [CERTIFICATE]}
    for table in TABLES.keys() - {"commits"}:
        assert replay.rows(table, [RUN]) == [{"run_id": RUN, **row} for row in wanted.get(table, [])], table
    replay.commit("later", "grpo", {**ROWS, "certificates": [CERTIFICATE]})
    assert replay.rows("certificates", ["later"]) == [{"run_id": "later", **CERTIFICATE}]
    assert replay.find_episode("e0")["run_id"] == "later"
