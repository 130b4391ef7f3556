"""Certificates where an episode is looked at: a line at its end, and what differs at the turn that broke."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
import pytest

from stages.frame.types import Outcome, Row
from stages.learn.certificate import certificates, with_gaps
from stages.llm.scripted import ScriptedEngine
from stages.play.transitions import episode_rows
from stages.store.replay import Replay
from stages.store.tracking import Tracking
from turnwise import cli

TURNS = [
    ("Action: check photo", "photo done."),
    ("Action: give cash", "cash done."),
    ("Action: close phone", "Mia audits: pass."),
]


class Shown:
    """A project folder with a collect run of two episodes, and the runs that trained on them."""

    def __init__(self, home: Path) -> None:
        self.tracking = Tracking(home / "mlflow")
        self.replay = Replay(home / "data" / "turnwise.duckdb")
        self.engine = ScriptedEngine()
        self.episodes = {
            name: models.make_episode(self.engine, name, TURNS, Outcome.SCORED, reward=1.0) for name in ("ben", "cid")
        }
        rows = episode_rows(list(self.episodes.values()), 0)
        self.turns: list[Row] = rows["turns"]
        self.collect = self.keep("collect", {}, rows)

    def keep(self, stage: str, inputs: dict[str, Any], rows: dict[str, Any]) -> str:
        run_id = self.tracking.start(stage, f"{stage} 0", {})
        self.tracking.write_json(run_id, "inputs.json", inputs)
        self.replay.commit(run_id, stage, rows)
        self.tracking.finish(run_id)
        return run_id

    def certify(self, stage: str, names: Sequence[str], gap: float | None, last: bool = True) -> str:
        found = []
        for name in names:
            mine = [row for row in self.turns if row["episode_id"] == name]
            rows = certificates(
                mine, self.engine.encode(self.episodes[name].messages) if last else None, self.engine.decode
            )
            found += with_gaps(
                rows, {(name, k): {"gap_mean": gap / 2, "gap_max": gap * (k + 1)} for k in range(3)} if gap else {}
            )
        return self.keep(stage, {"collect": [self.collect]}, {"certificates": found})


@pytest.fixture
def shown(home: Path, monkeypatch: pytest.MonkeyPatch) -> Shown:
    monkeypatch.chdir(home)
    return Shown(home)


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(["show", *argv]) == 0
    return capsys.readouterr().out


def test_where_all_is_well_it_is_said_once(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    run = shown.certify("self_ac", ["ben", "cid"], 2e-6)
    text = printed(capsys, "ben")
    (line,) = [line for line in text.splitlines() if "certificate" in line]
    assert line.strip() == f"certificate of run {run[:8]}: 3 of 3 turns extend, gap up to 6e-06 nats"
    assert "tokens differ" not in text


def test_the_turn_that_broke_shows_what_differs(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    """And no other turn does, in this episode or the other one."""
    turn = next(row for row in shown.turns if (row["episode_id"], row["turn"]) == ("cid", 1))
    turn["action_ids"] = [*b"Action: give  cash", 256]
    run = shown.certify("self_ac", ["ben", "cid"], None)
    text = printed(capsys, "cid")
    at = len(turn["prompt_ids"]) + len("Action: give ")
    inside = " ".join(line.split("│")[1].strip() for line in text.splitlines() if line.count("│") == 3)
    assert inside.count("tokens differ") == 1
    assert f"tokens differ: at token {at}, produced 'i|v|e| | |c|a|s', rendered 'i|v|e| |c|a|s|h'" in inside
    assert inside.index("turn 1") < inside.index("tokens differ") < inside.index("turn 2")
    assert f"certificate of run {run[:8]}: 2 of 3 turns extend, gap not measured (not in the first step)" in text
    assert "3 of 3 turns extend" in printed(capsys, "ben")


def test_every_run_that_trained_on_the_episode_has_its_line(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [shown.certify("self_ac", ["ben"], 2e-6), shown.certify("grpo", ["ben"], 0.5, last=False)]
    text = printed(capsys, "ben")
    assert f"{runs[0][:8]}: 3 of 3 turns extend, gap up to 6e-06 nats" in text
    assert f"{runs[1][:8]}: 2 of 2 turns extend, gap up to 1.5 nats" in text
    assert "certificate" not in printed(capsys, "cid")


def test_json_has_all_of_it(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    run = shown.certify("grpo", ["ben", "cid"], 0.25, last=False)
    found = json.loads(printed(capsys, "ben", "--json"))["certificates"]
    assert [row["turn"] for row in found] == [0, 1, 2]
    assert found[2] == {
        "run_id": run, "episode_id": "ben", "turn": 2, "extended": None, "position": None, "produced": None, "rendered": None,
        "gap_mean": 0.125, "gap_max": 0.75,
    }  # fmt: skip
    assert json.loads(printed(capsys, run, "--json"))["rows"] == {"certificates": 6}
    assert "rows of certificates: 6" in printed(capsys, run)


def test_what_the_tokens_say_is_not_read_as_markup(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    turn = next(row for row in shown.turns if (row["episode_id"], row["turn"]) == ("ben", 0))
    turn["action_ids"] = [*b"Acti[b]", 256]
    shown.certify("self_ac", ["ben"], None)
    assert "[|b|]" in printed(capsys, "ben")
