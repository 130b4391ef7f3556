"""The episodes that `turnwise show RUN` lists: those with the wanted outcome, or those where the critic was wrong.

turnwise show RUN --outcome lost --disagree
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import Any

from flows.look.view.episodes import WRITERS
from flows.look.view.sources import PLAYERS
from flows.look.view.verdicts import WRONG, disagreement, result
from stages.frame.types import Row, UsageError
from stages.store.execute import readers
from stages.store.workspace import Workspace


def check_filters(workspace: Workspace, args: Namespace, run_id: str | None) -> None:
    """Raises UsageError where the run or episode has no list of episodes."""
    if args.episodes < 1:
        raise UsageError(f"--episodes {args.episodes}: wanted 1 or more.")
    option = "--outcome" if args.outcome else "--disagree" if args.disagree else ""
    if option and (run_id is None or workspace.tracking.experiment(run_id) not in PLAYERS):
        kind = "an episode" if run_id is None else f"a run of {workspace.tracking.experiment(run_id)}"
        raise UsageError(
            f"{option}: wanted a run of {' or '.join(PLAYERS)}, which has episodes, found {kind}. turnwise show RUN names them."
        )


def kept_episodes(
    workspace: Workspace, described: Mapping[str, Any], outcome: str | None, disagree: bool
) -> list[dict[str, Any]]:
    """The episodes of a stage run with this outcome: "won", "lost" or "failed". With `disagree`, those with turns where
    critic and outcome disagree; these turns are named.
    """
    rows = [row for row in described["episodes"] if outcome in (None, result(row))]
    if not disagree or not rows:
        return rows
    run_id, ids = described["run_id"], {(row["episode_id"],) for row in rows}
    turns = workspace.replay.read("turns", [run_id], ("episode_id", "turn", "action"), by=["episode_id"], among=ids)
    actions = {(turn["episode_id"], turn["turn"]): turn["action"] for turn in turns}
    became = {row["episode_id"]: result(row) for row in rows}
    critics = runs_about(workspace, run_id, WRITERS["judgements"])
    columns = ("episode_id", "turn", "action", "verdict", "info")
    found: dict[str, dict[str, str]] = {}
    for said in workspace.replay.read("judgements", critics, columns, by=["episode_id"], among=ids):
        name, turn = said["episode_id"], said["turn"]
        if kind := disagreement(said, actions[name, turn], became[name]):
            found.setdefault(name, {})[str(turn)] = kind
    return [{**row, "disagree": found[row["episode_id"]]} for row in rows if row["episode_id"] in found]


def lines(described: Mapping[str, Any], most: int) -> list[str]:
    """For a stage run with episodes: how many there are, and a line for each of at most `most` of them."""
    played, rows = described["rows"].get("episodes", 0), described["episodes"]
    found = [_how_many(len(rows), played, most), *map(_line, _ends(rows, most))] if played else []
    return [*found, f"To read one: turnwise show {rows[0]['episode_id']}"] if rows else found


def _how_many(fitting: int, played: int, most: int) -> str:
    """How many episodes there are, how many of these fit, and which of them are listed."""
    those = f"episodes: {played}" if fitting == played else f"episodes: {fitting} of {played} fit"
    if fitting <= most:
        return f"{those}{', by reward' if fitting else ''}"
    return f"{those}; listed are the {most} with the lowest and the highest rewards. All of them: --episodes {fitting}"


def _ends(rows: list[Row], most: int) -> Iterable[Row]:
    """The first and last few of rows that are sorted by reward: lost and won ones."""
    low = (most + 1) // 2
    return rows if len(rows) <= most else [*rows[:low], *rows[len(rows) - most + low :]]


def _line(row: Row) -> str:
    wrong = "".join(f"  turn {turn}: {WRONG[kind]}" for turn, kind in sorted(row.get("disagree", {}).items()))
    return f"  {row['episode_id']}  {row['scenario_id']:<24} {row['outcome']:<14} reward {row['total_reward']:g}  {row['n_turns']} turns{wrong}"


def runs_about(workspace: Workspace, run_id: str, stages: tuple[str, ...]) -> list[str]:
    """Finished runs of these stages that made the episode, or that read the run which made it."""
    own = workspace.tracking.experiment(run_id)
    return [
        one for stage in stages for one in [*([run_id] if stage == own else []), *readers(workspace, run_id, stage)]
    ]
