"""Runs, their metrics and their artifacts, in MLflow's store.

One run a stage execution, one experiment a stage, a parent run a pipeline. The store is SQLite in WAL mode, so that
readers never wait for a writer; artifacts are plain files under `root/artifacts/<experiment>/<run id>/artifacts`.
A moved project folder still resumes and reruns; only MLflow's page then misses the artifacts of older runs, because it
holds absolute locations (stages/store/artifacts.py). Several machines share a PostgreSQL database, and a bucket or a
folder (stages/store/shared.py).

Only writing imports MLflow. Reading uses its tables directly (stages/store/search.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stages.frame.signals import signals_held
from stages.frame.types import MissingInput, UsageError
from stages.store import artifacts, mlflow_traces, search
from stages.store.database import Database
from stages.store.machine import process_tags
from stages.store.mlflow_db import connect, experiment_of
from stages.store.mlflow_run import ReadSet, Record, put_record, put_row, put_sets, put_values, read_record
from stages.store.models import RegisteredModels
from stages.store.run_files import RunFiles, place_of
from stages.store.runs import NOTE, STANDS_FOR, RunInfo, ScenarioSet, clip, clipped, hidden, run_info
from stages.store.shared import Shared
from stages.store.sqlite import SqliteFile

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from stages.store.mlflow_traces import Span

Status = Literal["FINISHED", "FAILED", "KILLED"]


class Tracking(RunFiles):
    """The MLflow store in `root`, or the shared one, opened, imported and created late: a reader of none finds no runs.

    cache: where files of a shared bucket lie.
    """

    def __init__(self, root: Path, shared: Shared | None = None, cache: Path | None = None) -> None:
        self.root = Path(root).absolute()
        super().__init__(place_of(self.root, shared, cache or self.root / "cache"))
        self._shared = shared
        self.db: Database = _database(shared) if shared else SqliteFile(self.root / "mlflow.db")
        self._experiments: dict[str, str] = {}  # name -> id
        self._folders: dict[str, Path] = {}  # run id -> artifact folder
        self._finished: set[str] = set()  # a finished run stays finished

    @property
    def uri(self) -> str:
        """The store as MLflow names it, for `mlflow ui --backend-store-uri`."""
        return self.db.uri

    @property
    def _where(self) -> str:
        return str(self.db if self._shared else self.root)

    @cached_property
    def _client(self) -> MlflowClient:
        with self.db.told(), self.db.exclusive():
            return connect(self.db)

    @contextmanager
    def _writing(self) -> Iterator[MlflowClient]:
        """A signal waits until the write is done. SQLAlchemy does not close a session that is interrupted in a commit.
        The process would then wait for its own lock to store how the run ended.
        """
        client = self._client  # made before, which may take long
        with self.db.told(), signals_held():
            yield client

    @cached_property
    def models(self) -> RegisteredModels:
        """Adapters as versions of registered models, with their aliases."""
        return RegisteredModels(self.db, lambda: self._client)

    def initialise(self) -> None:
        """Create the store, or upgrade one of an older MLflow; safe when several processes start at once."""
        _ = self._client

    def check(self) -> None:
        """Raises TurnwiseError where runs or artifacts cannot be read."""
        self.finished_runs()
        self._place.check()

    def start(self, experiment: str, name: str, tags: Mapping[str, str], parent: str | None = None) -> str:
        """Open a run and return its id. Host, pid, process start and a number are added to its tags."""
        above = {"mlflow.parentRunId": parent} if parent else {}
        run_id = ""
        try:
            with self._writing() as client:
                kept = clipped({**tags, **above, **self._own()})
                run = client.create_run(self.experiment_id(experiment), tags=kept, run_name=name)
                run_id = self._noted(run_info(run), str(run.info.artifact_uri)).run_id
                self.db.begun(run_id)
            return run_id
        except BaseException as error:  # what a signal that waited raises: nobody else knows of the run to end it
            if run_id:
                self.finish(run_id, "KILLED", f"{type(error).__name__}: {error}".removesuffix(": "))
            raise

    def _own(self) -> dict[str, str]:
        """Tags of a run that begins in this process."""
        number = f"{search.last_number(self.db) + 1:012d}"
        return {**hidden({**process_tags(), **self.db.signs()}), "sequence": number}

    def claimed(self, fingerprint: str, waiting: Callable[[], None]) -> AbstractContextManager[None]:
        """Be the one process of all that share the store to do this work. Lock files do that at home (equal_work.py)."""
        return self.db.claimed(fingerprint, waiting)

    def finished(self, fingerprint: str, experiment: str = "") -> str | None:
        """Newest FINISHED run with that fingerprint, in one experiment or in all."""
        found = self._search(experiment=experiment, status="FINISHED", tags={"fingerprint": fingerprint})
        # One that stands in for another has the other's results under a new id: what follows would be made again.
        return next((info.run_id for info in found if STANDS_FOR not in info.tags), None)

    def is_finished(self, run_id: str) -> bool:
        """Whether the run ended well, which alone makes its rows and artifacts readable. False for an unknown id."""
        try:
            return run_id in self._finished or self.status(run_id) == "FINISHED"
        except MissingInput:
            return False

    def finish(self, run_id: str, status: Status = "FINISHED", error: str = "") -> None:
        """End a run; `error` is kept as its tag `error`."""
        with self._writing() as client:
            if error:
                client.set_tag(run_id, "error", clip(error))
            client.set_terminated(run_id, status)
        self.db.ended(run_id)
        (self._finished.add if status == "FINISHED" else self._finished.discard)(run_id)

    def record(
        self,
        run_id: str,
        *,
        metrics: Mapping[str, float] = {},
        step: int = 0,
        curves: Mapping[str, Sequence[float]] = {},  # metric -> its values at steps 0, 1, ...
        params: Mapping[str, Any] = {},  # flat; a run's param can be written once only
    ) -> None:
        """Log everything in one transaction where MLflow's limits of a batch (1000 entities, 100 params) allow it."""
        from mlflow.entities import Metric, Param

        now = int(time.time() * 1000)
        points = [Metric(key, float(value), now, step) for key, value in metrics.items()]
        points += [Metric(k, float(value), now, at) for k, values in curves.items() for at, value in enumerate(values)]
        with self._writing() as client:
            put_values(client, run_id, points, [Param(key, value) for key, value in clipped(params).items()])

    def log(self, run_id: str, metrics: Mapping[str, float], step: int = 0) -> None:
        """One value of each metric at `step`."""
        self.record(run_id, metrics=metrics, step=step)

    def params(self, run_id: str, params: Mapping[str, Any]) -> None:
        self.record(run_id, params=params)

    def tag(self, run_id: str, key: str, value: str) -> None:
        with self._writing() as client:
            client.set_tag(run_id, key, clip(value))

    def note(self, run_id: str, text: str) -> None:
        """Put a text in Markdown in the place of the run's description."""
        self.tag(run_id, NOTE, text)

    def link(self, experiment: str, run_id: str) -> str:
        """The run's page, relative to MLflow's own."""
        return f"#/experiments/{self.experiment_id(experiment)}/runs/{run_id}"

    def reads(self, run_id: str, sets: Sequence[ScenarioSet]) -> None:
        """Name the scenarios that a run reads, as its datasets."""
        read = [ReadSet(role=one.role, name=one.name, digest=one.digest, source_type="code", source=clip(json.dumps({"tags": one.source})),
                        profile=json.dumps({"num_rows": one.rows})) for one in sets]  # fmt: skip
        with self._writing() as client:
            put_sets(client, run_id, read)

    def record_of(self, run_id: str) -> Record:
        """A run that has ended, to be put into another store. Raises UsageError for one that has not."""
        if self.status(run_id) == "RUNNING":
            raise UsageError(
                f"run {run_id[:8]} is still running, and what it leaves is not known yet. Wait until it has ended"
            )
        with self.db.told():
            return read_record(self._client, run_id, self.experiment(run_id))

    def adopt(self, record: Record, fill: Callable[[], None], *, older: bool = False) -> bool:
        """Copy a run of another store here, under its own id; False if it is here already. fill: brings its artifacts
        and rows before the run gets its end state. A kill in between leaves a run that nobody reads. older: it counts
        as older than the runs of this store, so none of these is passed over for it.
        """
        try:
            if self.status(record.run_id) == record.status != "KILLED":
                return False
        except MissingInput:
            pass  # of no store so far
        place = f"{self._place.location(record.experiment)}/{record.run_id}/artifacts"
        with self._writing() as client:
            put_row(client, record, self.experiment_id(record.experiment), place)
            put_record(client, record, {**self._own(), **({"sequence": "0" * 12} if older else {})})
            self.db.begun(record.run_id)
        with self.db.told():
            fill()
        with self._writing() as client:
            client.set_terminated(record.run_id, record.status, end_time=record.ended_ms)
        self.db.ended(record.run_id)
        return True

    def stand_ins(self, run_id: str) -> list[str]:
        """Finished runs with the same fingerprint that were made to take the place of this one, newest first."""
        mine = self._run(run_id).tags.get("fingerprint")
        same = {STANDS_FOR: run_id, "fingerprint": mine or ""}
        return [info.run_id for info in self._search(status="FINISHED", tags=same)] if mine else []

    def trace(self, run_id: str, episodes: Mapping[str, Span]) -> int:
        """Write episodes, by their ids, as traces of the run, where it has none of them yet; how many there were."""
        with self.db.told():
            return mlflow_traces.add(
                self._client, self.uri, self.experiment_id(self.experiment(run_id)), run_id, episodes
            )

    def drop(self, run_id: str, wanted: Callable[[], bool]) -> bool:
        """Delete the run's weights, and mark the run; False where it is `wanted` after all (`artifacts.drop`)."""
        with self.db.told():
            done = super().drop(run_id, wanted)
        if done:
            self.tag(run_id, "dropped", "weights")  # for MLflow's page: the file beside them decides
        return done

    def tags(self, run_id: str) -> Mapping[str, str]:
        return self._run(run_id).tags

    def metrics(self, run_id: str) -> Mapping[str, float]:
        """Last value of each metric."""
        return self._run(run_id).metrics

    def status(self, run_id: str) -> str:
        """RUNNING, FINISHED, FAILED or KILLED."""
        return self._run(run_id).status

    def info(self, run_id: str) -> RunInfo:
        return self._run(run_id)

    def experiment(self, run_id: str) -> str:
        """Name of the run's experiment, which is its stage."""
        return self._folder(run_id).parts[-3]

    def runs(self, experiment: str, limit: int = 10**9) -> list[RunInfo]:
        """The newest runs of an experiment, newest first; empty where there is no such experiment."""
        return self._search(experiment=experiment, limit=limit)

    def shards(self, experiment: str, of: str) -> list[RunInfo]:
        """Runs of the experiment that were made for the fingerprint `of`, newest first."""
        return self._search(experiment=experiment, tags={"shard_of": of})

    def remove(self, run_id: str) -> None:
        """Delete a run and all of its artifacts."""
        folder = self._brought(run_id)
        with self._writing() as client:
            client.delete_run(run_id)
        self._place.remove(folder, artifacts.files_of(folder))
        self._finished.discard(run_id)

    def children(self, parent: str) -> list[RunInfo]:
        """Runs nested under a pipeline run, newest first."""
        return self._search(tags={"mlflow.parentRunId": parent})

    def finished_runs(self) -> list[str]:
        """Ids of all finished runs, for `Replay.verify`."""
        return search.run_ids(self.db, status="FINISHED")

    def reading(self, run_id: str, experiment: str) -> list[tuple[str, bool | None]]:
        """Finished runs of the experiment, newest first, and whether they read this run; None: their file says it."""
        return search.reading(self.db, run_id, experiment)

    def find(self, prefix: str) -> str:
        """The one run whose id starts with `prefix`. Raises UsageError where there is none, or several."""
        if not prefix or not prefix.isalnum():
            raise UsageError(f"a run id or the start of one was wanted, found {prefix!r}. See: turnwise runs")
        found = [info.run_id for info in self._search(prefix=prefix.lower(), limit=3)]
        if not found:
            raise UsageError(f"no run starts with {prefix!r} in {self._where}. See: turnwise runs")
        if len(found) > 1:
            raise UsageError(
                f"{prefix!r} is the start of several runs ({', '.join(run[:12] for run in found)}): give more characters"
            )
        return found[0]

    def running(self) -> list[RunInfo]:
        """Open runs, newest first; a run stays open after its process died, until `reap`."""
        return self._search(status="RUNNING")

    def working(self, fingerprint: str, experiment: str) -> RunInfo | None:
        """The newest open run with that fingerprint."""
        same = self._search(experiment=experiment, status="RUNNING", tags={"fingerprint": fingerprint}, limit=1)
        return next(iter(same), None)

    def reap(self) -> list[str]:
        """Mark as KILLED the RUNNING runs whose process is known to be gone; returns their ids."""
        open_runs = self.running()
        gone = self.db.dead([info.tags for info in open_runs])
        dead = [info.run_id for info, is_gone in zip(open_runs, gone, strict=True) if is_gone]
        for run_id in dead:
            self.finish(run_id, "KILLED", "its process is gone")
        return dead

    def _search(self, **wanted: Any) -> list[RunInfo]:
        """As `search.search`."""
        return [self._noted(*found) for found in search.search(self.db, **wanted)]

    def experiment_id(self, name: str) -> str:
        if name not in self._experiments:
            with self._writing() as client:
                self._experiments[name] = experiment_of(
                    client, name, self._place.location(name), shared=self._shared is not None
                )
        return self._experiments[name]

    def _run(self, run_id: str) -> RunInfo:
        if not (found := search.load(self.db, [run_id])):
            raise MissingInput(f"run {run_id} was wanted, but {self.db} has no such run. See: turnwise runs")
        return self._noted(*found[0])

    def _folder(self, run_id: str) -> Path:
        if run_id not in self._folders:
            self._run(run_id)
        return self._folders[run_id]

    def _noted(self, info: RunInfo, uri: str) -> RunInfo:
        """Remember what never changes of a run."""
        self._folders[info.run_id] = artifacts.folder_of(self._place.root, uri)
        if info.status == "FINISHED":
            self._finished.add(info.run_id)
        return info


def _database(shared: Shared) -> Database:
    from stages.store.postgres import Postgres

    return Postgres(shared.uri)
