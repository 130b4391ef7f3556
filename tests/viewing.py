"""Pipeline runs in a store, made by hand: two of nlac that differ in a rate, with episodes that a critic judged, and one of
self_ac with values; and a browser.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from toys import episode_row, turn_row

from flows import presets
from stages.store import sqlite
from stages.store.replay import Replay
from stages.store.tracking import Tracking
from turnwise import cli

PLANTED = "</script><script>document.title = 'taken over'</script><img src=x onerror=\"document.title = 'taken over'\"> &amp; \u2028"
"""What a model may write."""


@dataclass(frozen=True)
class Viewed:
    """A project folder, and its runs by name: a, b (pipeline), and the stage runs of each such as "a/evaluate"."""

    home: Path
    runs: dict[str, str]


def new_viewed(home: Path, empty_store: Path) -> Viewed:
    """In a folder that is empty."""
    (home / "mlflow").mkdir()
    sqlite.copy(empty_store, home / "mlflow" / "mlflow.db")
    (home / "data").mkdir()
    return make_viewed(home)


def turnwise(capsys: pytest.CaptureFixture[str], viewed: Viewed, *argv: str) -> tuple[int, str]:
    """Exit status, and stdout or the error."""
    status = cli.main([*argv, "--home", str(viewed.home)])
    found = capsys.readouterr()
    return status, found.err if status else found.out


def make_viewed(home: Path) -> Viewed:
    """Runs a and b: 3 episodes of collect, of which refine judged one, and 2 of evaluate, which the audit judged: the critic
    said Yes to the one that is lost. Both evaluate the scenarios s1 and s2, by the same ids.
    """
    tracking, replay = Tracking(home / "mlflow"), Replay(home / "data" / "turnwise.duckdb")
    runs: dict[str, str] = {}
    for name, lr in (("a", 1e-3), ("b", 5e-4)):
        config = presets.load("tiny", [f"critic.lr={lr}", f"model.path={home / 'no model'}"])
        runs[name] = tracking.start("pipeline", f"run {name}", {"preset": "tiny"})
        own = {
            stage: tracking.start(stage, f"{stage} 0", {"pipeline": runs[name]})
            for stage in ("collect", "refine", "evaluate")
        }
        runs |= {f"{name}/{stage}": run_id for stage, run_id in own.items()}
        for stage, run_id in own.items():
            tracking.write_json(run_id, "inputs.json", {"collect": [own["collect"]]} if stage == "refine" else {})
            replay.commit(run_id, stage, rows(stage, name))
            tracking.finish(run_id)
        metrics = {"critic/nll/successor": 0.5, "critic/nll/successor_first": 0.9, "collect/return": 0.1}
        row = {
            "iteration": -1,
            "runs": {},
            "metrics": {},
            "seconds": 1.0,
            "win_rate": 0.1,
            "win_low": 0.0,
            "win_high": 0.2,
        }
        summary = {
            "run_id": runs[name], "preset": "tiny", "status": "FINISHED", "seconds": 3.0, "base": {}, "final": {},
            "iterations": [row, {**row, "iteration": 0, "runs": own, "metrics": metrics}],
        }  # fmt: skip
        tracking.write_json(runs[name], "summary.json", summary)
        tracking.write_json(runs[name], "config.json", config.model_dump(mode="json"))
        tracking.finish(runs[name])
    return Viewed(home, runs)


def make_self_ac(home: Path) -> str:
    """A pipeline run of self_ac: it trained on episode c0 of c0 and c1, its ledger has that one, and V of e1 was read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tracking, replay = Tracking(home / "mlflow"), Replay(home / "data" / "turnwise.duckdb")
    run_id = tracking.start("pipeline", "self_ac", {})
    own = {stage: tracking.start(stage, stage, {"pipeline": run_id}) for stage in ("collect", "self_ac", "evaluate")}
    tables: dict[str, dict[str, list[dict[str, Any]]]] = {
        "collect": played([("c0", "s0", "train", 0.0), ("c1", "s1", "train", 1.0)]),
        "self_ac": {"certificates": [{
            "episode_id": "c0", "turn": 0, "extended": False, "position": 5, "produced": ["a"], "rendered": [PLANTED],
            "gap_mean": 0.0, "gap_max": 0.0,
        }]},
        "evaluate": played([("e1", "s1", "validation", 1.0)]),
    }  # fmt: skip
    entry: dict[str, Any] = {
        "episode": "c0", "first_turn": 0, "turn": 0, "in_action": True, "reward": 0.0, "value": 0.25, "target_1": 0.5,
    }  # fmt: skip
    entries = [
        {**entry, "advantage": -0.5, "ratio": 1.0, "clipped": False, "loss_share": share} for share in (0.1, 0.2)
    ]
    values: list[dict[str, Any]] = [
        {"episode_id": "e1", "turn": turn, "value": value} for turn, value in ((1, 0.75), (0, 0.5))
    ]
    files = {"self_ac": ("ledger.parquet", entries), "evaluate": ("values/values.parquet", values)}
    for stage, stage_run in own.items():
        tracking.write_json(stage_run, "inputs.json", {})
        replay.commit(stage_run, stage, tables[stage])
        if stage in files:
            name, lines = files[stage]
            pq.write_table(pa.Table.from_pylist(lines), home / "file.parquet")
            tracking.save(stage_run, home / "file.parquet", name)
        tracking.finish(stage_run)
    row = {"iteration": 0, "runs": own, "metrics": {}, "seconds": 1.0}
    tracking.write_json(run_id, "summary.json", {"base": {}, "final": {}, "iterations": [row]})
    config = presets.load("desk+self_ac", [f"model.path={home / 'no model'}"])
    tracking.write_json(run_id, "config.json", config.model_dump(mode="json"))
    tracking.finish(run_id)
    return run_id


def rows(stage: str, name: str) -> dict[str, list[dict[str, Any]]]:
    if stage == "refine":
        judgement = said("c0", "Thought: t\nAction: walk", "no", refined=PLANTED, info={"dropped": "", "refused": ""})
        target = {
            "target_id": "c0-0", "role": "policy", "episode_id": "c0", "turn": 0, "terminal": False, "student_ids": [1, 2, 3],
            "completion_ids": [4, 5], "teacher_ids": [], "student_prompt": "", "teacher_prompt": "", "raw": "", "completion": "Action: run",
            "weight": 1.0, "info": {},
        }  # fmt: skip
        return {"judgements": [judgement], "targets": [target]}
    if stage == "collect":
        return played([(f"c{i}", f"s{i}", "train", 0.0) for i in range(3)])
    tables = played([("e1", "s1", "validation", 1.0), ("e2", "s2", "validation", 0.0)])
    own = {"own": True, "return": 0.0}
    judgements = [
        said("e1", "look", "yes", info=own),
        said("e2", "look", "yes", info=own),
        said("e2", "leap", "no", info={**own, "own": False}),
    ]
    return {**tables, "judgements": judgements}


def played(episodes: list[tuple[str, str, str, float]]) -> dict[str, list[dict[str, Any]]]:
    """Episodes of one turn each: id, scenario, split, reward."""
    opening = [{"role": "system", "content": "A house."}, {"role": "user", "content": PLANTED}]
    heads = [
        episode_row(name, scenario_id=scenario, split=split, total_reward=reward, messages=opening)
        for name, scenario, split, reward in episodes
    ]
    changes = {"turn": 0, "observation": PLANTED, "terminated": True}
    turns = [
        turn_row(0, [7, 8], [9, 10, 11], [-0.1] * 3, episode_id=name, reward=reward, **changes)
        for name, _, _, reward in episodes
    ]
    return {"episodes": heads, "turns": turns}


def said(episode_id: str, action: str, verdict: str, *, refined: str = "", info: dict[str, Any]) -> dict[str, Any]:
    critique = f"Optimality: {verdict.capitalize()}."
    return {
        "episode_id": episode_id, "turn": 0, "state_len": 2, "action": action, "futures": ["Future: a door."], "critique": critique,
        "verdict": verdict, "refined": refined, "info": info,
    }  # fmt: skip


CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


def browse(file: Path, address: str = "") -> str:
    """The page as the browser has it after its script ran, as HTML."""
    assert CHROMIUM
    with tempfile.TemporaryDirectory() as folder:
        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--window-size=1400,1400",
            "--virtual-time-budget=3000", "--dump-dom", f"{file.as_uri()}{address}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return done.stdout


def data_of(html: str) -> Any:
    """The data block of a page."""
    start = html.index('id="data">') + len('id="data">')
    return json.loads(html[start : html.index("</script>", start)])
