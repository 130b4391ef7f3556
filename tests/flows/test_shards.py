"""`run.shards`: collect, targets, refine and evaluate in shards leave what they leave without, whatever is dropped."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Event, Lock
from typing import Any

import pytest
from commands import RUN, Done, Ended, make_home, seen

from flows import presets, shard_worker, shards, workspace
from flows.processes import error_of, told_of
from flows.shards import Make
from stages.frame.types import Diverged, Dropped, Malformed, MissingInput, Request, TurnwiseError, UsageError
from stages.llm.scripted import GARBAGE, ScriptedEngine, play
from stages.store.shards import EXPERIMENT, Shard
from stages.store.tracking import Tracking
from turnwise import cli


class Maker:
    """Makes shards in this process, one at a time. `made`: their titles. `fails`: whether one is lost instead."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.fails: Callable[[Shard], bool] = lambda shard: False
        self._one = Lock()

    @contextmanager
    def __call__(self, run: Any, stopping: Event) -> Iterator[Make]:
        def make(shard: Shard) -> None:
            with self._one:
                if self.fails(shard):
                    raise TurnwiseError(f"{shard.title} was lost")
                self.made.append(shard.title)
                job = json.loads(json.dumps(asdict(shard)))
                shards.told(shard_worker.make(Path.cwd(), job))

        yield make


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Maker:
    made = Maker()
    monkeypatch.setattr(shards, "Workers", lambda home: made)
    monkeypatch.setattr(shard_worker, "_kept", {})
    return made


def ran(home: Path, *more: str) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(home), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main([*RUN, *more])
    return Done(status, out.getvalue(), err.getvalue())


def sets(*changes: str) -> list[str]:
    return [part for change in changes for part in ("--set", change)]


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """All that readers see: rows, metrics, artifacts, inputs, and what the fingerprints are made of."""
    assert found.keys() == expected.keys()
    for title in found:
        mine, its = dict(found[title]), dict(expected[title])
        for one in (mine, its):
            # It says in how many processes, which no result depends on.
            one["files"] = {name: digest for name, digest in one.get("files", {}).items() if name != "config.json"}
        for part in mine:
            assert mine[part] == its[part], (title, part)


@pytest.mark.parametrize("n", [3, 50])
def test_a_run_in_shards_leaves_what_a_run_without_leaves(
    n: int, maker: Maker, fresh: Path, undisturbed: Ended
) -> None:
    """3 divides nothing here, and 50 is more than there are episodes."""
    done = ran(fresh, *sets(f"run.shards={n}"))
    assert done.status == 0, done.err
    same(seen(fresh, done.json), undisturbed.seen)
    stages = {title.split(" ")[0] for title in maker.made}
    assert stages == {"collect", "targets", "refine", "evaluate"}
    assert "collect 0, shard 3 of 3" in maker.made or n == 50
    # Joined, they are not needed any more.
    tracking = Tracking(fresh / "mlflow")
    assert not tracking.runs(EXPERIMENT)
    assert not [file for file in (fresh / "mlflow" / "artifacts" / EXPERIMENT).rglob("*") if file.is_file()]


def careless(prompt: str, request: Request) -> str:
    """A third of its replies cannot be read, by the request alone."""
    return GARBAGE if request.seed % 3 == 0 else play(prompt, request)


def test_what_is_dropped_and_drawn_again_is_the_same(
    maker: Maker, empty_store: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (workspace, shard_worker):
        monkeypatch.setattr(module, "make_engine", lambda run: ScriptedEngine(careless))
    found = []
    for n in (1, 3):
        home = make_home(tmp_path / str(n), empty_store, base)
        more = sets(
            f"run.shards={n}",
            "iterations=1",
            "task.malformed_allowance=8",
            "collect.first_episodes=12",
            "targets.transitions=24",
        )
        done = ran(home, *more)
        assert done.status == 0, done.err
        found.append(seen(home, done.json))
    same(found[1], found[0])
    assert found[1]["targets 0"]["metrics"]["targets/dropped"] > 3
    assert found[1]["refine 0"]["metrics"]["refine/tries"] > 1


def test_after_a_kill_finished_shards_are_found_again(maker: Maker, fresh: Path, undisturbed: Ended) -> None:
    """Also those of a later role. --force makes all anew."""
    for lost in ("evaluate -1, shard 2 of 3", "targets 0, shard 1 of 2"):
        maker.fails = lambda shard, lost=lost: shard.title == lost  # type: ignore[misc]
        done = ran(fresh, *sets("run.shards=3"))
        assert done.status == 1 and f"{lost} was lost" in done.err
    maker.fails = lambda shard: False
    before = len(maker.made)
    done = ran(fresh, *sets("run.shards=3"))
    assert done.status == 0
    same(seen(fresh, done.json), undisturbed.seen)
    assert maker.made[before] == "targets 0, shard 1 of 2"
    once = [title for title in maker.made[:before] if title.startswith("evaluate -1")]
    assert sorted(once[:3]) == [f"evaluate -1, shard {i} of 3" for i in (1, 2, 3)]


def test_a_run_without_shards_is_that_of_a_run_with_them(maker: Maker, finished: Ended) -> None:
    """No fingerprint holds the keys: all is reused, and nothing is made."""
    done = ran(finished.home, *sets("run.shards=2"))
    assert done.status == 0 and not done.ran and not maker.made


def test_an_error_of_a_shard_is_told_as_without_shards(
    maker: Maker, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_worker, "make_engine", lambda run: ScriptedEngine(fail_on=range(100)))
    done = ran(fresh, *sets("run.shards=2"))
    assert done.status == 1 and "the scripted engine fails at call 1" in done.told[-1]
    assert {info.status for info in Tracking(fresh / "mlflow").runs(EXPERIMENT)} == {"FAILED"}
    assert not list((fresh / "data" / "tmp").iterdir())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["run.shards=0"], r"run\.shards: .*greater than or equal to 1"),
        (["run.workers=ray"], r"run: .*needs run\.address, such as 127\.0\.0\.1:6379"),
        (["run.workers=pool"], r"run: .*needs run\.pool, such as gpus"),
    ],
)
def test_what_a_key_lacks_is_said_before_anything_runs(change: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        presets.load("tiny", change)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UsageError("said"), UsageError),
        (Dropped("said", "a run"), MissingInput),  # made from more than a text
        (Diverged("said"), Diverged),
        (ValueError("said"), TurnwiseError),
        (Malformed("said"), TurnwiseError),
    ],
    ids=lambda one: getattr(one, "__name__", type(one).__name__),
)
def test_an_error_of_another_process_is_raised_as_its_nearest_kind(error: Exception, kind: type[TurnwiseError]) -> None:
    found = error_of(json.loads(json.dumps(told_of(error))))
    assert (type(found), str(found)) == (kind, "said")
