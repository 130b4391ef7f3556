"""The database of tau_bench: shared tables that nothing changes, and what one episode changed in them.

A record is copied when it is first edited, so a reset copies nothing and a hash needs the touched records alone. The
benchmark hashes sha256(str(tables as nested tuples sorted by key)): 5 and 5.0 differ, and the order of a list counts.
Source: tau-bench, environment base.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

Record = dict[str, Any]
Tables = Mapping[str, Mapping[str, Record]]
Key = tuple[str, str]
"""Name of a table, id of a record in it."""
Changes = Mapping[Key, str]
"""The records that differ from the shared tables, each as the text that is hashed."""


def canonical(item: Any) -> str:
    """str() of the item with dicts as tuples of (key, value) sorted by key and lists as tuples. Raises RecursionError
    where it is too deep.
    """
    return str(_nested(item))


def _nested(item: Any) -> Any:
    if isinstance(item, dict):
        return tuple((key, _nested(value)) for key, value in sorted(item.items()))
    return tuple(_nested(element) for element in item) if isinstance(item, list) else item


class Base:
    """The shared tables, with the hashed text of each record once somebody has asked for it."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._texts: dict[Key, str] = {}

    def text(self, key: Key) -> str:
        """The hashed text of a record; "" of one that there is not."""
        table, name = key
        if key not in self._texts:
            record = self.tables[table].get(name)
            self._texts[key] = "" if record is None else canonical(record)
        return self._texts[key]


class Database:
    """One state of the database. A draft is changed, then taken or thrown away as a whole; that makes a step atomic.

    What `get` and `items` give is to be read only: it may belong to the shared tables.
    """

    def __init__(self, base: Base, edited: Mapping[Key, Record] | None = None, texts: Changes | None = None) -> None:
        self._base = base
        self._edited = dict(edited or {})  # shared with the states before, so a record in it is never changed
        self._own: dict[Key, Record] = {}  # the draft's own copies
        self._texts = dict(texts or {})  # hashed text of each record in _edited

    def draft(self) -> Database:
        """A state that starts as this one and can be changed without changing this one."""
        if self._own:
            raise RuntimeError("a draft is finished before the next one is begun")
        return Database(self._base, self._edited, self._texts)

    def finished(self) -> Database:
        """The draft as a state of its own. Raises RecursionError or ValueError where a new record has no hash: nested
        too deeply, a number too long.
        """
        texts = self._texts | {key: canonical(record) for key, record in self._own.items()}
        return Database(self._base, self._edited | self._own, texts)

    def get(self, table: str, name: str) -> Record | None:
        key = (table, name)
        return self._own.get(key) or self._edited.get(key) or self._base.tables[table].get(name)

    def items(self, table: str) -> Iterator[tuple[str, Record]]:
        """Records of the shared table as they are now, in its order; new ones are not among them."""
        for name, record in self._base.tables[table].items():
            key = (table, name)
            yield name, self._own.get(key) or self._edited.get(key) or record

    def edit(self, table: str, name: str) -> Record:
        """The draft's own copy of a record that there is."""
        key = (table, name)
        if key not in self._own:
            self._own[key] = copy.deepcopy(self._edited.get(key) or self._base.tables[table][name])
        return self._own[key]

    def put(self, table: str, name: str, record: Record) -> None:
        """A new record, or another one in place of it."""
        self._own[table, name] = record

    def changes(self) -> Changes:
        """Equal changes of two states over the same tables <=> equal hashes. A record that was changed back is none.

        The text of the whole is the texts of the records in a fixed order, and such a text can be read in one way only.
        Texts are compared, not records: 5 == 5.0 and True == 1, whose hashes differ.
        """
        return {key: text for key, text in self._texts.items() if text != self._base.text(key)}

    def full_hash(self) -> str:
        """The benchmark's hash of the whole database: 0.1 s and more. `changes` tells the same; this is its test, and
        what others published.
        """
        tables = []
        for table, records in sorted(self._base.tables.items()):
            new = (name for kind, name in self._texts if kind == table and name not in records)
            names = sorted([*records, *new])
            texts = [self._texts.get((table, name)) or self._base.text((table, name)) for name in names]
            tables.append(
                f"({table!r}, {_tuple([f'({name!r}, {text})' for name, text in zip(names, texts, strict=True)])})"
            )
        return hashlib.sha256(_tuple(tables).encode()).hexdigest()


def _tuple(texts: list[str]) -> str:
    """As str() writes a tuple."""
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"
