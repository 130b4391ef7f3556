"""Where the artifacts of all runs are: in a folder, or in a bucket of which a folder is the cache.

The functions of stages/store/artifacts.py work on a run's folder. A place brings there what is to be read, and sends
away what was written.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stages.store import artifacts


class Place(Protocol):
    """A run's folder is `root/EXPERIMENT/RUN/artifacts`; names and paths are relative to it."""

    @property
    def root(self) -> Path: ...

    def check(self) -> None:
        """Raises TurnwiseError where it cannot be reached."""

    def location(self, experiment: str) -> str:
        """As MLflow names the place of an experiment's artifacts."""

    def address(self, folder: Path, path: str) -> str:
        """As MLflow names an artifact."""

    def bring(self, folder: Path, path: str = "") -> None:
        """See that what is at or below `path` lies in the folder as it is now; "" is all of it."""

    def send(self, folder: Path, path: str) -> None:
        """Keep what was written at or below `path`."""

    def remove(self, folder: Path, names: Collection[str]) -> None:
        """Delete files. One that is not there is none."""

    def weights(self, folder: Path) -> dict[str, int]:
        """Bytes of each file of weights, by its name."""


@dataclass(frozen=True)
class Folder:
    """Nothing is brought or sent."""

    root: Path

    def check(self) -> None:
        return None

    def location(self, experiment: str) -> str:
        return str(self.root / experiment)

    def address(self, folder: Path, path: str) -> str:
        return str(folder / path)

    def bring(self, folder: Path, path: str = "") -> None:
        return None

    def send(self, folder: Path, path: str) -> None:
        return None

    def remove(self, folder: Path, names: Collection[str]) -> None:
        artifacts.unlink(folder, names)

    def weights(self, folder: Path) -> dict[str, int]:
        return artifacts.weights(folder)
