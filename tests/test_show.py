"""Transcripts: every turn with what the critic said beside it, and a model's text shown as it is."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from flows.show import transcript


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
                "verdict": "no", "refined": "Action: give credit",
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
