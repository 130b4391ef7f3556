"""What the tracking store asks of its database: a SQLite file at home, or a PostgreSQL server that machines share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

Ask = Callable[..., list[tuple[Any, ...]]]
"""Called with a query and its values ("?" in the query); gives its rows."""


class Database(Protocol):
    """str() of it is where it is, for messages, without user and password."""

    listed: str
    """The start of a query that has a table `listed` of run ids; its value is what `ids` gives."""
    join: str
    """A join that is best done in the order in which it is written."""

    @property
    def uri(self) -> str:
        """As MLflow names it."""

    def ids(self, run_ids: Sequence[str]) -> Any:
        """Run ids as the value of `listed`."""

    def exists(self) -> bool:
        """Whether MLflow's tables are there; without them there are no runs."""

    def told(self) -> AbstractContextManager[None]:
        """Turn what the database says of itself, through any library, into a TurnwiseError; others pass."""

    def exclusive(self) -> AbstractContextManager[None]:
        """What one process at a time may do: make the tables, register a model."""

    def opened(self) -> AbstractContextManager[Ask]:
        """To read. Raises TurnwiseError where it cannot be read."""

    def claimed(self, fingerprint: str, waiting: Callable[[], None]) -> AbstractContextManager[None]:
        """Be the one process of all machines that does this work; `waiting` is called once where another is."""

    def signs(self) -> Mapping[str, str]:
        """Tags of a run that begins, by which another machine sees that its process lives."""

    def begun(self, run_id: str) -> None:
        """Keep those tags new."""

    def ended(self, run_id: str) -> None:
        """No longer."""

    def dead(self, running: Sequence[Mapping[str, str]]) -> list[bool]:
        """Whether the process of each of these runs is known to be gone, by the run's tags."""
