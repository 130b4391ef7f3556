"""Adapters as versions of registered models, through MLflow's client: champion, candidates, decisions about them.

A version's source is an absolute path, or an address in a bucket. After a project folder moved, a repeated run must
register it again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from stages.frame.signals import signals_held
from stages.frame.types import UsageError
from stages.store.database import Database
from stages.store.runs import clip, clipped

CHAMPION, CANDIDATE = "champion", "candidate"  # aliases
VERDICT = "verdict"  # tag of a version that was held against the champion


@dataclass(frozen=True)
class Version:
    """A version of a registered model. tags: `run` and `pipeline` say whose adapter it is, `iteration` of which iteration."""

    name: str
    number: int
    tags: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def link(self) -> str:
        """Its page, relative to MLflow's own."""
        return f"#/models/{quote(self.name)}/versions/{self.number}"


def register(client: Any, name: str, source: str, run_id: str, tags: Mapping[str, str], note: str) -> Version:
    """The version of that source, made where there is none yet. To be called by one process at a time."""
    name = _safe(name)
    if not client.search_registered_models(f"name = {_quoted(name)}", max_results=1):
        client.create_registered_model(name)
    for one in client.search_model_versions(f"name = {_quoted(name)}"):
        if one.source == source:
            return Version(name, int(one.version), dict(one.tags))
    made = client.create_model_version(
        name, source, run_id=run_id, tags=dict(tags), description=note, await_creation_for=0
    )
    return Version(name, int(made.version), dict(tags))


def aliased(client: Any, name: str, alias: str) -> Version | None:
    """The version that has the alias; None where no such model or alias is."""
    name = _safe(name)
    found = client.search_registered_models(f"name = {_quoted(name)}", max_results=1)
    if not found or (number := found[0].aliases.get(alias)) is None:
        return None
    return Version(name, int(number), dict(client.get_model_version(name, str(number)).tags))


def name_alias(client: Any, version: Version, alias: str) -> None:
    """Give the alias to the version, and take it from any other one."""
    client.set_registered_model_alias(version.name, alias, str(version.number))


def decide(
    client: Any, candidate: Version, against: int | None, verdict: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Keep the verdict on a candidate, and make it the champion where that says `promoted`. By one process at a time.

    What was decided once stays so: that is returned, and a promotion that a kill cut off is done. against: number of the
    champion that it was held against. verdict: None to ask. None where nothing was decided, and under another champion.
    """
    now = aliased(client, candidate.name, CHAMPION)
    number = now.number if now else None
    stored = client.get_model_version(candidate.name, str(candidate.number)).tags.get(VERDICT)
    if stored is None and (verdict is None or number != against):
        return None
    decided: dict[str, Any] = json.loads(stored) if stored else dict(verdict or {})
    if stored is None:
        client.set_model_version_tag(candidate.name, str(candidate.number), VERDICT, json.dumps(decided))
    if decided["promoted"] and number == decided["against"]:
        name_alias(client, candidate, CHAMPION)
    return decided


def sources(client: Any) -> set[str]:
    """Ids of the runs that the versions' adapters are artifacts of."""
    return {Path(one.source).parts[-3] for one in _all(client.search_model_versions)}


def take(client: Any, other: Any, there: Collection[str], address: Callable[[str, str], str]) -> list[str]:
    """Copy the versions of another store, with their verdicts and aliases. By one process at a time.

    there: runs whose adapters are here; other versions are left out. address: of a run's artifact, here. An alias that a
    model has here stays where it is. Returns what is new, as "name version".
    """
    known = {one.source for one in _all(client.search_model_versions)}
    numbers, new = dict[tuple[str, int], int](), list[str]()
    for one in sorted(_all(other.search_model_versions), key=lambda one: (one.name, int(one.version))):
        run_id, path = Path(one.source).parts[-3], Path(one.source).name
        if run_id not in there:
            continue
        tags, source = dict(one.tags), address(run_id, path)
        if VERDICT in tags:  # it names the champion of then by its number
            verdict = json.loads(tags[VERDICT])
            tags[VERDICT] = json.dumps({**verdict, "against": numbers.get((one.name, verdict["against"]))})
        made = register(client, one.name, source, one.run_id, tags, one.description)
        numbers[one.name, int(one.version)] = made.number
        new += [] if source in known else [f"{one.name} {made.number}"]
    for model in _all(other.search_registered_models):
        for alias, number in model.aliases.items():
            if (mine := numbers.get((model.name, int(number)))) and aliased(client, model.name, alias) is None:
                name_alias(client, Version(model.name, mine), alias)
    return new


def _all(search: Callable[..., Any]) -> Iterator[Any]:
    token = None
    while True:
        page = search("", page_token=token)
        yield from page
        if not (token := page.token):
            return


def _safe(name: str) -> str:
    return name.replace(":", "_")  # which MLflow takes for the start of a version


def _quoted(text: str) -> str:
    return f'"{text}"' if "'" in text else f"'{text}'"


@dataclass(frozen=True)
class RegisteredModels:
    """db: MLflow's database. client: MLflow's, which is imported when it is first asked for."""

    db: Database
    client: Callable[[], Any]

    def register(self, name: str, run_id: str, adapter: str, *, figures: Mapping[str, Any], note: str = "") -> Version:
        """A version of the model `name`: the adapter at that address, found by the run `run_id`."""
        client = self.client()  # made before: that takes its turn, too
        with self.db.told(), self.db.exclusive(), signals_held():
            return register(client, name, adapter, run_id, clipped(figures), clip(note))

    def champion(self, name: str) -> Version | None:
        """The champion of the model, if there is one. Raises UsageError where no run of turnwise registered it."""
        if not self.db.exists():
            return None
        with self.db.told():
            found = aliased(self.client(), name, CHAMPION)
        if found and not {"run", "pipeline", "iteration"} <= found.tags.keys():
            raise UsageError(
                f"The champion of {name}, version {found.number}, was not registered by a run; give the alias champion to another version."
            )
        return found

    def candidate(self, version: Version) -> None:
        """Name the version the candidate of its model."""
        with self.db.told(), signals_held():
            name_alias(self.client(), version, CANDIDATE)

    def decide(
        self, candidate: Version, against: int | None, verdict: Mapping[str, Any] | None
    ) -> dict[str, Any] | None:
        """What is decided of a candidate, once: `decide`."""
        client = self.client()
        with self.db.told(), self.db.exclusive(), signals_held():
            return decide(client, candidate, against, verdict)

    def take(self, other: RegisteredModels, there: Collection[str], address: Callable[[str, str], str]) -> list[str]:
        """Copy the versions of another store: `take`."""
        if not other.db.exists():
            return []
        client, theirs = self.client(), other.client()
        with self.db.told(), self.db.exclusive(), signals_held():
            return take(client, theirs, there, address)

    def sources(self) -> set[str]:
        """Ids of the runs whose adapter is a version of a model."""
        if not self.db.exists():
            return set()
        with self.db.told():
            return sources(self.client())
