"""What bad input gets, through the real command over the real stages: one sentence, an exit status, and nothing lost.

Wrong usage that the command line or the presets find by themselves is in test_cli.py and test_presets.py; what each
store, engine and environment says is in its own test. Here: what reaches the user, what is left behind, and that the
same command goes on.
"""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import duckdb
import pytest
from commands import RUN, TITLES, Commands, Done, Ended, assert_same_result, make_home, stage_runs, titles_by_status

from stages.store.replay import Replay
from stages.store.tables import SCHEMA_VERSION
from stages.store.tracking import Tracking

pytestmark = pytest.mark.slow

REST = ("--plain", "--json", "--quiet")
FULL = r"turnwise: TurnwiseError: \S+ could not be written: the disk is full\. Free some space and run the same command again; nothing half-written is read"
FULL_STORE = r"turnwise: TurnwiseError: the store \S+ could not be read or written \(.*disk I/O error\)\. Look whether the disk is full or failing, then .*"
STOPPED = "turnwise: interrupted; nothing is half-written, and the same command goes on from the last finished stage."
DOWN = r"turnwise: EngineUnavailable: the engine at 127\.0\.0\.1:8000 did not answer in 5 tries of 300 s\."
BROKEN = "turnwise: TurnwiseError: no episode could be scored: env_failed on all 6, first error: ZeroDivisionError: the desk has no such drawer"
UNREADABLE = r"turnwise: TurnwiseError: targets wanted futures of 8 transitions, but no reply could be read \(.*\)\. Look at the engine's model .*, then run .*"

# (stage run, moment, what happens, the sentence, how the stage's run is marked). A full disk stops the mark as well:
# the run is found dead by the next command.
MISHAPS = [
    ("evaluate base", "rows", "fill_the_disk", FULL, "KILLED"),
    ("collect 0", "inside", "interrupt", STOPPED, "KILLED"),
    ("targets 0", "inside", "engine_down", DOWN, "FAILED"),
    ("targets 0", "inside", "talk_garbage", UNREADABLE, "FAILED"),
    ("critic 0", "inside", "fill_the_disk", FULL, "KILLED"),
    ("critic 0", "inside", "interrupt", STOPPED, "KILLED"),
    ("refine 0", "inside", "engine_down", DOWN, "FAILED"),
    ("refine 0", "started", "fill_the_disk", FULL, "KILLED"),
    ("distill 0", "committed", "interrupt", STOPPED, "KILLED"),
    ("evaluate 0", "committed", "fill_the_disk", FULL_STORE, "KILLED"),
    ("collect 1", "environment", "break_desk", BROKEN, "FAILED"),
    ("evaluate final", "inside", "engine_down", DOWN, "FAILED"),
]


@dataclass(frozen=True)
class After:
    """What a command left: how it ended, what `turnwise runs` lists then, and scratch folders that still lie there."""

    done: Done
    listed: list[dict[str, Any]]
    scratch: list[str]


@dataclass(frozen=True)
class Chain:
    """The commands in one folder, in order: the n-th one met MISHAPS[n], the last one none."""

    home: Path
    after: list[After]


@pytest.fixture(scope="module")
def chain(command: Commands, empty_store: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    home = make_home(tmp_path_factory.mktemp("mishaps") / "home", empty_store, base)
    after = []
    for title, moment, act in [*(mishap[:3] for mishap in MISHAPS), ("", "", "")]:
        done = command(home, *RUN, title=title, moment=moment, act=act)
        after.append(
            After(done, command(home, "runs", "--json").json, [path.name for path in (home / "data" / "tmp").iterdir()])
        )
    return Chain(home, after)


@pytest.mark.parametrize("number", range(len(MISHAPS)), ids=lambda n: " ".join(MISHAPS[n][:3]))
def test_a_mishap_is_one_sentence_and_the_same_command_goes_on(number: int, chain: Chain) -> None:
    title, _, _, sentence, status = MISHAPS[number]
    now, following = chain.after[number : number + 2]
    assert (now.done.status, now.done.out) == (1, "")
    assert len(now.done.told) == 1, now.done.err
    assert re.fullmatch(sentence, now.done.told[0]), now.done.told
    assert len(now.listed) == number + 1
    assert (now.listed[0]["status"], now.listed[0]["final"], now.scratch) == (status, {}, [])
    n_finished = TITLES.index(title)
    assert following.done.reused[:n_finished] == list(TITLES[:n_finished])
    assert title not in following.done.reused


def test_after_all_mishaps_the_result_is_that_of_an_undisturbed_run(chain: Chain, undisturbed: Ended) -> None:
    done = chain.after[-1].done
    assert (done.status, done.told) == (0, [])
    assert_same_result(chain.home, done, undisturbed)
    marks = Counter((status, what) for title, _, _, _, status in MISHAPS for what in (title, "pipeline"))
    finished = Counter(("FINISHED", what) for what in ("pipeline", *TITLES))
    assert (
        Counter(
            {(status, what): n for status, counts in titles_by_status(chain.home).items() for what, n in counts.items()}
        )
        == marks + finished
    )


def test_what_a_failed_run_says_of_itself(chain: Chain, command: Commands) -> None:
    """The tag that MLflow's page and `show` have; of a process that could not write any more, that it is gone."""
    runs = [
        info
        for name in ("targets", "critic", "collect")
        for info in Tracking(chain.home / "mlflow").runs(name, 99)
        if info.status != "FINISHED"
    ]
    told = {info.tags["error"].split(":")[0] for info in runs}
    assert told == {"EngineUnavailable", "TurnwiseError", "KeyboardInterrupt", "its process is gone"}
    failed = next(info.run_id for info in runs if info.tags["error"].startswith("EngineUnavailable"))
    assert (
        "error: EngineUnavailable: the engine at 127.0.0.1:8000 did not answer"
        in command(chain.home, "show", failed).out
    )


def test_an_environment_that_raises_is_tried_again_and_counted(finished: Ended, command: Commands) -> None:
    """Three tries an episode; what it raised is no reward and no episode of its own."""
    home, ended = finished.home, finished.done
    again = command(
        home, "rerun", "collect", "--of", ended.json["run_id"], *REST, title="collect 1", moment="environment",
        act="break_desk_twice",
    )  # fmt: skip
    assert (again.status, again.told) == (0, [])
    metrics = again.json["metrics"]
    assert (metrics["collect/retries"], metrics["collect/env_failed"], metrics["collect/episodes"]) == (2, 0, 6)
    rows = Replay(home / "data" / "turnwise.duckdb").rows("episodes", [again.json["run_id"]])
    assert sorted(row["attempts"] for row in rows) == [1, 1, 1, 1, 2, 2]
    assert {row["outcome"] for row in rows} == {"scored"}


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (
            ["collect.episodes=many"],
            "collect.episodes: input should be a valid integer, unable to parse string as an integer; found 'many'.",
        ),
        (["critic.learning_rate=1"], "There is no key 'critic.learning_rate'.*"),
        (["task.env=service_dask"], "task.env: there is no environment 'service_dask'; did you mean 'service_desk'.*"),
        (["task.options.requets=2"], "task.options: service_desk has no option 'requets'; did you mean 'requests'.*"),
        (["roles.prompts=service_dusk"], "roles.prompts: no prompt folder named 'service_dusk'. Known are .*"),
        (
            ["evaluate.probe_path=no.jsonl"],
            "wanted a JSONL file of role rows at 'no.jsonl', found none; make it with: turnwise pretrain",
        ),
        (["model.engine=hf", "model.path=data/bose"], "model.path: there is no folder 'data/bose'; .*"),
        (
            ["model.engine=openai", "model.url=localhost:8000"],
            "model.url: wanted a base URL such as http://127.0.0.1:8000/v1.*",
        ),
    ],
)
def test_a_wrong_value_is_one_sentence_and_leaves_no_rows(
    fresh: Path, command: Commands, sets: list[str], told: str
) -> None:
    done = command(fresh, *RUN, *(part for one in sets for part in ("--set", one)))
    assert (done.status, done.out) == (2, "")
    assert len(done.told) == 1, done.err
    assert re.fullmatch(f"turnwise: {told}", done.told[0]), done.told
    assert not (fresh / "data" / "turnwise.duckdb").exists()
    assert "RUNNING" not in titles_by_status(fresh)


@pytest.mark.parametrize("lr", ["1e30", "1e39", "inf"])
def test_a_training_that_diverges_is_one_sentence_and_no_weights_of_it_are_ever_reused(
    fresh: Path, command: Commands, lr: str
) -> None:
    asked = (*RUN, "--set", "iterations=1", "--set", "distill.epochs=1", "--set", f"distill.lr={lr}")
    for _ in range(2):
        done = command(fresh, *asked)
        assert done.status == 1
        assert len(done.told) == 1, done.err
        assert re.fullmatch(r"turnwise: Diverged: .* Lower the stage's learning rate.*", done.told[0])
        assert "distill 0" not in done.reused
    assert titles_by_status(fresh)["FAILED"] == {"distill 0": 2, "pipeline": 2}


def test_missing_general_rows_are_told_before_any_stage_and_broken_ones_by_theirs(
    fresh: Path, command: Commands
) -> None:
    asked = (
        *RUN, "--set", "iterations=1", "--set", "distill.general_rows=1", "--set", "distill.general_path=rows.jsonl",
    )  # fmt: skip
    done = command(fresh, *asked)
    assert (done.status, len(done.told)) == (2, 1)
    assert done.told[0].startswith(
        "turnwise: distill.general_path: wanted a JSONL file of general instruction rows at 'rows.jsonl', found none."
    )
    assert done.told[0].endswith("Or mix none: --set distill.general_rows=0")
    assert not titles_by_status(fresh)
    (fresh / "rows.jsonl").write_text("broken\n")
    assert (
        command(fresh, *asked)
        .told[0]
        .startswith("turnwise: rows.jsonl, line 1: wanted an object with role, messages and reply")
    )
    (fresh / "rows.jsonl").write_text(
        json.dumps({"role": "policy", "messages": [{"role": "user", "content": "photo"}], "reply": "photo"}) + "\n"
    )
    following = command(fresh, *asked)
    assert (following.status, following.reused) == (0, list(TITLES[: TITLES.index("distill 0")]))


@pytest.mark.parametrize("stage", ["critic", "evaluate"])
def test_an_adapter_of_another_base_model_is_refused(stage: str, finished: Ended, command: Commands) -> None:
    """The stored adapters belong to the scripted engine's model; the model in data/base is another one."""
    home, ended = finished.home, finished.done
    before = titles_by_status(home)
    refused = command(
        home, "rerun", stage, "--of", ended.json["run_id"], *REST, "--set", "model.engine=hf", "--set",
        "model.path=data/base",
    )  # fmt: skip
    assert (refused.status, refused.out, len(refused.told)) == (2, "", 1)
    wanted = r"turnwise: the adapter belongs to base model \w{12}, the run uses \w{12}; set model.path to the adapter's own base"
    assert re.fullmatch(wanted, refused.told[0]), refused.told
    assert titles_by_status(home) == before | {"FAILED": Counter([f"{stage} 1"])}
    assert command(home, *RUN).reused == list(TITLES)


def test_a_replay_of_a_newer_schema_is_refused_before_any_work(fresh: Path, command: Commands) -> None:
    file = fresh / "data" / "turnwise.duckdb"
    Replay(file).commit("r1", "collect", {})
    with closing(duckdb.connect(str(file))) as connection:
        connection.execute("update schema_version set version = 99")
    refused = command(fresh, *RUN)
    found = f"has schema 99, but this turnwise reads only up to {SCHEMA_VERSION}"
    assert (refused.status, refused.told) == (
        2,
        [f"turnwise: the replay {file} {found}. Update turnwise, or use another folder"],
    )
    assert titles_by_status(fresh) == {}


def test_a_store_of_a_newer_mlflow_is_refused_before_any_work(fresh: Path, command: Commands) -> None:
    file = fresh / "mlflow" / "mlflow.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("update alembic_version set version_num = 'ffffffffffff'")
        connection.commit()
    before = file.read_bytes()
    refused = command(fresh, *RUN)
    assert (refused.status, len(refused.told)) == (2, 1), refused.err
    assert re.fullmatch(
        r"turnwise: the store \S+ was wanted, but it was written by a newer MLflow than .*", refused.told[0]
    ), refused.told
    assert file.read_bytes() == before
    assert not (fresh / "data" / "turnwise.duckdb").exists()


def test_a_deleted_duckdb_file_is_filled_again_by_the_command_that_needs_it(finished: Ended, command: Commands) -> None:
    home, runs = finished.home, stage_runs(finished.done.json)
    (home / "data" / "turnwise.duckdb").unlink()
    assert command(home, *RUN).reused == list(TITLES)
    assert command(home, "rerun", "targets", "--of", runs["targets 0"], *REST).status == 0
    assert command(home, "verify").status == 0  # takes in the rest
    assert_same_result(home, finished.done, finished)


def test_rows_that_are_gone_everywhere_are_missed_in_one_sentence_and_can_be_made_again(
    finished: Ended, command: Commands
) -> None:
    home, runs = finished.home, stage_runs(finished.done.json)
    (home / "data" / "turnwise.duckdb").unlink()
    file = next((home / "mlflow" / "artifacts" / "collect" / runs["collect 0"]).rglob("episodes.parquet"))
    file.unlink()
    missed = command(home, "rerun", "targets", "--of", runs["targets 0"], *REST)
    assert (missed.status, missed.out, len(missed.told)) == (1, "", 1)
    assert f"rows of collect run {runs['collect 0']} were wanted from {file}, but it is gone" in missed.told[0]
    assert missed.told[0].endswith("Run: turnwise verify --mend, then the same command again")
    assert command(home, "verify").status == 1
    assert command(home, "verify", "--mend", "--json").json["lost"].keys() == {runs["collect 0"]}
    again = command(home, *RUN)
    assert again.status == 0 and "collect 0" in again.ran
    assert command(home, "verify").status == 0


def test_a_damaged_duckdb_file_is_one_sentence_of_every_command_and_made_again(
    finished: Ended, command: Commands
) -> None:
    home, run_id = finished.home, finished.done.json["run_id"]
    file = home / "data" / "turnwise.duckdb"
    file.write_bytes(file.read_bytes()[:10_000])
    asked = (["show", stage_runs(finished.done.json)["collect 0"]], ["sql", "from turns"], ["verify"], [*RUN])
    for argv in (*asked, ["export", run_id, str(home / "rows"), "--what", "rows"]):
        stopped = command(home, *argv)
        assert (stopped.status, len(stopped.told)) == (1, 1), stopped.err
        assert "damaged" in stopped.told[0] and "Run: turnwise verify --rebuild" in stopped.told[0]
    rebuilt = command(home, "verify", "--rebuild", "--json")
    assert (rebuilt.status, rebuilt.json["lost"], rebuilt.json["orphans"]) == (0, {}, [])
    assert_same_result(home, finished.done, finished)
    assert command(home, *RUN).reused == list(TITLES)


@pytest.fixture
def garbage_server() -> Iterator[str]:
    """URL of a server that answers everything with a page."""

    class Page(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html>welcome</html>")

        def log_message(self, format: str, *arguments: object) -> None:
            return None

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_an_endpoint_that_answers_garbage_fails_the_stage_in_one_sentence(
    fresh: Path, command: Commands, garbage_server: str
) -> None:
    done = command(fresh, *RUN, "--set", "model.engine=openai", "--set", f"model.url={garbage_server}")
    assert (done.status, done.out) == (1, "")
    assert done.told == [
        f"turnwise: EngineUnavailable: the engine at {garbage_server.removeprefix('http://')} answered garbage: the reply is no JSON object."
    ]
    assert titles_by_status(fresh) == {"FAILED": Counter(["evaluate base", "pipeline"])}
