"""Two project folders on one PostgreSQL and one S3 store: what one made, the other reuses, and nothing is made twice."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from team import BUCKET, KEYS, PASSWORD, Team
from toys import ENVIRONMENT, run_chain, toy_workspace, visible

from stages.frame.types import Changed, Dropped, TurnwiseError
from stages.store import search
from stages.store.tracking import Tracking
from stages.store.upkeep import changed_runs

pytestmark = pytest.mark.slow


def test_what_one_folder_made_the_other_reuses_and_reads(homes: tuple[Path, Path], team: Team) -> None:
    one, two = (toy_workspace(home) for home in homes)
    made = run_chain(one)
    found = run_chain(two)
    assert [each.reused for each in made] == [False] * 3
    assert [(each.reused, each.run_id) for each in found] == [(True, each.run_id) for each in made]
    assert visible(two, found) == visible(one, made)
    shutil.rmtree(homes[1] / "data")  # the rows and the cache are made again
    again = toy_workspace(homes[1])
    assert visible(again, run_chain(again)) == visible(one, made)
    assert not list((homes[0] / "mlflow").iterdir())
    assert f"source/{made[0].run_id}/artifacts/sha256.json" in team.objects()
    assert changed_runs(again) == {}


def test_a_stage_after_another_folders_stages_is_made_once(homes: tuple[Path, Path]) -> None:
    one, two = (toy_workspace(home) for home in homes)
    made = run_chain(one)
    run_chain(two, force=True)
    newest = toy_workspace(homes[0])
    assert [each.reused for each in run_chain(newest)] == [True] * 3
    assert len(newest.tracking.runs("source")) == 2
    assert newest.tracking.finished_runs()[-1] == made[0].run_id


def test_damage_in_the_bucket_is_told_and_in_the_cache_is_mended(homes: tuple[Path, Path], team: Team) -> None:
    one, two = (toy_workspace(home) for home in homes)
    run = run_chain(one)[0].run_id
    file = two.tracking.artifact(run, "adapter/weights.bin")
    right = file.read_bytes()
    file.write_bytes(b"cut")
    assert toy_workspace(homes[1]).tracking.artifact(run, "adapter/weights.bin").read_bytes() == right
    key = f"{team.database}/source/{run}/artifacts/adapter/weights.bin"
    team.client.put_object(Bucket=BUCKET, Key=key, Body=b"other")
    with pytest.raises(Changed, match=r"adapter/weights.bin of source run"):
        toy_workspace(homes[1]).tracking.artifact(run, "adapter/weights.bin")
    assert changed_runs(toy_workspace(homes[1])) == {run: ["adapter/weights.bin"]}


def test_weights_that_one_folder_dropped_are_dropped_for_the_other(homes: tuple[Path, Path], team: Team) -> None:
    one, two = (toy_workspace(home).tracking for home in homes)
    run = one.start("distill", "distill 0", {"fingerprint": "f"})
    weights = homes[0] / "adapter_model.safetensors"
    weights.write_bytes(b"weights")
    one.save(run, weights, "adapter/adapter_model.safetensors")
    one.seal(run)
    one.finish(run)
    assert two.weights(run) == {"adapter/adapter_model.safetensors": 7}
    assert two.address(run, "adapter") == f"s3://{BUCKET}/{team.database}/distill/{run}/artifacts/adapter"
    assert not one.drop(run, lambda: True) and not one.is_dropped(run)
    assert two.drop(run, lambda: False)
    with pytest.raises(Dropped):
        Tracking(one.root, one._shared, homes[0] / "data" / "artifacts-cache").artifact(run, "adapter")
    assert [name for name in team.objects() if name.endswith(".safetensors")] == []


def test_two_that_open_a_new_database_at_once_make_one_store(team_servers: Team, tmp_path: Path) -> None:
    fresh = team_servers.new()
    script = "import sys, pathlib, toys; toys.toy_workspace(pathlib.Path(sys.argv[1])).tracking.initialise()"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(fresh.home(tmp_path / name))],
            env=os.environ | ENVIRONMENT | KEYS | {"PGPASSWORD": PASSWORD},
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    assert [child.communicate()[1] for child in children] == ["", ""]
    assert [child.returncode for child in children] == [0, 0]


def test_the_queries_answer_as_in_sqlite(homes: tuple[Path, Path], tracking: Tracking) -> None:
    def asked(store: Tracking) -> list[object]:
        parent = store.start("pipeline", "demo 0", {"preset": "demo's"})
        ids = list[str]()
        for i in range(6):
            tags = {"fingerprint": f"f{i % 3}", "stage": "critic", "inputs": json.dumps({"collect": ids[-1:]})}
            ids.append(store.start("critic" if i % 2 else "collect", f"run {i}", tags, parent))
            store.record(
                ids[-1],
                metrics={"critic/loss": math.nan if i == 0 else i / 7, "critic/odd": math.inf},
                params={"seed": i},
            )
            if i < 4:
                store.finish(ids[-1], "FAILED" if i == 2 else "FINISHED")
        name = {run_id: i for i, run_id in enumerate(ids)}
        found = search.search(store.db)
        return [
            [(info.name, info.status, repr(info.metrics), info.params) for info, _ in found],
            [info.name for info in store.runs("critic", 2)],
            [info.name for info in store.children(parent)],
            [info.name for info in store.running()],
            [info.name for info, _ in search.search(store.db, tags={"preset": "demo's"})],
            name[store.find(ids[3][:12])],
            [name[one] for one in search.stage_runs(store.db)],
            [name[one] for one in store.finished_runs()],
            [(name[one], says) for one, says in store.reading(ids[2], "critic")],
            store.finished("f0", "collect") == ids[0],
            search.last_number(store.db),
            [info.name for info, _ in search.load(store.db, [ids[4], "0" * 32, ids[1]])],
        ]

    assert asked(toy_workspace(homes[0]).tracking) == asked(tracking)


def test_a_folder_that_all_see_does_in_place_of_the_bucket(homes: tuple[Path, Path], tmp_path: Path) -> None:
    for home in homes:
        file = home / "turnwise.toml"
        text = file.read_text().partition("artifacts")[0]
        file.write_text(f'{text}artifacts = "{tmp_path / "all"}"\n')
    one, two = (toy_workspace(home) for home in homes)
    made = run_chain(one)
    assert [each.reused for each in run_chain(two)] == [True] * 3
    assert two.tracking.artifact(made[0].run_id, "adapter").is_relative_to(tmp_path / "all")
    assert visible(two, made) == visible(one, made)


def test_two_places_of_artifacts_on_one_database_are_refused(homes: tuple[Path, Path]) -> None:
    run_chain(toy_workspace(homes[0]))
    file = homes[1] / "turnwise.toml"
    file.write_text(file.read_text().replace('artifacts = "s3://runs/', 'artifacts = "s3://runs/other/'))
    with pytest.raises(TurnwiseError, match=r"this store keeps those of source at s3://runs/team\d+/source, but"):
        toy_workspace(homes[1]).tracking.start("source", "source 0", {})


def test_a_wrong_password_is_one_sentence(homes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", "wrong-one")
    with pytest.raises(TurnwiseError, match=r"password authentication failed.*PGPASSWORD") as told:
        toy_workspace(homes[0]).tracking.running()
    assert "wrong-one" not in str(told.value)


def test_wrong_keys_of_the_bucket_are_one_sentence(homes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_chain(toy_workspace(homes[0]))[0].run_id
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(TurnwiseError, match=r"the artifacts in s3://runs/team\d+ were wanted, but"):
        toy_workspace(homes[1]).tracking.read_json(run, "outputs.json")
