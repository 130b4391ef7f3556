"""Artifacts of runs, wherever they lie: the half of `Tracking` that deals with files.

What happens in a run's folder is in stages/store/artifacts.py. Where that folder comes from is in stages/store/places.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stages.frame.types import Dropped
from stages.store import artifacts
from stages.store.places import Folder, Place
from stages.store.shared import Shared


class RunFiles(ABC):
    """place: of the artifacts of all runs. Whoever derives from it knows the runs."""

    def __init__(self, place: Place) -> None:
        self._place = place

    @abstractmethod
    def _folder(self, run_id: str) -> Path:
        """The run's folder. Raises MissingInput for an unknown id."""

    @abstractmethod
    def stand_ins(self, run_id: str) -> Sequence[str]:
        """Finished runs that were made to take the place of this one, newest first."""

    def save(self, run_id: str, local: Path, artifact_path: str) -> None:
        """Copy a file or folder to be the run's artifact of that name."""
        artifacts.save(self._folder(run_id), local, artifact_path)
        self._place.send(self._folder(run_id), artifact_path)

    def write_text(self, run_id: str, artifact_path: str, text: str) -> None:
        """Write a text as an artifact."""
        artifacts.write_text(self._folder(run_id), artifact_path, text)
        self._place.send(self._folder(run_id), artifact_path)

    def write_json(self, run_id: str, artifact_path: str, value: Any) -> None:
        """Write a value as a JSON artifact."""
        artifacts.write_json(self._folder(run_id), artifact_path, value)
        self._place.send(self._folder(run_id), artifact_path)

    def artifact(self, run_id: str, path: str) -> Path:
        """Where the artifact lies, of the run or of one that stands in for it. Raises MissingInput, Dropped."""
        try:
            return artifacts.existing(self._brought(run_id, path), path)
        except Dropped:
            for stand_in in self.stand_ins(run_id):
                if not self.is_dropped(stand_in):
                    return artifacts.existing(self._brought(stand_in, path), path)
            raise

    def address(self, run_id: str, path: str) -> str:
        """Where MLflow finds the artifact. Raises as `artifact`."""
        file = self.artifact(run_id, path)
        return self._place.address(file.parents[len(Path(path).parts) - 1], path)

    def rows_of(self, run_id: str) -> list[str]:
        """Artifact paths of the run's rows, as sealed."""
        return artifacts.rows_of(self._brought(run_id, "rows"))

    def read_json(self, run_id: str, path: str) -> Any:
        """The value of a JSON artifact. Raises as `artifact`, and Changed where it is no JSON."""
        return artifacts.read_json(self.artifact(run_id, path))

    def seal(self, run_id: str) -> None:
        """Keep the hash of each of the run's artifacts: what is read later is held against it."""
        artifacts.seal(self._brought(run_id))
        self._place.send(self._folder(run_id), artifacts.SEAL)

    def changed(self, run_id: str) -> list[str]:
        """The run's artifacts that are not what was written."""
        return artifacts.changed(self._brought(run_id))

    def weights(self, run_id: str) -> dict[str, int]:
        """Bytes of each file of weights that the run has, by its artifact path."""
        return self._place.weights(self._folder(run_id))

    def is_dropped(self, run_id: str) -> bool:
        return bool(artifacts.dropped(self._brought(run_id, artifacts.DROPPED)))

    def drop(self, run_id: str, wanted: Callable[[], bool]) -> bool:
        """Delete the run's weights, and mark the run; False where it is `wanted` after all (`artifacts.drop`)."""
        folder, place = self._brought(run_id, artifacts.DROPPED), self._place
        return artifacts.drop(folder, self.weights(run_id), wanted, place.send, place.remove)

    def discard(self, run_id: str, name: str) -> None:
        """Delete an artifact that nobody needs."""
        self._place.remove(self._folder(run_id), [name])

    def _brought(self, run_id: str, path: str = "") -> Path:
        """The run's folder, in which what is at or below `path` lies as it is now."""
        folder = self._folder(run_id)
        self._place.bring(folder, path)
        return folder


def place_of(root: Path, shared: Shared | None, cache: Path) -> Place:
    """root: of the embedded store. cache: where files of a bucket lie."""
    if shared is None:
        return Folder(root / "artifacts")
    if not shared.artifacts.startswith("s3://"):
        return Folder(Path(shared.artifacts))
    from stages.store.bucket import Bucket

    return Bucket(shared.artifacts, cache)
