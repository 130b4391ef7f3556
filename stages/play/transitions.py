"""Between episodes and rows: what the replay stores of an episode, and the transitions (s, a, r, s') read back from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stages.frame.contract import Reader
from stages.frame.types import Episode, Message, Outcome, Row, Scenario


@dataclass(frozen=True)
class Transition:
    """One turn of a stored episode.

    terminal: s' has no future, the truth about success is in `observation` and `reward`. A truncated episode's last
    transition is not terminal: s' was cut, so its value is bootstrapped like any other.
    """

    episode_id: str
    turn: int
    scenario: Scenario
    state: tuple[Message, ...]
    next_state: tuple[Message, ...]
    action: str
    thought: str
    observation: str
    reward: float
    terminal: bool
    malformed: bool
    prompt_ids: tuple[int, ...]
    action_ids: tuple[int, ...]
    total_reward: float
    past_actions: tuple[str, ...]

    @property
    def key(self) -> tuple[str, int]:
        return self.episode_id, self.turn

    @property
    def has_target(self) -> bool:
        """A critic can learn from it: every one but a reply that was unreadable and then mended."""
        return self.terminal or not self.malformed


def episode_rows(episodes: Sequence[Episode], iteration: int) -> dict[str, list[Row]]:
    """Rows of tables `episodes` and `turns`; token ids and log-probs as the engine produced them."""
    heads, turns = [], []
    for e in episodes:
        heads.append({
            "episode_id": e.id, "iteration": iteration, "task": e.scenario.task, "split": e.scenario.split, "scenario_id": e.scenario.id,
            "scenario": dict(e.scenario.data), "adapter": e.adapter, "outcome": str(e.outcome), "total_reward": e.total_reward,
            "n_turns": len(e.turns), "n_malformed": sum(t.malformed for t in e.turns), "attempts": e.attempts, "seconds": e.seconds,
            "n_tokens": sum(len(t.completion.token_ids) for t in e.turns), "error": e.error, "messages": list(e.messages),
        })  # fmt: skip
        for t in e.turns:
            turns.append({
                "episode_id": e.id, "turn": t.index, "state_len": t.state_len, "prompt_ids": list(t.prompt_ids),
                "action_ids": list(t.completion.token_ids), "log_probs": list(t.completion.log_probs), "text": t.completion.text,
                "thought": t.thought, "action": t.action, "observation": t.observation, "reward": t.reward, "terminated": t.terminated,
                "truncated": t.truncated, "malformed": t.malformed, "seconds": t.seconds,
            })  # fmt: skip
    return {"episodes": heads, "turns": turns}


def trainable_episodes(replay: Reader, run_ids: Sequence[str]) -> list[Row]:
    """The rows of `episodes` of these runs that the policy answers for."""
    return [row for row in replay.rows("episodes", run_ids) if Outcome(row["outcome"]).trainable]


def transitions(replay: Reader, run_ids: Sequence[str], *, newest: int | None = None) -> list[Transition]:
    """Transitions of all trainable episodes of these runs, oldest first; the `newest` ones where a number is given."""
    if newest is None:
        return _transitions(replay, run_ids)
    # Run by run from the newest on, as far as needed: the rows of all of a long run's iterations do not fit into
    # memory.
    found: list[Transition] = []
    for run_id in reversed(run_ids):
        if len(found) >= newest:
            break
        found = _transitions(replay, [run_id]) + found
    return found[-newest:]


def _transitions(replay: Reader, run_ids: Sequence[str]) -> list[Transition]:
    episodes = {row["episode_id"]: row for row in trainable_episodes(replay, run_ids)}
    found: list[Transition] = []
    past: dict[str, list[str]] = {}
    for row in replay.rows("turns", run_ids):
        if (episode := episodes.get(row["episode_id"])) is not None:
            actions = past.setdefault(row["episode_id"], [])
            found.append(_transition(row, episode, tuple(actions)))
            if not row["malformed"]:
                actions.append(row["action"])
    return found


def _transition(row: Row, episode: Row, past: tuple[str, ...]) -> Transition:
    messages: list[Any] = episode["messages"]
    following = next(
        (i for i in range(row["state_len"] + 1, len(messages)) if messages[i]["role"] == "assistant"), len(messages)
    )
    return Transition(
        episode_id=row["episode_id"], turn=row["turn"],
        scenario=Scenario(episode["task"], episode["split"], episode["scenario_id"], episode["scenario"]),
        state=tuple(messages[: row["state_len"]]), next_state=tuple(messages[:following]), action=row["action"], thought=row["thought"],
        observation=row["observation"], reward=row["reward"], terminal=row["terminated"], malformed=row["malformed"],
        prompt_ids=tuple(row["prompt_ids"]), action_ids=tuple(row["action_ids"]), total_reward=episode["total_reward"], past_actions=past,
    )  # fmt: skip


def known_losses(replay: Reader, critics: Sequence[str]) -> dict[tuple[str, int], float]:
    """The newest loss of every transition that the critic has trained on, by key. critics: its runs, oldest first."""
    rows = replay.rows("priorities", critics) if critics else []
    return {(row["episode_id"], row["turn"]): row["loss"] for row in rows}
