"""What is read from MLflow's tables is what MLflow's own search says of the same store, in the same order."""

from __future__ import annotations

import json
import math
import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.frame.types import TurnwiseError
from stages.store import search
from stages.store.execute import lineage_inputs, readers
from stages.store.runs import RunInfo, run_info
from stages.store.tracking import Status, Tracking
from stages.store.workspace import Workspace

ENDED: tuple[Status, ...] = ("FINISHED", "FAILED", "KILLED")
STATUSES = (*ENDED, "RUNNING")


@pytest.fixture
def tracking(home: Path) -> Tracking:
    """Forty runs of all kinds: without a number, deleted, of equal fingerprints, with metrics that are no numbers."""
    tracking, rng = Tracking(home / "mlflow"), random.Random(0)
    parents = [tracking.start("pipeline", f"demo {i}", {"preset": "demo's"}) for i in range(2)]
    for i in range(40):
        tags = {"fingerprint": f"f{rng.randrange(6)}", **({"stands_for": parents[0]} if i % 7 == 0 else {})}
        run_id = tracking.start(rng.choice(["critic", "collect"]), f"run {i}", tags, rng.choice([None, *parents]))
        values = {"critic/loss": rng.random(), "critic/odd": rng.choice([math.nan, math.inf, -0.0])}
        tracking.record(
            run_id, metrics=values, curves={"critic/nll": [3.0, 1.0]}, params={"set.critic.lr": i, "seed": 1}
        )
        if (status := rng.choice([None, *ENDED])) is not None:
            tracking.finish(run_id, status)
        if i % 5 == 0:
            tracking._client.delete_tag(run_id, "sequence")
        if i % 9 == 0:
            tracking._client.delete_run(run_id)
    return tracking


def by_mlflow(tracking: Tracking, wanted: str, experiment: str = "", limit: int = 1000) -> list[RunInfo]:
    client: Any = tracking._client
    known = client.search_experiments()
    ids = [one.experiment_id for one in known if experiment in ("", one.name)]
    order = ["tags.sequence DESC", "attributes.start_time DESC"]
    return [run_info(run) for run in client.search_runs(ids, wanted, max_results=limit, order_by=order)]


def comparable(infos: list[RunInfo]) -> list[Any]:
    """Not a number is not equal to itself."""
    return [(replace(one, metrics={}), {key: repr(value) for key, value in one.metrics.items()}) for one in infos]


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({}, {"wanted": ""}),
        ({"experiment": "critic"}, {"wanted": "", "experiment": "critic"}),
        ({"experiment": "critic", "limit": 3}, {"wanted": "", "experiment": "critic", "limit": 3}),
        ({"experiment": "nowhere"}, None),
        *(({"status": one}, {"wanted": f"attributes.status = '{one}'"}) for one in STATUSES),
        *(
            (
                {"status": "FINISHED", "experiment": "collect", "tags": {"fingerprint": f"f{i}"}},
                {"wanted": f"attributes.status = 'FINISHED' and tags.fingerprint = 'f{i}'", "experiment": "collect"},
            )
            for i in range(6)
        ),
        ({"tags": {"preset": "demo's"}}, {"wanted": 'tags.preset = "demo\'s"'}),
        ({"prefix": "a"}, {"wanted": "attributes.run_id LIKE 'a%'"}),
    ],
)
def test_a_search_finds_what_mlflow_finds(
    tracking: Tracking, mine: dict[str, Any], theirs: dict[str, Any] | None
) -> None:
    found = [info for info, _ in search.search(tracking.db, **mine)]
    assert comparable(found) == comparable([] if theirs is None else by_mlflow(tracking, **theirs))
    if mine == {}:
        assert search.run_ids(tracking.db, status="FINISHED") == [
            one.run_id for one in found if one.status == "FINISHED"
        ]
        numbers = [int(one.tags["sequence"]) for one in found if "sequence" in one.tags]
        assert search.last_number(tracking.db) == max(numbers)


def test_a_run_by_its_id_is_what_mlflow_says_deleted_or_not(tracking: Tracking) -> None:
    client: Any = tracking._client
    with closing(sqlite3.connect(tracking.root / "mlflow.db")) as raw:
        ids = [run_id for (run_id,) in raw.execute("select run_uuid from runs")]
    assert len(ids) == 42
    infos = [run_info(client.get_run(one)) for one in ids]
    found = search.load(tracking.db, [*ids, "0" * 32])
    assert comparable([info for info, _ in found]) == comparable(infos)
    assert [uri for _, uri in found] == [client.get_run(one).info.artifact_uri for one in ids]


def test_who_read_a_run_is_told_by_a_tag_and_by_the_file_where_the_tag_is_too_short(workspace: Workspace) -> None:
    tracking = workspace.tracking
    ids = [f"{i:032x}" for i in range(300)]
    for i in range(12):
        inputs = {"collect": ids[: 290 if i % 3 == 0 else 10 + i], "critic": ids[200 + i : 201 + i]}
        tags = {} if i % 4 == 3 else {"inputs": json.dumps(inputs)}
        run_id = tracking.start("refine", f"refine {i}", tags)
        tracking.write_json(run_id, "inputs.json", inputs)
        tracking.finish(run_id, "FAILED" if i == 5 else "FINISHED")
    finished = [info.run_id for info in tracking.runs("refine", 100) if info.status == "FINISHED"]
    assert {says for _, says in tracking.reading(ids[0], "refine")} == {True, None}
    for wanted in (ids[0], ids[12], ids[15], ids[205], ids[207], ids[208], ids[299]):
        slow = [one for one in finished if any(wanted in runs for runs in lineage_inputs(workspace, one).values())]
        assert readers(workspace, wanted, "refine") == slow
    assert readers(workspace, ids[0], "critic") == []


READ = """
import sys
from pathlib import Path
from stages.store.tracking import Status, Tracking
tracking = Tracking(Path(sys.argv[1]))
(info,) = tracking.runs("critic", 5)
assert tracking.find(info.run_id[:8]) == info.run_id and tracking.running() == [] and tracking.reap() == []
assert tracking.finished("f1", "critic") == info.run_id and tracking.metrics(info.run_id) == {}
print("mlflow" in sys.modules)
"""


def test_reading_imports_no_mlflow(home: Path) -> None:
    tracking = Tracking(home / "mlflow")
    tracking.finish(tracking.start("critic", "c", {"fingerprint": "f1"}))
    done = subprocess.run(
        [sys.executable, "-c", READ, str(home / "mlflow")], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_store_without_its_tables_is_one_sentence(tmp_path: Path) -> None:
    assert Tracking(tmp_path).runs("critic", 5) == []
    (tmp_path / "mlflow.db").write_bytes(b"")
    with pytest.raises(TurnwiseError, match=r"mlflow.db was wanted, but the file is damaged \(no such table"):
        Tracking(tmp_path).runs("critic", 5)
