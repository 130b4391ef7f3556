"""From episodes to rows and back: what the replay stores, and the transitions (s, a, r, s') read from it.

A stage draws among `candidates`, a few numbers each. It then reads only the drawn ones, `in_full` or as ids (`ids_of`),
because the texts and ids of a long run do not fit into memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from stages.frame.contract import Reader
from stages.frame.types import Episode, Message, Outcome, Row, Scenario

KEY = ("episode_id", "turn")
EPISODE = ("episode_id", "task", "split", "scenario_id", "scenario", "total_reward", "messages")
TURN = (
    *KEY, "state_len", "action", "thought", "observation", "reward", "terminated", "malformed", "prompt_ids", "action_ids",
)  # fmt: skip
"""Columns of `episodes` and `turns` that a transition is made of."""


class Drawable:
    """What a draw needs to know of a transition."""

    __slots__ = ()
    episode_id: str
    turn: int
    terminal: bool
    malformed: bool

    @property
    def key(self) -> tuple[str, int]:
        return self.episode_id, self.turn

    @property
    def has_target(self) -> bool:
        """A critic can learn from it: every one but a reply that was unreadable and then mended."""
        return self.terminal or not self.malformed


@dataclass(frozen=True, slots=True)
class Candidate(Drawable):
    """A transition that can be drawn, without what it says; of the run `run_id`."""

    run_id: str
    episode_id: str
    turn: int
    terminal: bool
    malformed: bool
    total_reward: float


@dataclass(frozen=True)
class Transition(Drawable):
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
    prompt_ids: Sequence[int]
    action_ids: Sequence[int]
    total_reward: float
    past_actions: tuple[str, ...]


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


def trainable_episodes(replay: Reader, run_ids: Sequence[str], columns: Sequence[str]) -> list[Row]:
    """The rows of `episodes` of these runs that the policy answers for, with these columns."""
    rows = replay.read("episodes", run_ids, [*dict.fromkeys([*columns, "outcome"])])
    return [row for row in rows if Outcome(row["outcome"]).trainable]


def candidates(replay: Reader, run_ids: Sequence[str], *, newest: int | None = None) -> list[Candidate]:
    """The transitions of all trainable episodes of these runs, oldest first; only the `newest`, where given."""
    pieces: list[list[Candidate]] = []
    found = 0
    for run_id in reversed(dict.fromkeys(run_ids)):  # from the newest on, as far as needed
        if newest is not None and found >= newest:
            break
        pieces.append(_candidates(replay, run_id))
        found += len(pieces[-1])
    return [one for piece in reversed(pieces) for one in piece][-newest if newest else 0 :]


def _candidates(replay: Reader, run_id: str) -> list[Candidate]:
    heads = trainable_episodes(replay, [run_id], ["episode_id", "total_reward"])
    totals = {row["episode_id"]: (row["episode_id"], row["total_reward"]) for row in heads}
    rows = replay.read("turns", [run_id], ["episode_id", "turn", "terminated", "malformed"])
    # The id of the head: one text for all turns of an episode.
    return [
        Candidate(run_id, totals[row["episode_id"]][0], row["turn"], row["terminated"], row["malformed"], totals[row["episode_id"]][1])
        for row in rows
        if row["episode_id"] in totals
    ]  # fmt: skip


def in_full(replay: Reader, chosen: Sequence[Candidate]) -> list[Transition]:
    """The candidates with texts and ids, in their order; the same object where one stands there several times."""
    found = {(run_id, t.key): t for run_id, keys in _by_run(chosen).items() for t in _transitions(replay, run_id, keys)}
    return [found[one.run_id, one.key] for one in chosen]


def transitions_of(episode: Episode) -> list[Transition]:
    """Those of an episode that is not stored, in their order."""
    rows = episode_rows([episode], 0)
    past = _past_actions(rows["turns"])
    return [_transition(row, rows["episodes"][0], past[row["episode_id"], row["turn"]]) for row in rows["turns"]]


def transitions(replay: Reader, run_ids: Sequence[str], *, newest: int | None = None) -> list[Transition]:
    """All that can be drawn, in full: of so few runs that they fit into memory."""
    return in_full(replay, candidates(replay, run_ids, newest=newest))


def ids_of(replay: Reader, chosen: Sequence[Candidate]) -> list[tuple[Sequence[int], Sequence[int]]]:
    """The ids of the prompt and of the action of each candidate, in their order."""
    found = {
        (run_id, row["episode_id"], row["turn"]): (row["prompt_ids"], row["action_ids"])
        for run_id, keys in _by_run(chosen).items()
        for row in replay.read("turns", [run_id], [*KEY, "prompt_ids", "action_ids"], by=KEY, among=keys)
    }
    return [found[one.run_id, *one.key] for one in chosen]


def _by_run(chosen: Sequence[Candidate]) -> dict[str, set[tuple[str, int]]]:
    found: dict[str, set[tuple[str, int]]] = {}
    for one in chosen:
        found.setdefault(one.run_id, set()).add(one.key)
    return found


def _transitions(replay: Reader, run_id: str, keys: Collection[tuple[str, int]]) -> list[Transition]:
    ids = [(episode_id,) for episode_id in dict.fromkeys(episode_id for episode_id, _ in keys)]
    by = ["episode_id"]
    episodes = {row["episode_id"]: row for row in replay.read("episodes", [run_id], EPISODE, by=by, among=ids)}
    found, past = [], _past_actions(replay.read("turns", [run_id], [*KEY, "action", "malformed"], by=by, among=ids))
    for row in replay.read("turns", [run_id], TURN, by=KEY, among=keys):
        found.append(_transition(row, episodes[row["episode_id"]], past[row["episode_id"], row["turn"]]))
    return found


def _past_actions(rows: Sequence[Row]) -> dict[tuple[str, int], tuple[str, ...]]:
    """The readable actions before each turn."""
    found, actions = {}, dict[str, tuple[str, ...]]()
    for row in rows:
        before = actions.get(row["episode_id"], ())
        found[row["episode_id"], row["turn"]] = before
        actions[row["episode_id"]] = before if row["malformed"] else (*before, row["action"])
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
        prompt_ids=row["prompt_ids"], action_ids=row["action_ids"], total_reward=episode["total_reward"], past_actions=past,
    )  # fmt: skip


def observations(replay: Reader, chosen: Sequence[Candidate]) -> dict[tuple[str, int], str]:
    """What came of each candidate's turn, by its key."""
    return {
        (row["episode_id"], row["turn"]): row["observation"]
        for run_id, keys in _by_run(chosen).items()
        for row in replay.read("turns", [run_id], [*KEY, "observation"], by=KEY, among=keys)
    }


def known_losses(replay: Reader, critics: Sequence[str]) -> dict[tuple[str, int], float]:
    """The newest loss of every transition that the critic has trained on, by key. critics: its runs, oldest first."""
    rows = replay.read("priorities", critics, [*KEY, "loss"]) if critics else []
    return {(row["episode_id"], row["turn"]): row["loss"] for row in rows}
