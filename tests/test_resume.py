"""kill -9 in every stage of the real pipeline, then the same command: it goes on, and readers see what they would have
seen.

One project folder, one command given over and over: it is killed in the first stage run, then in the second, ... until
it ends.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commands import (
    RUN,
    TITLES,
    Commands,
    Done,
    Ended,
    assert_same_result,
    make_home,
    stage_runs,
    title_of,
    titles_by_status,
)

from stages.store.replay import Replay
from stages.store.tracking import Tracking

MOMENTS = ("inside", "committed")
ADAPTERS = (("critic", "adapter"), ("critic", "target"), ("distill", "adapter"), ("distill", "target"))
KILLS = [(title, moment) for title in TITLES for moment in MOMENTS]

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Chain:
    """The commands in order: the n-th one was killed at KILLS[n], the last one ended."""

    home: Path
    done: list[Done]

    @property
    def summary(self) -> Any:
        return self.done[-1].json


@pytest.fixture(scope="module")
def chain(command: Commands, empty_store: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    home = make_home(tmp_path_factory.mktemp("killed") / "home", empty_store, base)
    killed = [command(home, *RUN, title=title, moment=moment, act="kill") for title, moment in KILLS]
    return Chain(home, [*killed, command(home, *RUN)])


def test_undisturbed_every_stage_runs_once_and_does_something(undisturbed: Ended) -> None:
    """Without this the comparisons below could be of nothing with nothing."""
    done, found = undisturbed.done, undisturbed.seen
    assert (done.status, done.told, done.reused, done.ran) == (0, [], [], list(TITLES))
    assert titles_by_status(undisturbed.home) == {"FINISHED": Counter(["pipeline", *TITLES])}
    for i in range(2):
        rows = {name: found[f"{name} {i}"]["rows"] for name in ("collect", "targets", "critic", "refine", "evaluate")}
        assert len(rows["collect"]["episodes"]) == 6 and len(rows["collect"]["turns"]) >= 12
        assert len(rows["targets"]["targets"]) == len(rows["critic"]["priorities"]) == 8
        assert {row["verdict"] for row in rows["refine"]["judgements"]} == {"yes", "no"}
        assert len(rows["refine"]["targets"]) >= 8 and rows["evaluate"]["judgements"]
    adapters = {
        found[f"{name} {i}"]["files"][f"{folder}/adapter_model.safetensors"]
        for name, folder in ADAPTERS
        for i in range(2)
    }
    assert len(adapters) == 2 * len(ADAPTERS)


@pytest.mark.parametrize(("title", "moment"), KILLS)
def test_a_killed_run_goes_on_from_the_last_finished_stage(title: str, moment: str, chain: Chain) -> None:
    number = KILLS.index((title, moment))
    killed, following = chain.done[number : number + 2]
    assert killed.status == -9
    n_finished = TITLES.index(title)
    assert following.reused[:n_finished] == list(TITLES[:n_finished])
    assert title not in following.reused
    assert title in following.ran or following.status == -9  # it was killed in the same stage once more


def test_after_all_kills_the_result_is_that_of_an_undisturbed_run(chain: Chain, undisturbed: Ended) -> None:
    assert (chain.done[-1].status, chain.done[-1].told) == (0, [])
    assert_same_result(chain.home, chain.done[-1], undisturbed)


def test_every_stage_was_finished_once_and_every_killed_run_is_marked(chain: Chain) -> None:
    expected = {
        "FINISHED": Counter(["pipeline", *TITLES]),
        "KILLED": Counter([*(title for title, _ in KILLS), *["pipeline"] * len(KILLS)]),
    }
    assert titles_by_status(chain.home) == expected


def test_rows_of_killed_runs_are_orphans_that_nobody_reads(chain: Chain, command: Commands) -> None:
    tracking, replay = Tracking(chain.home / "mlflow"), Replay(chain.home / "data" / "turnwise.duckdb")
    orphans = {title_of(tracking.tags(run_id)): run_id for run_id in replay.verify(tracking.finished_runs())}
    assert orphans.keys() == set(TITLES)  # of every stage the one that was killed after its rows were committed
    told = command(chain.home, "verify", "--json").json
    assert told == {"orphans": sorted(orphans.values()), "impossible": {}, "changed": {}, "lost": {}, "mended": False}
    # The lost run left the same episodes under the same ids: whoever asks for one is given the finished run's.
    episode = replay.rows("episodes", [orphans["collect 1"]])[0]["episode_id"]
    shown = command(chain.home, "show", episode, "--json").json
    assert shown["episode"]["run_id"] == stage_runs(chain.summary)["collect 1"]
    assert [turn["turn"] for turn in shown["turns"]] == list(range(shown["episode"]["n_turns"]))


def test_killed_runs_leave_no_scratch(chain: Chain) -> None:
    assert list((chain.home / "data" / "tmp").iterdir()) == []


def test_once_finished_the_same_command_runs_nothing(chain: Chain, command: Commands) -> None:
    again = command(chain.home, *RUN)
    assert (again.status, again.ran, again.reused) == (0, [], list(TITLES))
    assert stage_runs(again.json) == stage_runs(chain.summary)
