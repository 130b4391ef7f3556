"""Transcripts: every turn with what the critic said beside it, and a model's text shown as it is. And an episode of the
ledger of credit.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
from rich.console import Console

from flows.look.view.credit import turn_lines
from stages import self_ac
from stages.frame.contract import Outputs
from stages.frame.types import Episode, Outcome
from stages.play.transitions import episode_rows
from stages.store.replay import Replay
from stages.store.tracking import Tracking
from stages.train.actor_critic import SelfAcConfig
from turnwise import cli
from turnwise.commands.show import transcript


def episode(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "episode": {
            "episode_id": "e1", "scenario_id": "s1", "split": "train", "iteration": 2, "outcome": "scored", "total_reward": 1.0, "n_turns": 1, "error": "",
            "messages": [{"role": "system", "content": "The desk."}, {"role": "user", "content": "Ann wants a refund."}],
        },
        "turns": [
            {
                "turn": 0, "state_len": 2, "text": "raw", "thought": "think", "action": "give [red]boom[/red]", "observation": "done [/bold]",
                "reward": 1.0, "terminated": True, "truncated": False, "malformed": False,
            }
        ],
        "judgements": [
            {
                "turn": 0, "action": "Action: give cash", "futures": ["Future: then pass.", "Future: then fail."], "critique": "Optimality: No. Give credit.",
                "verdict": "no", "refined": "Action: give credit", "info": {"dropped": ""},
            }
        ],
        "targets": [{"turn": 0, "role": "successor", "completion": "Future: it may pass."}],
    }  # fmt: skip
    return found | changes


def shown(found: dict[str, Any]) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(transcript(found))
    return console.export_text()


def test_futures_critique_and_refinement_stand_beside_their_turn() -> None:
    lines = shown(episode()).splitlines()
    (line,) = [one for one in lines if "thought: think" in one]
    assert "Future: then pass." in line
    text = "\n".join(lines)
    for said in (
        "Ann wants a refund.",
        "Future: then fail.",
        "Optimality: No. Give credit.",
        "refined to: Action: give credit",
        "reward: 1 terminated",
    ):
        assert said in text
    assert "target of the successor: Future: it may pass." in text


def test_a_turn_whose_outcome_the_critic_got_wrong_says_so() -> None:
    found = episode()
    assert "critic and outcome disagree" not in shown(found)  # another action was judged
    found["turns"][0]["action"] = "give cash"
    assert "critic and outcome disagree: it said No, and the episode was won" in " ".join(shown(found).split())


def test_what_a_model_wrote_is_not_read_as_markup() -> None:
    text = shown(episode())
    assert "give [red]boom[/red]" in text
    assert "done [/bold]" in text


def test_an_unreadable_reply_is_shown_as_it_came() -> None:
    found = episode(judgements=[], targets=[])
    found["turns"][0] |= {"malformed": True, "text": "%% ?? %%"}
    assert "unreadable reply: %% ?? %%" in shown(found)


def test_an_episode_without_turns_can_be_shown() -> None:
    found = episode(turns=[], judgements=[], targets=[])
    found["episode"] |= {"outcome": "env_failed", "error": "ValueError: no such order"}
    assert "error: ValueError: no such order" in shown(found)


@dataclass(frozen=True)
class Trained:
    """A project folder with a run of self_ac over two episodes, of two turns and of one, and its pipeline run."""

    home: Path
    pipeline: str
    collect: str
    run: str
    episodes: tuple[Episode, ...]


@pytest.fixture
def trained(home: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    monkeypatch.chdir(home)
    bench = models.Bench(base, home / "bench")
    check, give = ("Thought: t\nAction: check [photo]", "photo done."), ("Action: give cash", "cash done.")
    kinds = (("Ana0", [check, give], Outcome.SCORED, 1.0), ("Ana1", [give], Outcome.TRUNCATED, 0.0))
    episodes = tuple(
        models.make_episode(bench.engine, name, turns, outcome, reward=reward) for name, turns, outcome, reward in kinds
    )
    rows = episode_rows(episodes, 0)
    bench.memory.keep("collect0", Outputs({}, rows))
    outputs = bench.run(self_ac.STAGE, SelfAcConfig(epochs=1, max_gap=1e9), {"collect": ["collect0"]})
    tracking = Tracking(home / "mlflow")
    pipeline, collect, run = (tracking.start(name, f"{name} 0", {}) for name in ("pipeline", "collect", "self_ac"))
    tracking.write_json(
        pipeline, "summary.json", {"iterations": [{"iteration": 0, "runs": {"collect": collect, "self_ac": run}}]}
    )
    tracking.write_json(run, "inputs.json", {"collect": [collect]})
    tracking.save(run, outputs.files["ledger.parquet"], "ledger.parquet")
    Replay(home / "data" / "turnwise.duckdb").commit(collect, "collect", rows)
    for one in (pipeline, collect, run):
        tracking.finish(one)
    return Trained(home, pipeline, collect, run, episodes)


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Exit status, and stdout or the error."""
    status = cli.main(["show", *argv])
    found = capsys.readouterr()
    return status, found.err if status else found.out


def test_a_ledger_has_a_line_a_turn_with_its_text_and_numbers(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = printed(capsys, trained.pipeline[:12], "--ledger", "Ana0")
    found = json.loads(printed(capsys, trained.run, "--ledger", "Ana0", "--json")[1])
    assert (status, found["run_id"]) == (0, trained.run)
    lines = turn_lines(found["entries"], {int(k): text for k, text in found["texts"].items()})
    assert [(line["turn"], line["text"], line["tokens"], line["reward"]) for line in lines] == [
        (0, "Thought: t Action: check [photo]", 33, 0.0), (1, "Action: give cash", 18, 0.0), (2, "(end)", 0, 1.0),
    ]  # fmt: skip
    for line in lines:
        (shown,) = [row for row in text.splitlines() if line["text"] in row]
        numbers = [
            f"{line[name] + 0.0:.4g}"
            for name in ("reward", "value", "target", "advantage", "share")
            if line[name] is not None
        ]
        assert all(number in shown for number in numbers[: 3 if line["turn"] == 2 else 5])
    assert "rewards sum to 1." in text and f"of the step, {found['loss']:.4g}; this episode's" in text


def test_the_full_rows_are_those_of_the_episode_alone(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, trained.run, "--ledger", "Ana1", "--json")[1])
    entries = found["entries"]
    (turn,) = trained.episodes[1].turns
    assert {entry["episode"] for entry in entries} == {"Ana1"}
    assert [entry["position"] for entry in entries] == list(range(len(entries)))
    assert [entry["token_id"] for entry in entries if entry["in_action"]] == list(turn.completion.token_ids)
    assert all(entry["advantage"] is None and entry["loss_share"] == 0 for entry in entries if not entry["in_action"])
    # cut short: its end has no target
    assert (entries[-1]["token_id"], entries[-1]["turn"], entries[-1]["target_1"]) == (-1, 1, None)


def test_a_ledger_that_cannot_be_shown_is_one_sentence(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        (
            "Bob",
            trained.run,
        ): "no episode in the ledger of run .* starts with 'Bob'; it has 2 episodes, those of its first step: Ana., Ana.\n",
        ("An", trained.run): "'An' is the start of 2 episodes",
        ("Ana0", trained.collect): "wanted a run of self_ac, or a pipeline run with one, found a run of collect",
    }
    for (prefix, run), said in wrong.items():
        status, told = printed(capsys, run, "--ledger", prefix)
        assert (status, told.count("\n")) == (2, 1)
        assert re.search(said, told)
    (trained.home / "mlflow" / "artifacts" / "self_ac" / trained.run / "artifacts" / "ledger.parquet").unlink()
    status, told = printed(capsys, trained.run, "--ledger", "Ana0")
    assert status == 1 and f"Run: turnwise rerun self_ac --of {trained.run}" in told
