"""Stored replies of the LLM inside an environment, by request. A run with a simulated customer repeats word for word,
and the same request is paid for once. Ours.

    turnwise run tau_retail+qwen7b --set task.cassette=data/retail.cassette                                # asks, and keeps
    turnwise run tau_retail+qwen7b --set task.cassette=data/retail.cassette --set task.cassette_only=true  # asks nobody

One SQLite file, which threads and processes share. The first reply to a request stays.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from stages.frame.types import Ask, Message, SimulatorError, TurnwiseError, UsageError

WAIT_S = 60.0  # for a file that another process writes to
QUOTED = 60  # characters of a request in an error
_TABLE = "create table if not exists replies (key text primary key, request text not null, reply text not null)"


def recorded(ask: Ask, file: Path, asked_of: Mapping[str, Any], *, only: bool = False) -> Ask:
    """`ask`, whose replies are read from the file where it has them, and put there where it has not.

    asked_of: what a reply depends on besides messages, temperature and seed, such as the model's name. only: nobody is
    asked, and a request without a reply raises SimulatorError. Raises UsageError where the file cannot be used.
    """
    if only and not file.is_file():
        raise UsageError(f"task.cassette: there is no file {file}; record it first, without task.cassette_only.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _opened(file) as connection:
            connection.execute("pragma journal_mode = wal")
            connection.execute(_TABLE)
    except (OSError, TurnwiseError) as error:
        raise UsageError(f"task.cassette: {file} cannot be used ({error}). Name another file.") from None

    def answer(messages: Sequence[Message], *, temperature: float = 0.0, seed: int = 0) -> str:
        asked = {**asked_of, "temperature": temperature, "seed": seed, "messages": list(messages)}
        request = json.dumps(asked, sort_keys=True)
        if (kept := _find(file, request)) is not None:
            return kept
        if only:
            last = " ".join(str(messages[-1].get("content")).split())[:QUOTED]
            raise SimulatorError(f"{file} has no reply to {last!r}, and with task.cassette_only nobody is asked")
        return _keep(file, request, ask(messages, temperature=temperature, seed=seed))

    return answer


def _find(file: Path, request: str) -> str | None:
    with _opened(file) as connection:
        found = connection.execute("select reply from replies where key = ?", [_key(request)]).fetchone()
    return None if found is None else str(found[0])


def _keep(file: Path, request: str, reply: str) -> str:
    """The reply that stays: another thread or process may have asked the same meanwhile."""
    with _opened(file) as connection:
        connection.execute("insert or ignore into replies values (?, ?, ?)", [_key(request), request, reply])
        (kept,) = connection.execute("select reply from replies where key = ?", [_key(request)]).fetchone()
    return str(kept)


def _key(request: str) -> str:
    return hashlib.sha256(request.encode()).hexdigest()


@contextmanager
def _opened(file: Path) -> Iterator[sqlite3.Connection]:
    """Raises TurnwiseError with what SQLite says."""
    try:
        with closing(sqlite3.connect(file, timeout=WAIT_S)) as connection, connection:
            yield connection
    except sqlite3.Error as error:
        raise TurnwiseError(f"the cassette {file}: {error}") from error
