"""The command line over the real stages, on the scripted engine and a tiny model: run, show, rerun, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from models import save_base

from turnwise import cli

SMALL = {
    "iterations": 1, "model.engine": "scripted", "model.path": "data/base", "model.lora_rank": 2, "roles.max_action_tokens": 400,
    "roles.max_future_tokens": 400, "task.options.requests": 2, "task.options.tiers": 2, "collect.episodes": 4, "collect.first_episodes": 4,
    "targets.transitions": 8, "refine.states": 8, "critic.batch": 4, "critic.policy_rows": 2, "distill.batch": 4, "distill.successor_rows": 2,
    "evaluate.episodes": 4, "evaluate.audit_turns": 4,
}  # fmt: skip


PICKING = {
    "nlql": ["collect", "targets", "critic", "pick", "distill", "evaluate"],
    "nlrl": ["collect", "pick", "distill", "evaluate"],
    "sac": ["collect", "q_critic", "pick", "distill", "evaluate"],
}


@pytest.mark.slow
@pytest.mark.parametrize("method", PICKING)
def test_a_method_that_picks_runs_from_end_to_end_and_is_reused(
    method: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_base(home / "data" / "base")
    monkeypatch.chdir(home)
    sets = {**SMALL, "iterations": 2, "method": method, "pick.states": 4}
    sets |= {
        "nlql": {},
        "nlrl": {"pick.futures_of": "rollouts", "pick.futures": 2, "evaluate.audit_turns": 0},
        "sac": {"pick.by": "value", "q_critic.transitions": 8, "q_critic.batch": 4},
    }[method]
    argv = [
        *("run", "tiny", "--plain", "--json"),
        *(part for key, value in sets.items() for part in ("--set", f"{key}={value}")),
    ]
    assert cli.main(argv) == 0
    run: dict[str, Any] = json.loads(capsys.readouterr().out)
    _, *rows = run["iterations"]
    assert [list(row["runs"]) for row in rows] == [PICKING[method]] * 2
    for row in rows:
        assert row["metrics"]["pick/rows"] == row["metrics"]["distill/rows"] == 4
        assert row["metrics"]["distill/steps"] == 1
        assert ("audit/out_of_context" in row["metrics"]) == (method != "nlrl")
    played = sum(row["metrics"].get(f"{stage}/episodes", 0) for row in rows for stage in ("collect", "pick"))
    assert rows[-1]["metrics"]["pipeline/episodes"] == played
    assert cli.main(argv) == 0
    again = json.loads(capsys.readouterr().out)
    assert [row["runs"] for row in again["iterations"]] == [row["runs"] for row in run["iterations"]]


@pytest.mark.slow
def test_a_whole_run_can_be_shown_rerun_and_exported(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_base(home / "data" / "base")
    monkeypatch.chdir(home)

    def turnwise(*argv: str) -> str:
        assert cli.main(argv) == 0
        return capsys.readouterr().out

    sets = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]
    run: dict[str, Any] = json.loads(turnwise("run", "tiny", "--plain", "--quiet", "--json", *sets))
    runs = run["iterations"][1]["runs"]
    assert run["status"] == "FINISHED"
    assert set(runs) == {"collect", "targets", "critic", "refine", "distill", "evaluate"}

    episodes = json.loads(turnwise("show", runs["collect"], "--json"))["episodes"]
    assert len(episodes) == 4
    shown = [json.loads(turnwise("show", one["episode_id"], "--json")) for one in episodes]
    assert any(one["judgements"] for one in shown) and any(one["targets"] for one in shown)
    assert "what the critic said" in turnwise("show", episodes[0]["episode_id"])

    again = json.loads(
        turnwise("rerun", "critic", "--of", run["run_id"], "--plain", "--quiet", "--json", "--set", "critic.lr=1e-3")
    )
    assert again["rerun_of"] == runs["critic"]
    assert again["run_id"] != runs["critic"] and set(again["metrics"]) == set(again["old_metrics"])

    assert "episodes.parquet" in turnwise("export", run["run_id"], "rows")
    assert "model.safetensors" in turnwise("export", run["run_id"], "merged", "--what", "merged")
    assert json.loads(turnwise("verify", "--json")) == {
        "orphans": [],
        "changed": {},
        "impossible": {},
        "lost": {},
        "mended": False,
    }
