"""A PostgreSQL server as the database that several machines share.

A claim on a fingerprint is an advisory lock of a session of its own: the server frees it however its holder ends, also
where a machine goes away with its network. A running run has its heartbeat as a tag, by the server's clock.
Passwords are read by libpq: from PGPASSWORD, or from ~/.pgpass.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from stages.frame.types import TurnwiseError, UsageError
from stages.store.database import Ask
from stages.store.machine import is_dead, is_here
from stages.store.runs import hidden

BEAT_S = 30.0  # between two heartbeats of a running run
BOUND_S = 300.0  # a run of another machine whose heartbeat is older is dead
POLL_S = 1.0  # between two looks at a claim that another process holds
CONNECT_S = 10
HEARTBEAT = "heartbeat"  # tag: seconds since the epoch, by the server's clock
STORE = "turnwise store"  # what is claimed to make MLflow's tables
# A machine that vanished is noticed by its server, and a server that vanished by its clients, within two minutes.
ALIVE = {"keepalives": 1, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 6}
SESSION = "set tcp_keepalives_idle = 30; set tcp_keepalives_interval = 10; set tcp_keepalives_count = 6"
_AWAY = re.compile(
    r"psycopg2\.(OperationalError|InterfaceError|errors\.(\w+Shutdown|CannotConnectNow|Insufficient\w+))"
    # psycopg2 tells a connection that was cut behind a server's last words as its most general error.
    r"|psycopg2\.DatabaseError\b.*(server closed the connection|could not receive data from server|connection has been closed)",
    re.DOTALL,
)
_CLOCK = "select extract(epoch from clock_timestamp())::float8"
_BEAT = (
    "insert into tags (key, value, run_uuid) "
    "select ?, extract(epoch from clock_timestamp())::bigint::text, run_uuid from runs where run_uuid = any(?) "
    "on conflict (key, run_uuid) do update set value = excluded.value"
)


class Postgres:
    """A `Database`. Connections are opened late; one that the server has cut is opened anew."""

    listed = "with listed as (select run_uuid from unnest(?::text[]) as run_uuid)"  # whose length the planner knows
    join = "join"

    def __init__(self, uri: str) -> None:
        self.uri = uri
        parts = urlsplit(uri)
        self._name = f"postgresql://{parts.netloc.rpartition('@')[2]}{parts.path}"
        self._session = Session(self)
        self._lock = threading.RLock()  # threads take turns
        self._made = False
        self._pulse = Pulse(self)

    def __str__(self) -> str:
        return self._name

    def ids(self, run_ids: Sequence[str]) -> list[str]:
        return list(run_ids)

    def exists(self) -> bool:
        if not self._made:
            with self.opened() as ask:
                wanted = ("runs", "tags", "params", "latest_metrics", "experiments")
                ((self._made,),) = ask(f"select {' and '.join(['to_regclass(?) is not null'] * len(wanted))}", wanted)
        return self._made

    @contextmanager
    def told(self) -> Iterator[None]:
        try:
            yield
        except TurnwiseError:
            raise
        except Exception as error:
            said = f"{type(error).__module__}.{type(error).__qualname__} {error}"
            if not is_away(error):
                raise
            why = _quoted(said)
            raise TurnwiseError(
                f"the store {self} was wanted, but it does not answer as it should ({why}). Look whether the server runs "
                "and lets this user in (PGPASSWORD), then run the same command again: what was finished is reused"
            ) from error

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self.claimed(STORE, lambda: None):
            yield

    @contextmanager
    def opened(self) -> Iterator[Ask]:
        with self.told(), self._lock:
            yield self._session.ask

    @contextmanager
    def claimed(self, fingerprint: str, waiting: Callable[[], None]) -> Iterator[None]:
        claim = Claim(Session(self), fingerprint)
        with self.told():
            claim.take(waiting)
        self._pulse.add(claim)
        try:
            yield
        finally:
            self._pulse.remove(claim)
            claim.leave()

    def now(self) -> float:
        """Seconds since the epoch by the server's clock."""
        with self.opened() as ask:
            ((now,),) = ask(_CLOCK)
        return float(now)

    def signs(self) -> Mapping[str, str]:
        return {HEARTBEAT: f"{self.now():.0f}"}

    def begun(self, run_id: str) -> None:
        self._pulse.begin(run_id)

    def ended(self, run_id: str) -> None:
        self._pulse.end(run_id)

    def dead(self, running: Sequence[Mapping[str, str]]) -> list[bool]:
        if not running:
            return []
        oldest = self.now() - BOUND_S
        # Two machines may have one name, so a process that this one cannot know is judged by its heartbeat.
        return [is_dead(tags) if is_here(tags) else float(tags.get(HEARTBEAT, 0)) < oldest for tags in running]


class Session:
    """A connection that is opened when something is asked, and again after a fork or a restart of the server."""

    def __init__(self, db: Postgres) -> None:
        self._db = db
        self._raw: Any = None
        self._process = 0

    def ask(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """For what may be asked twice: a connection that was cut is opened anew once."""
        fresh = not self.is_open or self._process != os.getpid()
        try:
            return self.ask_once(query, values)
        except Exception as error:
            if fresh or not is_away(error):
                raise
            self.close()
            return self.ask_once(query, values)

    def ask_once(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        if not self.is_open or self._process != os.getpid():
            self._raw, self._process = _connect(self._db.uri), os.getpid()
        with self._raw.cursor() as cursor:
            cursor.execute(query.replace("?", "%s"), list(values) or None)
            return cursor.fetchall() if cursor.description else []

    @property
    def is_open(self) -> bool:
        return self._raw is not None

    def close(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None and self._process == os.getpid():
            with suppress(Exception):  # it is gone already
                raw.close()


class Claim:
    """An advisory lock by the hash of a text, in a session of its own."""

    def __init__(self, session: Session, text: str) -> None:
        self._session = session
        self._key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
        self._mine = threading.RLock()  # whoever holds it and the heartbeat take turns
        self._left = False

    def take(self, waiting: Callable[[], None]) -> None:
        """Wait for it without an end, `waiting` called once. Ctrl-C ends the wait."""
        told = False
        while not self._taken():
            if not told:
                told = True
                waiting()
            time.sleep(POLL_S)

    def renew(self) -> None:
        """Look whether the session is still there; after a restart of the server, take the claim again if it is free."""
        with self._mine:
            if self._left:
                return
            try:
                if self._session.is_open:
                    self._session.ask_once("select 1")
                    return
            except Exception as error:
                if not is_away(error):
                    raise
                self._session.close()
            self._session.ask_once("select pg_try_advisory_lock(?)", [self._key])

    def leave(self) -> None:
        with self._mine:
            self._left = True
            self._session.close()

    def _taken(self) -> bool:
        try:
            ((taken,),) = self._session.ask_once("select pg_try_advisory_lock(?)", [self._key])
        except Exception as error:
            if not is_away(error):
                raise
            self._session.close()
            self._session.ask_once("select 1")  # else it is told that the server is away
            time.sleep(2 * BEAT_S)  # after a restart, who held the claim comes first
            return False
        return bool(taken)


class Pulse:
    """A thread that renews the heartbeats of this process's runs, and its claims, as long as there are any."""

    def __init__(self, db: Postgres) -> None:
        self._db = db
        self._runs: set[str] = set()
        self._claims: list[Claim] = []
        self._process = 0

    def begin(self, run_id: str) -> None:
        self._runs.add(run_id)
        self._beat()

    def end(self, run_id: str) -> None:
        self._runs.discard(run_id)

    def add(self, claim: Claim) -> None:
        self._claims.append(claim)
        self._beat()

    def remove(self, claim: Claim) -> None:
        self._claims.remove(claim)

    def _beat(self) -> None:
        if self._process != os.getpid():  # a fork has no threads
            self._process = os.getpid()
            threading.Thread(target=self._go_on, name="heartbeat", daemon=True).start()

    def _go_on(self) -> None:
        session = Session(self._db)
        while True:
            time.sleep(BEAT_S)
            # A server that is away is told by whoever needs it; the next beat finds it again.
            if runs := list(self._runs):
                with suppress(Exception):
                    session.ask(_BEAT, [next(iter(hidden({HEARTBEAT: ""}))), runs])
            for claim in list(self._claims):
                with suppress(Exception):
                    claim.renew()


def _connect(uri: str) -> Any:
    try:
        import psycopg2
    except ImportError:
        wanted = "turnwise.toml names a PostgreSQL database, but psycopg2 is not installed"
        raise UsageError(f"{wanted}. Run: pip install 'turnwise[team]'") from None
    raw = psycopg2.connect(uri, connect_timeout=CONNECT_S, application_name="turnwise", **ALIVE)
    raw.autocommit = True
    with raw.cursor() as cursor:
        cursor.execute(SESSION)
    return raw


def is_away(error: BaseException) -> bool:
    """Whether the server cannot be reached, cut the connection, or lets nobody in, through whichever library."""
    names = " ".join(f"{one.__module__}.{one.__qualname__}" for one in type(error).__mro__)
    return bool(_AWAY.search(f"{names} {error}"))


def _quoted(text: str) -> str:
    """The first line of what the server said, without the names of Python's errors."""
    said = re.sub(r"\(?psycopg2\.[\w.]+\)?:? *", "", text)
    said = re.sub(r"^[\w.]*(Error|Exception|Shutdown)\b:? *", "", said).strip()
    return (said.splitlines() or [""])[0][:160]
