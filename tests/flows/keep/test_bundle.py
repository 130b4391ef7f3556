"""Bundles: a run that leaves its project, is recomputed without it, and enters another one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from commands import RUN, TITLES, Ended, seen, stage_runs
from safetensors.torch import load_file, save_file

from flows.keep.bundle import check
from flows.keep.bundle.layout import HASHES, MANIFEST
from flows.keep.bundle.write import hashes
from flows.keep.recompute.run import check_stage
from flows.workspace import open_workspace
from stages.frame.types import UsageError
from stages.store import artifacts, sqlite
from stages.store.artifacts import SEAL
from turnwise import cli

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
EVERY = [*TITLES, "pipeline"]


@pytest.fixture(scope="module")
def written(undisturbed: Ended, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a run of NLAC."""
    folder = tmp_path_factory.mktemp("bundle") / "out"
    here = os.getcwd()
    run_id = undisturbed.done.json["run_id"]
    try:
        assert cli.main(["export", run_id, str(folder), "--what", "bundle", "--home", str(undisturbed.home)]) == 0
    finally:
        os.chdir(here)
    return folder


@pytest.fixture
def bundle(written: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoiled."""
    return Path(shutil.copytree(written, tmp_path / "bundle"))


@pytest.fixture
def other(tmp_path: Path, empty_store: Path) -> Path:
    """A project folder without a model and without a run."""
    (tmp_path / "other" / "mlflow").mkdir(parents=True)
    sqlite.copy(empty_store, tmp_path / "other" / "mlflow" / "mlflow.db")
    return tmp_path / "other"


def titles(undisturbed: Ended) -> dict[str, str]:
    return stage_runs(undisturbed.done.json)


def artifacts_of(bundle: Path, run_id: str) -> Path:
    return bundle / "runs" / run_id / "artifacts"


def reseal(bundle: Path, run_id: str) -> None:
    """Every hash is that of the file as it is now: no hash tells what was changed."""
    (artifacts_of(bundle, run_id) / SEAL).unlink()
    artifacts.seal(artifacts_of(bundle, run_id))
    rehash(bundle)


def rehash(bundle: Path) -> None:
    (bundle / HASHES).write_text(json.dumps(hashes(bundle)))


@dataclass(frozen=True)
class Spoiled:
    """A stage run in a store, to be changed by a hand that leaves no hash behind."""

    run_id: str
    folder: Path
    db: Path

    def update(self, table: str, change: str) -> None:
        """SQL on its rows, in DuckDB and in its Parquet file alike."""
        mine = f"run_id = '{self.run_id}'"
        with duckdb.connect(str(self.db)) as raw:
            raw.execute(f"update {table} set {change} and {mine}")
            kept = raw.sql(f"select * from {table} where {mine} order by rowid").to_arrow_table()
        pq.write_table(kept, self.folder / "rows" / f"{table}.parquet")


def reward(run: Spoiled) -> str:
    run.update("turns", "reward = reward + 0.5 where turn = 0")
    return "episodes row 0"


def reward_and_return(run: Spoiled) -> str:
    """The episodes agree with their turns: only what is said of all of them together still tells."""
    run.update("turns", "reward = reward + 0.5 where turn = 0")
    run.update("episodes", "total_reward = total_reward + 0.5 where true")
    return "metric collect/"


def weight(run: Spoiled) -> str:
    file = run.folder / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[3]
    tensors[name].view(-1)[2] += 1e-4
    save_file(tensors, file, metadata={"format": "pt"})
    return f"adapter/adapter_model.safetensors: {name}[2]"


def metric(run: Spoiled) -> str:
    outputs = json.loads((run.folder / "outputs.json").read_text())
    outputs["metrics"]["distill/loss"] += 1e-5
    (run.folder / "outputs.json").write_text(json.dumps(outputs))
    return "metric distill/loss"


def verdict(run: Spoiled) -> str:
    run.update("judgements", "verdict = 'yes' where verdict = 'no'")
    return "targets row"


def target(run: Spoiled) -> str:
    run.update("targets", "student_ids = list_concat(student_ids, [1]) where true")
    return "length of targets row 0"


def token_to_be_learned(run: Spoiled) -> str:
    run.update("targets", "completion_ids = list_concat([65], completion_ids[2:]) where true")
    return "targets row 0"


def token_of_an_action(run: Spoiled) -> str:
    run.update("turns", "action_ids = list_concat([65], action_ids[2:]) where turn = 0")
    return "turns ("


def priority(run: Spoiled) -> str:
    run.update("priorities", "loss = loss * 1.01 where true")
    return "priorities row 0"


def test_a_whole_run_is_recomputed_from_its_bundle_alone(
    written: Path, undisturbed: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(written), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["same"] and [one["title"] for one in told["stages"]] == EVERY
    assert {one["how"] for one in told["stages"]} == {"whole", "from its draws"}
    for one in told["stages"]:
        name = one["title"].split()[0]
        assert (one["how"] == "whole") == (name in ("critic", "distill", "pipeline"))
        assert one["same"] and one["compared"]["values"] > 10
        if one["how"] == "whole":
            assert one["unchecked"] == []
    weights = [n for one in told["stages"] for n in one["compared"]["names"] if n.endswith(".safetensors")]
    assert len(weights) == 8  # adapter and target of critic and distill, twice


@pytest.mark.parametrize(
    ("title", "plant"),
    [("collect 0", reward), ("collect 0", reward_and_return), ("collect 1", token_of_an_action), ("targets 1", target), ("targets 0", token_to_be_learned), ("refine 1", token_to_be_learned), ("critic 0", weight), ("critic 1", priority), ("refine 1", verdict), ("distill 1", metric)],
)  # fmt: skip
def test_a_planted_change_is_found_in_its_stage_and_not_by_a_hash(
    title: str, plant: Callable[[Spoiled], str], finished: Ended
) -> None:
    """Only the stage itself is checked here: those before it read nothing of it."""
    workspace, run_id = open_workspace(finished.home), titles(finished)[title]
    folder = workspace.tracking.artifact(run_id, "")
    where = plant(Spoiled(run_id, folder, workspace.replay.path))
    artifacts.seal(folder)
    found = check_stage(workspace, run_id)
    assert found.title == title and found.how != "not"
    assert found.compared.differences[0].where.startswith(where)


def test_a_difference_is_exit_status_1_and_is_named(
    bundle: Path, undisturbed: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = titles(undisturbed)["evaluate 0"]
    outputs = artifacts_of(bundle, run_id) / "outputs.json"
    stored = json.loads(outputs.read_text())
    stored["metrics"]["evaluate/win_rate"] += 0.25
    outputs.write_text(json.dumps(stored))
    reseal(bundle, run_id)
    assert cli.main(["replay", f"{bundle}:evaluate:0"]) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"first difference: evaluate 0, run {run_id[:8]}: metric evaluate/win_rate"


def test_an_episode_is_replayed_where_it_was_played_and_read(
    finished: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = open_workspace(finished.home)
    collect, critic = (titles(finished)[title] for title in ("collect 0", "critic 0"))
    episode = workspace.replay.rows("priorities", [critic])[0]["episode_id"]
    assert cli.main(["replay", episode, "--home", str(finished.home), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["stages"]
    assert told[0]["run_id"] == collect
    assert {"collect 0", "targets 0", "critic 0"} <= {one["title"] for one in told} <= set(TITLES)


def test_an_imported_run_is_as_if_it_had_been_made_here(
    written: Path, other: Path, undisturbed: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["import", str(written), "--home", str(other), "--json"]) == 0
    taken = json.loads(capsys.readouterr().out)
    assert len(taken["new"]) == len(EVERY) and taken["known"] == taken["different"] == taken["left_out"] == []
    assert cli.main(["import", str(written), "--home", str(other), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["new"] == []
    summary = undisturbed.done.json
    found = seen(other, summary)
    assert found == undisturbed.seen
    assert cli.main(["runs", "--home", str(other), "--json"]) == 0
    assert [run["run_id"] for run in json.loads(capsys.readouterr().out)] == [summary["run_id"]]
    changed = ["--set", "critic.lr=1e-3", "--dry-run", "--json", "--home", str(other)]
    assert cli.main(["rerun", "critic", "--of", summary["run_id"], *changed]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["of"] == titles(undisturbed)["critic 1"] and again["reuse"] is None
    assert cli.main([*RUN, "--home", str(other)]) == 0
    done = json.loads(capsys.readouterr().out)
    assert stage_runs(done) == stage_runs(summary)  # all are reused, and so have their fingerprints
    assert cli.main(["verify", "--home", str(other), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "orphans": [], "changed": {}, "impossible": {}, "lost": {}, "mended": False,
    }  # fmt: skip


@pytest.mark.parametrize("moment", ["replay.Replay.commit", "artifacts.save"])
def test_an_import_that_is_killed_goes_on(moment: str, written: Path, other: Path, undisturbed: Ended) -> None:
    """After the third call of what it does for each run."""
    module, *names = moment.split(".")
    code = f"""
import os, sys
from turnwise import cli
from stages.store import {module}
owner, name = {".".join([module, *names[:-1]])}, {names[-1]!r}
real, calls = getattr(owner, name), []
def killed(*args, **options):
    found = real(*args, **options)
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), 9)
    return found
setattr(owner, name, killed)
cli.main(sys.argv[1:])
"""
    command = ["import", str(written), "--home", str(other)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", code, *command], env=environment, capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr
    assert cli.main(command) == 0
    assert seen(other, undisturbed.done.json) == undisturbed.seen


def truncate(bundle: Path) -> None:
    file = next(bundle.rglob("turns.parquet"))
    file.write_bytes(file.read_bytes()[:-10])


def lose(bundle: Path) -> None:
    next(bundle.rglob("adapter_model.safetensors")).unlink()


def add(bundle: Path) -> None:
    (bundle / "more.json").write_text("{}")


def pickle(bundle: Path) -> None:
    (bundle / "runs" / "model.pkl").write_bytes(b"cos\nsystem\n.")
    rehash(bundle)


def link(bundle: Path) -> None:
    (bundle / "files" / "outside.json").symlink_to("/etc/passwd")
    rehash(bundle)


def preset(bundle: Path) -> None:
    put(bundle, "flows/presets/nightly.toml")


def unnamed(bundle: Path) -> None:
    put(bundle, "data/more/tasks.json")


def put(bundle: Path, path: str) -> None:
    (bundle / "files" / path).parent.mkdir(parents=True, exist_ok=True)
    (bundle / "files" / path).write_text("")
    rehash(bundle)


def climb(bundle: Path) -> None:
    (bundle.parent / "evil.json").write_text("{}")
    named = hashes(bundle)
    (bundle / HASHES).write_text(json.dumps({**named, "files/../../evil.json": named[MANIFEST]}))


def absolute(bundle: Path) -> None:
    (bundle / HASHES).write_text(json.dumps({**hashes(bundle), "/etc/passwd.json": "0"}))


def newer(bundle: Path) -> None:
    change(bundle, schema_version=99)


def newer_rows(bundle: Path) -> None:
    change(bundle, replay_schema=99)


def climbing_run(bundle: Path) -> None:
    stored = json.loads((bundle / MANIFEST).read_text())
    change(bundle, runs=["../../../../../../../../../../../../etc", *stored["runs"]])


def no_json(bundle: Path) -> None:
    (bundle / MANIFEST).write_text("[" * 100_000)


def no_number(bundle: Path) -> None:
    file = next(bundle.rglob("run.json"))
    file.write_text(json.dumps({**json.loads(file.read_text()), "started_ms": "soon"}))
    rehash(bundle)


def change(bundle: Path, **values: Any) -> None:
    stored = json.loads((bundle / MANIFEST).read_text())
    (bundle / MANIFEST).write_text(json.dumps({**stored, **values}))
    rehash(bundle)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (truncate, "turns.parquet is damaged: its sha256"),
        (lose, "adapter_model.safetensors is damaged: it is missing"),
        (add, "holds 'more.json', which sha256.json does not name"),
        (pickle, "'runs/model.pkl', which is no data file"),
        (link, "outside.json is damaged: it is missing"),
        (preset, "holds 'flows/presets/nightly.toml', which no config"),
        (unnamed, "holds 'data/more/tasks.json', which no config"),
        (climb, "names 'files/../../evil.json', which leaves the folder"),
        (absolute, "names '/etc/passwd.json', which leaves the folder"),
        (newer, "schema 99, but this turnwise reads only up to 1"),
        (newer_rows, "rows of schema 99, but this turnwise"),
        (climbing_run, "is no run id"),
        (no_json, "no JSON"),
        (no_number, "started_ms"),
    ],
)
def test_a_spoiled_bundle_is_one_sentence(
    spoil: Callable[[Path], None], said: str, bundle: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(bundle)
    with pytest.raises(UsageError, match=r"^bundle: ") as told:
        check.read(bundle)
    assert said in str(told.value) and "\n" not in str(told.value)
    assert cli.main(["import", str(bundle), "--home", str(other)]) == 2
    assert said in capsys.readouterr().err


def test_rows_of_another_shape_are_one_sentence(bundle: Path, undisturbed: Ended) -> None:
    run_id = titles(undisturbed)["collect 0"]
    file = artifacts_of(bundle, run_id) / "rows" / "turns.parquet"
    pq.write_table(pq.read_table(file).drop(["reward"]), file)
    reseal(bundle, run_id)
    with pytest.raises(UsageError, match=r"turns.parquet is damaged: columns run_id, episode_id, .* were wanted"):
        check.rows(check.read(bundle), run_id)


def test_a_file_of_the_project_is_never_overwritten(
    written: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (other / "data" / "base").mkdir(parents=True)
    (other / "data" / "base" / "config.json").write_text("mine")
    assert cli.main(["import", str(written), "--home", str(other), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["different"] == ["data/base/config.json"]
    assert (other / "data" / "base" / "config.json").read_text() == "mine"


def test_only_a_pipeline_run_that_has_ended_becomes_a_bundle(
    finished: Ended, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = titles(finished)["critic 0"]
    assert cli.main(["export", stage, str(tmp_path / "out"), "--what", "bundle", "--home", str(finished.home)]) == 2
    assert "wanted a pipeline run, found a run of critic" in capsys.readouterr().err
    run_id = open_workspace(finished.home).tracking.start("pipeline", "goes on", {})
    assert cli.main(["export", run_id, str(tmp_path / "out"), "--what", "bundle", "--home", str(finished.home)]) == 2
    assert "is still running" in capsys.readouterr().err
