"""Episodes of a pipeline run for the page. Every turn has the critic's words, targets, values and credit beside it. It
also shows which of its tokens were trained on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from flows.look.view import credit
from flows.look.view.sources import Source, choose, sources, titles
from flows.look.view.tokens import Pieces, pieces_of
from flows.look.view.verdicts import disagreement, is_taken, result
from stages.frame.types import Changed, MissingInput, Row
from stages.store.workspace import Workspace

WRITERS = {
    "judgements": ("refine", "pick", "evaluate"),
    "targets": ("targets", "refine", "pick", "q_critic"),
    "certificates": ("self_ac", "grpo"),
}
"""Table -> the stages that write about an episode's turns in it."""
SAID = {
    "judgements": ("action", "futures", "critique", "verdict", "refined", "info"),
    "targets": ("role", "completion_ids", "student_ids", "completion", "weight"),
    "certificates": ("extended", "position", "produced", "rendered"),
}
"""The columns of it that are shown."""
KEY = ("run_id", "episode_id", "turn")
HEAD = ("run_id", "episode_id", "scenario_id", "split", "outcome", "total_reward", "n_turns", "seconds", "error")
TURN = (
    *KEY, "state_len", "prompt_ids", "action_ids", "text", "thought", "action", "observation",
    "reward", "terminated", "truncated", "malformed", "seconds",
)  # fmt: skip
CERTIFIED = ("self_ac", "grpo")  # methods that certify the turns they train on; of rft it is not stored which it drew
VALUES = "values/values.parquet"  # artifact of an evaluation of self_ac

Turn = tuple[str, int]  # episode, turn


@dataclass(frozen=True)
class Shown:
    """The episodes on the page, of `total` that the run played."""

    episodes: list[dict[str, Any]]
    total: int


def read_episodes(workspace: Workspace, summary: Mapping[str, Any], config: Mapping[str, Any], n: int) -> Shown:
    """At most n episodes of a pipeline run, as JSON. config: of the run."""
    played_by = {one.run_id: one for one in sources(summary)}
    heads = workspace.replay.read("episodes", list(played_by), HEAD)
    runs, ledgers = titles(summary), _ledgers(workspace, summary)
    chosen = choose(heads, list(played_by.values()), _told(workspace, runs, ledgers), n)
    ids = {(head["episode_id"],) for head in chosen}
    shown = list(dict.fromkeys(head["run_id"] for head in chosen))  # an id stands for one episode within a pipeline run

    def read(table: str, runs: Sequence[str], columns: Sequence[str]) -> list[Row]:
        return workspace.replay.read(table, runs, columns, by=["episode_id"], among=ids)

    messages = {row["episode_id"]: row["messages"] for row in read("episodes", shown, ("episode_id", "messages"))}
    turns = _grouped(read("turns", shown, TURN), "episode_id")
    said = {
        table: _grouped(read(table, _of(runs, stages), (*KEY, *SAID[table])), "episode_id", "turn")
        for table, stages in WRITERS.items()
    }
    lines = _credit([ledgers[run_id] for run_id in shown if run_id in ledgers], ids)
    page = _Page(config["method"], runs, said, lines, pieces_of(config["model"]["path"]))
    values = _values(workspace, [played_by[run_id] for run_id in shown], ids)
    found = []
    for head in chosen:
        name = head["episode_id"]
        source = played_by[head["run_id"]]
        found.append(_episode(head, source, messages[name], turns.get(name, []), values.get(name, []), page))
    return Shown(found, len(heads))


@dataclass(frozen=True)
class _Page:
    """What an episode's turns are looked up in. said: table -> turn -> rows; lines: the ledger's, by turn."""

    method: str
    named: Mapping[str, str]
    said: Mapping[str, Mapping[Turn, list[Row]]]
    lines: Mapping[Turn, Row]
    pieces: Pieces | None


def _episode(
    head: Row, source: Source, messages: list[Row], turns: list[Row], values: list[float], page: _Page
) -> dict[str, Any]:
    opening = messages[: turns[0]["state_len"]] if turns else messages
    became = result(head)
    return {
        "id": head["episode_id"], "played_by": head["run_id"], "seconds": head["seconds"], "by": source.title, "stage": source.stage, "iteration": source.iteration,
        "part": source.part, "split": head["split"], "scenario": head["scenario_id"], "outcome": head["outcome"],
        "result": became, "reward": head["total_reward"], "error": head["error"], "values": values,
        "opening": [{"role": str(one.get("role", "")), "content": _text(one)} for one in opening],
        "turns": [_turn(turn, turns, became, source.stage == "collect", page) for turn in turns],
    }  # fmt: skip


def _turn(turn: Row, turns: Sequence[Row], became: str, learned_from: bool, page: _Page) -> dict[str, Any]:
    key = (turn["episode_id"], turn["turn"])
    reply = [one["turn"] for one in turns if one["state_len"] == turn["state_len"]]
    said = {table: rows.get(key, []) for table, rows in page.said.items()}
    line = page.lines.get(key, {})
    return {
        "turn": turn["turn"], "part": [reply.index(turn["turn"]) + 1, len(reply)], "malformed": turn["malformed"],
        "seconds": turn["seconds"], "text": turn["text"], "thought": turn["thought"], "action": turn["action"], "observation": turn["observation"],
        "reward": turn["reward"], "end": "terminated" if turn["terminated"] else "truncated" if turn["truncated"] else "",
        "prompt": len(turn["prompt_ids"]), "n_tokens": len(turn["action_ids"]), "tokens": _pieces(page, turn["action_ids"]),
        "trained": _trained(page.method, said["certificates"]) if learned_from else False,
        "credit": {name: line[name] for name in ("value", "target", "advantage", "share", "clipped")} if line else None,
        "differs": next(({name: row[name] for name in ("position", "produced", "rendered")}
                         for row in said["certificates"] if row["extended"] is False), None),
        "judgements": [_judgement(row, turn["action"], became, page) for row in said["judgements"]],
        "targets": [_target(row, page) for row in said["targets"]],
    }  # fmt: skip


def _judgement(row: Row, action: str, became: str, page: _Page) -> dict[str, Any]:
    info = row["info"] or {}
    notes = [f"dropped: {info['dropped']}" if info.get("dropped") else "", "picked" if info.get("picked") else ""]
    notes.append(f"the gate refused: {info['refused']}" if info.get("refused") else "")
    return {
        "by": page.named.get(row["run_id"], ""), "action": row["action"], "taken": is_taken(row, action),
        "futures": row["futures"], "critique": row["critique"], "verdict": row["verdict"],
        "refined": "" if row["refined"] == row["action"] else row["refined"], "notes": [note for note in notes if note],
        "wrong": disagreement(row, action, became),
    }  # fmt: skip


def _target(row: Row, page: _Page) -> dict[str, Any]:
    return {
        "by": page.named.get(row["run_id"], ""), "role": row["role"], "completion": row["completion"], "weight": row["weight"],
        "prompt": len(row["student_ids"] or ()), "tokens": _pieces(page, row["completion_ids"] or ()),
    }  # fmt: skip


def _trained(method: str, certificates: Sequence[Row]) -> bool | None:
    """Whether a collected reply's tokens were trained on. None if that is not stored."""
    return None if method == "rft" else method in CERTIFIED and bool(certificates)


def _pieces(page: _Page, ids: Sequence[int]) -> list[str]:
    return page.pieces(ids) if page.pieces else []


def _text(message: Row) -> str:
    """What a message says; calls of tools as they are."""
    rest = {key: value for key, value in message.items() if key not in ("role", "content") and value}
    content = message.get("content") or ""
    said = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return "\n".join(part for part in (said, json.dumps(rest, ensure_ascii=False) if rest else "") if part)


def _of(runs: Mapping[str, str], stages: Sequence[str]) -> list[str]:
    """Those of the runs, by their titles, that are of these stages."""
    return [run_id for run_id, title in runs.items() if title.split()[0] in stages]


def _told(workspace: Workspace, runs: Mapping[str, str], ledgers: Mapping[str, Path]) -> set[str]:
    """Episodes of which a critic's judgement or a ledger is stored."""
    import pyarrow.parquet as pq

    judged = workspace.replay.read("judgements", _of(runs, WRITERS["judgements"]), ["episode_id"])
    kept = (pq.read_table(path, columns=["episode"])["episode"].unique().to_pylist() for path in ledgers.values())
    return {row["episode_id"] for row in judged}.union(*kept)


def _ledgers(workspace: Workspace, summary: Mapping[str, Any]) -> dict[str, Path]:
    """Run of collect -> the ledger of the run of self_ac that learned from it."""
    pairs = [(row["runs"].get("collect"), row["runs"].get(credit.STAGE)) for row in summary["iterations"]]
    found = {collect: _artifact(workspace, run, credit.FILE) for collect, run in pairs if collect and run}
    return {collect: path for collect, path in found.items() if path}


def _credit(paths: Sequence[Path], ids: set[tuple[str]]) -> dict[Turn, Row]:
    """The ledgers' line of each turn of these episodes."""
    entries = _grouped((row for path in paths for row in _parquet(path, "episode", ids)), "episode")
    return {(name, line["turn"]): line for name, mine in entries.items() for line in credit.turn_lines(mine, {})}


def _values(workspace: Workspace, shown: Sequence[Source], ids: set[tuple[str]]) -> dict[str, list[float]]:
    """V of the states 0..N of these episodes; none where no value was read."""
    paths = [_artifact(workspace, one.run_id, VALUES) for one in shown if one.stage == "evaluate"]
    rows = [row for path in paths if path for row in _parquet(path, "episode_id", ids)]
    found = _grouped(sorted(rows, key=lambda row: int(row["turn"])), "episode_id")
    return {name: [row["value"] for row in mine] for name, mine in found.items()}


def _artifact(workspace: Workspace, run_id: str, path: str) -> Path | None:
    try:
        return workspace.tracking.artifact(run_id, path)
    except Changed:
        raise
    except MissingInput:  # a policy without a head, or an older store
        return None


def _parquet(path: Path, column: str, ids: Iterable[tuple[str]]) -> list[Row]:
    import pyarrow.parquet as pq

    rows: list[Row] = pq.read_table(path, filters=[(column, "in", {name for (name,) in ids})]).to_pylist()
    return rows


def _grouped(rows: Iterable[Row], *by: str) -> dict[Any, list[Row]]:
    """The rows by the value of a column, or by the values of several."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(itemgetter(*by)(row), []).append(row)
    return found
