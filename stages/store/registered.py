"""The registered models of a store: versions, the champion, candidates, and what was decided of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.frame.signals import signals_held
from stages.frame.types import UsageError
from stages.store import models, sqlite
from stages.store.runs import clip, clipped
from stages.store.sqlite import STORE_LOCK_TIMEOUT_S, told


@dataclass(frozen=True)
class RegisteredModels:
    """db: MLflow's database. client: MLflow's, which is imported when it is first asked for."""

    db: Path
    client: Callable[[], Any]

    def register(
        self, name: str, run_id: str, adapter: Path, *, figures: Mapping[str, Any], note: str = ""
    ) -> models.Version:
        """A version of the model `name`: the adapter of that folder, found by the run `run_id`."""
        with told(self.db), sqlite.exclusive(self.db, STORE_LOCK_TIMEOUT_S), signals_held():
            return models.register(self.client(), name, str(adapter), run_id, clipped(figures), clip(note))

    def champion(self, name: str) -> models.Version | None:
        """The champion of the model, if there is one. Raises UsageError where no run of turnwise registered it."""
        if not self.db.exists():
            return None
        with told(self.db):
            found = models.aliased(self.client(), name, models.CHAMPION)
        if found and not {"run", "pipeline", "iteration"} <= found.tags.keys():
            raise UsageError(
                f"The champion of {name}, version {found.number}, was not registered by a run; give the alias champion to another version."
            )
        return found

    def candidate(self, version: models.Version) -> None:
        """Name the version the candidate of its model."""
        with told(self.db), signals_held():
            models.name_alias(self.client(), version, models.CANDIDATE)

    def decide(
        self, candidate: models.Version, against: int | None, verdict: Mapping[str, Any] | None
    ) -> dict[str, Any] | None:
        """What is decided of a candidate, once: `models.decide`."""
        with told(self.db), sqlite.exclusive(self.db, STORE_LOCK_TIMEOUT_S), signals_held():
            return models.decide(self.client(), candidate, against, verdict)

    def sources(self) -> set[str]:
        """Ids of the runs whose adapter is a version of a model."""
        if not self.db.exists():
            return set()
        with told(self.db):
            return models.sources(self.client())
