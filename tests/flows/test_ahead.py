"""`collect.lag`: an older policy plays, and its episodes are played while the iteration before trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import served

from flows import presets
from flows.pipeline import iterate
from flows.registry import select_inputs
from stages.frame.types import UsageError
from stages.llm.hf import HfEngine
from stages.store.tracking import Tracking
from stages.store.workspace import StageRun

HERE = Path(__file__).parents[2]
RUN = (
    "run",
    "tiny",
    "--plain",
    "--json",
    "--set",
    "iterations=3",
    "--set",
    "collect.lag=1",
    "--set",
    "critic.epochs=40",
    "--set",
    "model.engine=openai",
)


def test_the_policy_that_plays_is_an_iteration_older() -> None:
    history = {"collect": ["c0", "c1"], "distill": ["d0", "d1"]}
    assert select_inputs("collect", history)["distill"] == ["d1"]
    assert select_inputs("collect", history, 1)["distill"] == ["d0"]
    assert "distill" not in select_inputs("collect", {"collect": ["c0"], "distill": ["d0"]}, 1)
    # Others have the newest of all.
    assert select_inputs("targets", history, 1) == select_inputs("targets", history)


@pytest.mark.parametrize("method", ["grpo", "self_ac", "sdpo"])
def test_a_method_whose_newest_policy_must_play_refuses_a_lag(method: str) -> None:
    with pytest.raises(UsageError, match=r"collect\.lag: method \w+ is on-policy"):
        presets.load(f"desk+{method}", ["collect.lag=1"])


def test_what_is_begun_ahead_is_what_is_asked_for_later() -> None:
    """With a lag each collect but the first is begun once the one before has ended; without one none is."""
    for lag in (0, 1):
        run = presets.load("tiny", [f"collect.lag={lag}", "iterations=4"])
        asked: list[Any] = []
        begun: list[Any] = []

        def step(call: Any, asked: list[Any] = asked) -> StageRun:
            asked.append((call.title, call.inputs))
            return StageRun(call.stage.name, f"run of {call.title}", call.iteration, {}, False, 0.0)

        def ahead(call: Any, begun: list[Any] = begun, asked: list[Any] = asked) -> None:
            assert asked[-1][0] == f"collect {call.iteration - 1}"
            begun.append((call.title, call.inputs))

        assert len(list(iterate(run, step, ahead=ahead))) == 4
        collects = [one for one in asked if one[0].startswith("collect")]
        assert begun == (collects[1:] if lag else [])
        policies = [inputs.get("distill") for _, inputs in collects]
        newest = [None, *([f"run of distill {i}"] for i in range(3))]
        assert policies == (newest if not lag else [None, *newest[:3]])


def summary_of(home: Path, url: str, *more: str) -> Any:
    (home / "data").mkdir(parents=True)
    (home / "mlflow").mkdir()
    (home / "data" / "base").symlink_to(HERE / "data" / "base")
    command = [sys.executable, "-m", "turnwise", *RUN, "--home", str(home), "--set", f"model.url={url}", *more]
    env = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def processes(home: Path, stage: str) -> list[str]:
    """Which process made each run of a stage, in iteration order."""
    tracking = Tracking(home / "mlflow")
    return [one.tags["pid"] for one in tracking.runs(stage, 100)][::-1]


@pytest.mark.slow
def test_with_servers_the_next_episodes_are_played_while_this_iteration_trains(tmp_path: Path) -> None:
    """And come out as those that are played afterwards."""
    base = str(HERE / "data" / "base")
    with served(HfEngine(base), "data/base", 512) as url:
        beside, after = (summary_of(tmp_path / name, url, *more) for name, more in (("a", ()), ("b", ("--force",))))
    (own,) = set(processes(tmp_path / "a", "critic"))
    played = processes(tmp_path / "a", "collect")
    assert len(played) == 3 and played[0] == own
    # On a busy machine the run may come first to one of them, and then plays it itself.
    assert set(played[1:]) - {own}
    assert len(set(processes(tmp_path / "b", "collect") + processes(tmp_path / "b", "critic"))) == 1
    for mine, its in zip(beside["iterations"], after["iterations"], strict=True):
        for name in ("collect/return", "evaluate/win_rate", "critic/nll/successor"):
            assert mine["metrics"].get(name) == its["metrics"].get(name), name
    assert not list((tmp_path / "a" / "data" / "ahead").glob("*.json"))
