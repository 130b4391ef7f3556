"""Training rows: token ids as an engine produced them. Only two kinds of text are tokenised here: the `general` rows, a
supervised data set of text, and replies that no engine produced.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stages.frame.contract import Context, Reader
from stages.frame.types import Row, UsageError
from stages.llm.tokens import ChatTokenizer
from stages.play.transitions import candidates, ids_of


@dataclass(frozen=True)
class TrainRow:
    """One (prompt -> completion) to be learned. `key` says where it came from, e.g. (episode id, turn).

    Ids are kept as arrays of 4 bytes each, whatever they are given as.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    weight: float = 1.0
    key: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "completion_ids"):
            if not isinstance(ids := getattr(self, name), array):
                object.__setattr__(self, name, array("i", ids))

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt and what is learned behind it."""
        return (*self.prompt_ids, *self.completion_ids)


def weighed(rows: Sequence[TrainRow], by: str) -> list[TrainRow]:
    """The rows as they are (token), or with weights divided by their lengths, so that each counts alike (row)."""
    return [replace(r, weight=r.weight / len(r.completion_ids)) for r in rows] if by == "row" else list(rows)


def read_targets(replay: Reader, run_ids: Sequence[str], role: str) -> list[Row]:
    """What a training row is made of, of the rows of table `targets` that are of this role."""
    columns = ["episode_id", "turn", "student_ids", "completion_ids", "weight", "info"]
    return replay.read("targets", run_ids, columns, by=["role"], among=[(role,)])


def target_rows(rows: Sequence[Row]) -> list[TrainRow]:
    """Rows of table `targets` as training rows: the student's prompt, never the teacher's."""
    return [TrainRow(r["student_ids"], r["completion_ids"], r["weight"], (r["episode_id"], r["turn"])) for r in rows]


def policy_rows(context: Context) -> list[TrainRow]:
    """What the policy is anchored on: what it learned last; where there is nothing, its own readable actions."""
    run_id = context.latest("refine") or context.latest("pick")
    if run_id and (refined := read_targets(context.replay, [run_id], "policy")):
        return target_rows(refined)
    own = [t for t in candidates(context.replay, context.inputs["collect"][-1:]) if not t.malformed]
    return [
        TrainRow(prompt, action, key=t.key)
        for t, (prompt, action) in zip(own, ids_of(context.replay, own), strict=True)
    ]


def general_rows(model_path: str, path: str) -> list[TrainRow]:
    """Rows of a JSONL file of {"role", "messages", "reply"}, with end tokens. Raises UsageError for a broken line."""
    chats = ChatTokenizer(model_path)
    return [
        TrainRow(chats.encode(row["messages"]), chats.reply_ids(row["reply"]), key=("general", row["role"]))
        for row in read_jsonl(path)
    ]


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: str


class _RoleRow(BaseModel):
    model_config = ConfigDict(strict=True)
    role: str
    messages: list[_Message] = Field(min_length=1)
    reply: str


def read_jsonl(path: str) -> list[dict[str, Any]]:
    """Rows of a JSONL file of {"role", "messages", "reply"}. Raises UsageError for a broken line, and for none."""
    file, rows = Path(path), []
    if not file.is_file():
        raise UsageError(f"wanted a JSONL file of role rows at {path!r}, found none; make it with: turnwise pretrain")
    # At line feeds alone: a text may hold the other characters that Python ends a line at, as U+2028.
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(_RoleRow.model_validate_json(line.decode()).model_dump())
        except ValueError as error:
            raise UsageError(
                f"{file.name}, line {number}: wanted an object with role, messages and reply ({_problem(error)})"
            ) from error
    if not rows:
        raise UsageError(f"{file.name} has no rows; wanted lines of an object with role, messages and reply")
    return rows


def _problem(error: Exception) -> str:
    """What is wrong with a line, short."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
    return str(error)[:200]
