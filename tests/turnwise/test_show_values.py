"""Values where a run is looked at: beside the turns of an episode, and over the iterations at the end of a run."""

from __future__ import annotations

import json
from pathlib import Path

import models
import pytest

from flows.report import ending, sparkline
from flows.telling import Summary
from stages.frame.types import Outcome
from stages.judge.values import TABLE, Judged, write_values
from stages.llm.scripted import ScriptedEngine
from stages.play.transitions import episode_rows
from stages.store.replay import Replay
from stages.store.tracking import Tracking
from turnwise import cli


@pytest.fixture
def shown(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder with an evaluation of two episodes with values, and a collect run of one without."""
    monkeypatch.chdir(home)
    engine, tracking = ScriptedEngine(), Tracking(home / "mlflow")
    check, close = ("Action: check photo", "photo done."), ("Action: close phone", "Mia audits: pass.")
    first = models.make_episode(engine, "ben", [check, close], Outcome.SCORED, reward=1.0)
    other = models.make_episode(engine, "cid", [close], Outcome.TRUNCATED)
    rows = {
        "evaluate": episode_rows([first, other], 0),
        "collect": episode_rows([models.make_episode(engine, "dan", [close], Outcome.SCORED)], 0),
    }
    replay = Replay(home / "data" / "turnwise.duckdb")
    for stage, tables in rows.items():
        run_id = tracking.start(stage, f"{stage} 0", {})
        tracking.write_json(run_id, "inputs.json", {})
        if stage == "evaluate":
            # The episodes' states are mixed, to be put in order by what is read.
            judged = [Judged(other, (0.11, 0.12), None), Judged(first, (-0.25, 0.625, 0.98), (1.0, 1.0, 1.0))]
            tracking.save(run_id, write_values(judged, home), TABLE)
        replay.commit(run_id, stage, tables)
        tracking.finish(run_id)
    return home


def test_each_turn_has_the_value_of_its_state_beside_it(shown: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "ben"]) == 0
    text = capsys.readouterr().out
    for turn, value in (("turn 0", "V -0.25"), ("turn 1", "V 0.62")):
        (line,) = [one for one in text.splitlines() if turn in one]
        assert value in line
    assert "V ▁▆█  -0.25 -> 0.62 before the last action, 0.98 at the end" in text
    assert "0.11" not in text
    assert cli.main(["show", "ben", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["values"] == [-0.25, 0.625, 0.98]


def test_an_episode_without_values_is_shown_without(shown: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "dan"]) == 0
    assert "V " not in capsys.readouterr().out
    assert cli.main(["show", "dan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["values"] == []


def test_a_run_ends_with_what_its_values_came_to_explain() -> None:
    def lines(*shares: float | None) -> list[str]:
        rows = [
            {"win_rate": 0.5, "metrics": {} if share is None else {"value/explained_variance": share}}
            for share in shares
        ]
        return [
            line
            for line in ending(Summary("f" * 32, "demo", "FINISHED", 1.0, iterations=rows))
            if line.startswith("value")
        ]

    assert lines(None, -3.0, 0.2, 0.6) == ["value       ▁▂▅  -3.00 -> 0.60 of the returns' variance explained"]
    assert lines(None, None) == []


def test_a_curve_that_leaves_the_shares_is_cut_at_its_ends() -> None:
    assert sparkline([-3.0, 0.0, 0.5, 1.0, 9.0]) == "▁▁▅██"
