"""Transitions read back from rows: s, a, r, s', and what is terminal and what was only cut short."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest

from stages.frame.contract import Outputs
from stages.frame.types import Episode, Outcome, Row
from stages.llm.scripted import ScriptedEngine
from stages.play.transitions import Transition, episode_rows, transitions
from stages.store.replay import Replay

ENGINE = ScriptedEngine()
CHECK = ("Thought: x Action: check photo", "photo done.")
GIVE = ("Action: give cash", "cash done.")
CLOSE = ("Action: close phone", "phone done. fail.")
EPISODES = [
    models.make_episode(ENGINE, "won", [CHECK, GIVE, CLOSE], Outcome.SCORED, reward=1.0),
    models.make_episode(ENGINE, "cut", [CHECK, GIVE], Outcome.TRUNCATED),
    models.make_episode(
        ENGINE,
        "failed",
        [("mumble", "say again"), CHECK, ("mumble", "say again")],
        Outcome.POLICY_FAILED,
        malformed=[0, 2],
    ),
    models.make_episode(ENGINE, "broken", [CHECK], Outcome.ENV_FAILED),
    models.make_episode(ENGINE, "silent", [CHECK], Outcome.SIMULATOR_FAILED),
]


def read(episodes: list[Episode], newest: int | None = None) -> list[Transition]:
    memory = models.Memory()
    for i, episode in enumerate(episodes):
        memory.keep(f"run{i}", Outputs({}, episode_rows([episode], i)))
    return transitions(memory, [f"run{i}" for i in range(len(episodes))], newest=newest)


def test_states_actions_and_next_states_by_hand() -> None:
    first, second, last = read(EPISODES)[:3]
    said = [m["content"] for m in EPISODES[0].messages]
    assert said[1] == "won, gold, wants refund for lamp."
    assert [m["content"] for m in first.state] == said[:2]
    assert [m["content"] for m in first.next_state] == said[:4] == [*said[:2], CHECK[0], "photo done."]
    assert (first.action, first.thought, first.observation, first.reward, first.terminal) == (
        "check photo",
        "x",
        "photo done.",
        0.0,
        False,
    )
    assert second.state == first.next_state
    assert [m["content"] for m in last.next_state] == said
    assert (last.action, last.reward, last.terminal, last.total_reward) == ("close phone", 1.0, True, 1.0)
    assert [t.past_actions for t in (first, second, last)] == [(), ("check photo",), ("check photo", "give cash")]


def test_a_truncated_episode_has_no_terminal_transition() -> None:
    found = [t for t in read(EPISODES) if t.episode_id == "cut"]
    assert [t.terminal for t in found] == [False, False]
    assert found[-1].next_state == EPISODES[1].messages


def test_unreadable_replies_are_marked_and_are_no_past_actions() -> None:
    found = [t for t in read(EPISODES) if t.episode_id == "failed"]
    assert [(t.malformed, t.terminal, t.past_actions) for t in found] == [
        (True, False, ()),
        (False, False, ()),
        (True, True, ("check photo",)),
    ]


def test_what_the_policy_did_not_cause_is_no_transition() -> None:
    assert {t.episode_id for t in read(EPISODES)} == {"won", "cut", "failed"}


def test_the_newest_are_the_last_ones_written() -> None:
    assert [t.key for t in read(EPISODES, newest=4)] == [t.key for t in read(EPISODES)][-4:]
    assert len(read(EPISODES, newest=1000)) == 8


def test_older_runs_than_the_newest_transitions_need_are_not_read() -> None:
    """All prompts of a long run's iterations would not fit into memory."""
    seen: list[str] = []

    class Reader(models.Memory):
        def read(self, table: str, run_ids: Sequence[str], columns: Sequence[str], **which: Any) -> list[Row]:
            seen.extend(run_ids)
            return super().read(table, run_ids, columns, **which)

    memory = Reader()
    for i, episode in enumerate(EPISODES[:3]):
        memory.keep(f"run{i}", Outputs({}, episode_rows([episode], i)))
    found = transitions(memory, ["run0", "run1", "run2"], newest=4)
    assert [t.key for t in found] == [("cut", 1), ("failed", 0), ("failed", 1), ("failed", 2)]
    assert set(seen) == {"run1", "run2"}


def test_an_observation_of_several_messages_belongs_to_one_transition() -> None:
    episode = EPISODES[0]
    extra = {"role": "tool", "content": "and more"}
    messages = (*episode.messages[:4], extra, *episode.messages[4:])
    turns = tuple(replace(t, state_len=t.state_len + (t.index > 0)) for t in episode.turns)
    first, second, _ = read([replace(episode, messages=messages, turns=turns)])
    assert first.next_state == messages[:5] == second.state


def test_episodes_survive_the_replay_with_their_ids_and_log_probs(tmp_path: Path) -> None:
    """Through DuckDB and back: the same transitions as from memory, token for token."""
    replay = Replay(tmp_path / "replay.duckdb")
    for i, episode in enumerate(EPISODES):
        replay.commit(f"run{i}", "collect", episode_rows([episode], i))
    runs = [f"run{i}" for i in range(len(EPISODES))]
    assert transitions(replay, runs) == read(EPISODES)
    produced = {(e.id, t.index): t.completion for e in EPISODES for t in e.turns}
    for row in replay.rows("turns", runs):
        completion = produced[row["episode_id"], row["turn"]]
        assert tuple(row["action_ids"]) == completion.token_ids
        assert tuple(row["log_probs"]) == completion.log_probs
        assert row["text"] == completion.text
    heads = {row["episode_id"]: row for row in replay.rows("episodes", runs)}
    assert heads["won"]["n_tokens"] == sum(len(t.completion.token_ids) for t in EPISODES[0].turns)
    assert (heads["failed"]["n_malformed"], heads["failed"]["outcome"], heads["won"]["total_reward"]) == (
        2,
        "policy_failed",
        1.0,
    )
    assert heads["cut"]["messages"] == json.loads(json.dumps(EPISODES[1].messages))


@pytest.mark.parametrize("episode", EPISODES, ids=lambda e: e.id)
def test_rows_of_an_episode_are_json(episode: Episode) -> None:
    json.dumps(episode_rows([episode], 0))
