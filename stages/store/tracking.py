"""Runs, their metrics and their artifacts: the only module that imports MLflow.

One run a stage execution, one experiment a stage, a parent run a pipeline. The store is SQLite in WAL mode, so that
readers never wait for a writer; artifacts are plain files under `root/artifacts/<experiment>/<run id>/artifacts`.
A moved project folder still resumes and reruns; only MLflow's page then misses the artifacts of older runs, because it
holds absolute locations (stages/store/artifacts.py).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stages.frame.types import Dropped, MissingInput, UsageError
from stages.store import artifacts, models, sqlite
from stages.store.machine import is_dead, process_tags
from stages.store.mlflow_db import connect, experiment_of
from stages.store.mlflow_run import Record, put_record, put_row, read_record
from stages.store.runs import NOTE, STANDS_FOR, RunInfo, ScenarioSet, clip, clipped, hidden, run_info, shown
from stages.store.sqlite import told

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

Status = Literal["FINISHED", "FAILED", "KILLED"]

STORE_LOCK_TIMEOUT_S = 600.0  # a first creation takes up to a minute on a busy machine, and others may queue before us
PAGE = 1000  # runs asked for at once
# A clock may be set back, so runs are numbered as they start; runs of an older turnwise have no number and come last,
# by their clock.
NEWEST_FIRST = ["tags.sequence DESC", "attributes.start_time DESC"]


class Tracking:
    """The MLflow store in `root`. Nothing is opened or imported before the first use, and only what writes creates it:
    a reader finds no runs.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root).absolute()
        self.db = self.root / "mlflow.db"
        self._experiments: dict[str, str] = {}  # name -> id
        self._folders: dict[str, Path] = {}  # run id -> artifact folder
        self._finished: set[str] = set()  # a finished run stays finished

    @property
    def uri(self) -> str:
        """The store as MLflow names it, for `mlflow ui --backend-store-uri`."""
        return f"sqlite:///{self.db}"

    @cached_property
    def _client(self) -> MlflowClient:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing leaves the machine unasked
        with told(self.db), sqlite.exclusive(self.db, STORE_LOCK_TIMEOUT_S):
            return connect(self.db)

    def initialise(self) -> None:
        """Create the store, or upgrade one of an older MLflow; safe when several processes start at once."""
        _ = self._client

    def start(self, experiment: str, name: str, tags: Mapping[str, str], parent: str | None = None) -> str:
        """Open a run and return its id. Host, pid and process start are added, so that `reap` can tell a dead run, and
        its number.
        """
        own = hidden(process_tags()) | ({"mlflow.parentRunId": parent} if parent else {})
        with told(self.db):
            own["sequence"] = f"{self._last_sequence() + 1:012d}"
            return self._noted(
                self._client.create_run(self.experiment_id(experiment), tags=clipped({**tags, **own}), run_name=name)
            )

    def finished(self, fingerprint: str, experiment: str | None = None) -> str | None:
        """Newest FINISHED run with that fingerprint, in one experiment (quicker) or in all."""
        wanted = f"attributes.status = 'FINISHED' and tags.fingerprint = '{fingerprint}'"
        if not self.db.exists():
            return None
        with told(self.db):
            ids = [self.experiment_id(experiment)] if experiment else self._all_experiments()
            found = self._client.search_runs(ids, wanted, max_results=PAGE, order_by=NEWEST_FIRST)
        # One that stands in for another has the other's results under a new id: what follows would be made again.
        return next((self._noted(run) for run in found if STANDS_FOR not in run.data.tags), None)

    def is_finished(self, run_id: str) -> bool:
        """Whether the run ended well, which alone makes its rows and artifacts readable. False for an unknown id."""
        try:
            return run_id in self._finished or self.status(run_id) == "FINISHED"
        except MissingInput:
            return False

    def finish(self, run_id: str, status: Status = "FINISHED", error: str = "") -> None:
        """End a run; `error` is kept as its tag `error`."""
        with told(self.db):
            if error:
                self._client.set_tag(run_id, "error", clip(error))
            self._client.set_terminated(run_id, status)
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
        points += [
            Metric(key, float(value), now, at) for key, values in curves.items() for at, value in enumerate(values)
        ]
        pairs = [Param(key, value) for key, value in clipped(params).items()]
        with told(self.db):
            while points or pairs:
                self._client.log_batch(run_id, metrics=points[:900], params=pairs[:100])
                points, pairs = points[900:], pairs[100:]

    def log(self, run_id: str, metrics: Mapping[str, float], step: int = 0) -> None:
        """One value of each metric at `step`."""
        self.record(run_id, metrics=metrics, step=step)

    def params(self, run_id: str, params: Mapping[str, Any]) -> None:
        self.record(run_id, params=params)

    def tag(self, run_id: str, key: str, value: str) -> None:
        with told(self.db):
            self._client.set_tag(run_id, key, clip(value))

    def note(self, run_id: str, text: str) -> None:
        """Put a text in Markdown in the place of the run's description."""
        self.tag(run_id, NOTE, text)

    def link(self, experiment: str, run_id: str) -> str:
        """The run's page, relative to MLflow's own."""
        return f"#/experiments/{self.experiment_id(experiment)}/runs/{run_id}"

    def reads(self, run_id: str, sets: Sequence[ScenarioSet]) -> None:
        """Name the scenarios that a run reads, as its datasets."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = [
            DatasetInput(
                Dataset(
                    one.name,
                    one.digest,
                    "code",
                    clip(json.dumps({"tags": one.source})),
                    profile=json.dumps({"num_rows": one.rows}),
                ),
                [InputTag("mlflow.data.context", one.role)],
            )
            for one in sets
        ]
        with told(self.db):
            self._client.log_inputs(run_id, inputs)

    def register(
        self, name: str, run_id: str, adapter: tuple[str, str], *, figures: Mapping[str, Any], note: str = ""
    ) -> models.Version:
        """A version of the registered model `name`: the adapter that is an artifact (run id, path), found by the run
        `run_id`.
        """
        source = str(self.artifact(*adapter))
        with told(self.db), sqlite.exclusive(self.db, STORE_LOCK_TIMEOUT_S):
            return models.register(self._client, name, source, run_id, clipped(figures), clip(note))

    def champion(self, name: str) -> models.Version | None:
        """The champion among the versions of the registered model; None where there is none. Raises UsageError where no
        run of turnwise registered it.
        """
        if not self.db.exists():
            return None
        with told(self.db):
            found = models.aliased(self._client, name, models.CHAMPION)
        if found and not {"run", "pipeline", "iteration"} <= found.tags.keys():
            raise UsageError(
                f"The champion of {name}, version {found.number}, was not registered by a run; give the alias champion to another version."
            )
        return found

    def candidate(self, version: models.Version) -> None:
        """Name the version the candidate of its model."""
        with told(self.db):
            models.name_alias(self._client, version, models.CANDIDATE)

    def decide(
        self, candidate: models.Version, against: int | None, verdict: Mapping[str, Any] | None
    ) -> dict[str, Any] | None:
        """What is decided of a candidate, once: `models.decide`."""
        with told(self.db), sqlite.exclusive(self.db, STORE_LOCK_TIMEOUT_S):
            return models.decide(self._client, candidate, against, verdict)

    def save(self, run_id: str, local: Path, artifact_path: str) -> None:
        """Copy a file or folder to be the run's artifact of that name."""
        artifacts.save(self._folder(run_id), local, artifact_path)

    def write_json(self, run_id: str, artifact_path: str, value: Any) -> None:
        """Write a value as a JSON artifact."""
        artifacts.write_json(self._folder(run_id), artifact_path, value)

    def artifact(self, run_id: str, path: str) -> Path:
        """Where the run's artifact lies, or that of the run that stands in for it since its weights were dropped;
        nothing is copied. Raises MissingInput, and Dropped where there is no such run.
        """
        try:
            return artifacts.existing(self._folder(run_id), path)
        except Dropped:
            for stand_in in self.stand_ins(run_id):
                if not artifacts.dropped(self._folder(stand_in)):
                    return artifacts.existing(self._folder(stand_in), path)
            raise

    def read_json(self, run_id: str, path: str) -> Any:
        """The value of a JSON artifact. Raises as `artifact`, and Changed where it is no JSON."""
        return artifacts.read_json(self.artifact(run_id, path))

    def record_of(self, run_id: str) -> Record:
        """A run that has ended, to be put into another store. Raises UsageError for one that has not."""
        if self.status(run_id) == "RUNNING":
            raise UsageError(
                f"run {run_id[:8]} is still running, and what it leaves is not known yet. Wait until it has ended"
            )
        with told(self.db):
            return read_record(self._client, run_id, self.experiment(run_id))

    def adopt(self, record: Record, fill: Callable[[], None]) -> bool:
        """Put a run of another store here, under its own id; False where it is here already. fill: brings its artifacts
        and rows, before the run ends as it did there: a kill in between leaves a run that nobody reads, and the same
        call goes on.
        """
        try:
            if self.status(record.run_id) == record.status != "KILLED":
                return False
        except MissingInput:
            pass  # of no store so far
        with told(self.db):
            folder = self.root / "artifacts" / record.experiment / record.run_id / "artifacts"
            put_row(self._client, record, self.experiment_id(record.experiment), str(folder))
            put_record(self._client, record, f"{self._last_sequence() + 1:012d}")
            fill()
            self._client.set_terminated(record.run_id, record.status, end_time=record.ended_ms)
        return True

    def stand_ins(self, run_id: str) -> list[str]:
        """Finished runs with the same fingerprint that were made to take the place of this one, newest first."""
        same = f"attributes.status = 'FINISHED' and tags.{STANDS_FOR} = '{run_id}' and tags.fingerprint = "
        mine = self._run(run_id).data.tags.get("fingerprint")
        return [info.run_id for info in self._search(None, f"{same}'{mine}'", None)] if mine else []

    def seal(self, run_id: str) -> None:
        """Keep the hash of each of the run's artifacts: what is read later is held against it."""
        artifacts.seal(self._folder(run_id))

    def changed(self, run_id: str) -> list[str]:
        """The run's artifacts that are not what was written."""
        return artifacts.changed(self._folder(run_id))

    def weights(self, run_id: str) -> dict[str, int]:
        """Bytes of each file of weights that the run has, by its artifact path."""
        return artifacts.weights(self._folder(run_id))

    def is_dropped(self, run_id: str) -> bool:
        return bool(artifacts.dropped(self._folder(run_id)))

    def drop(self, run_id: str, wanted: Callable[[], bool]) -> bool:
        """Delete the run's weights, and mark the run; False where it is `wanted` after all (`artifacts.drop`)."""
        with told(self.db):
            done = artifacts.drop(self._folder(run_id), self.weights(run_id), wanted)
            if done:
                self._client.set_tag(run_id, "dropped", "weights")  # for MLflow's page: the file beside them decides
        return done

    def registered(self) -> set[str]:
        """Ids of the runs whose adapter is a version of a registered model."""
        if not self.db.exists():
            return set()
        with told(self.db):
            return models.sources(self._client)

    def tags(self, run_id: str) -> dict[str, str]:
        return shown(self._run(run_id).data.tags)

    def metrics(self, run_id: str) -> dict[str, float]:
        """Last value of each metric."""
        return dict(self._run(run_id).data.metrics)

    def status(self, run_id: str) -> str:
        """RUNNING, FINISHED, FAILED or KILLED."""
        return str(self._run(run_id).info.status)

    def info(self, run_id: str) -> RunInfo:
        return run_info(self._run(run_id))

    def experiment(self, run_id: str) -> str:
        """Name of the run's experiment, which is its stage."""
        return self._folder(run_id).parts[-3]

    def runs(self, experiment: str, limit: int) -> list[RunInfo]:
        """The newest runs of an experiment, newest first; empty where there is no such experiment."""
        if not self.db.exists():
            return []
        with told(self.db):
            known = self._client.get_experiment_by_name(experiment)
        return [] if known is None else self._search([known.experiment_id], "", limit)

    def children(self, parent: str) -> list[RunInfo]:
        """Runs nested under a pipeline run, newest first."""
        return self._search(None, f"tags.mlflow.parentRunId = '{parent}'", None)

    def finished_runs(self) -> list[str]:
        """Ids of all finished runs, for `Replay.verify`."""
        return [info.run_id for info in self._search(None, "attributes.status = 'FINISHED'", None)]

    def find(self, prefix: str) -> str:
        """The one run whose id starts with `prefix`. Raises UsageError where there is none, or several."""
        if not prefix or not prefix.isalnum():
            raise UsageError(f"a run id or the start of one was wanted, found {prefix!r}. See: turnwise runs")
        found = [info.run_id for info in self._search(None, f"attributes.run_id LIKE '{prefix.lower()}%'", 3)]
        if not found:
            raise UsageError(f"no run starts with {prefix!r} in {self.root}. See: turnwise runs")
        if len(found) > 1:
            raise UsageError(
                f"{prefix!r} is the start of several runs ({', '.join(run[:12] for run in found)}): give more characters"
            )
        return found[0]

    def running(self) -> list[RunInfo]:
        """Open runs, newest first; a run stays open after its process died, until `reap`."""
        return self._search(None, "attributes.status = 'RUNNING'", None)

    def working(self, fingerprint: str, experiment: str) -> RunInfo | None:
        """The newest open run with that fingerprint."""
        wanted = f"attributes.status = 'RUNNING' and tags.fingerprint = '{fingerprint}'"
        return next(iter(self._search([self.experiment_id(experiment)], wanted, 1)), None)

    def reap(self) -> list[str]:
        """Mark as KILLED the RUNNING runs of this host whose process is gone; returns their ids."""
        dead = [info.run_id for info in self.running() if is_dead(info.tags)]
        for run_id in dead:
            self.finish(run_id, "KILLED", "its process is gone")
        return dead

    def _search(self, experiments: list[str] | None, wanted: str, limit: int | None) -> list[RunInfo]:
        found: list[RunInfo] = []
        token: str | None = None
        if not self.db.exists():
            return found
        with told(self.db):
            ids = self._all_experiments() if experiments is None else experiments
            while limit is None or len(found) < limit:
                size = PAGE if limit is None else min(PAGE, limit - len(found))
                page = self._client.search_runs(ids, wanted, max_results=size, order_by=NEWEST_FIRST, page_token=token)
                found += [run_info(run) for run in page]
                token = page.token
                if not token:
                    break
        return found

    def _last_sequence(self) -> int:
        """Number of the newest run; 0 where there is none."""
        newest = self._client.search_runs(self._all_experiments(), "", max_results=1, order_by=NEWEST_FIRST)
        return int(newest[0].data.tags.get("sequence", 0)) if newest else 0

    def _all_experiments(self) -> list[str]:
        return [str(experiment.experiment_id) for experiment in self._client.search_experiments()]

    def experiment_id(self, name: str) -> str:
        if name not in self._experiments:
            self._experiments[name] = experiment_of(self._client, name, self.root / "artifacts" / name)
        return self._experiments[name]

    def _run(self, run_id: str) -> Run:
        from mlflow.exceptions import MlflowException

        missing = MissingInput(f"run {run_id} was wanted, but {self.db} has no such run. See: turnwise runs")
        if not self.db.exists():
            raise missing
        with told(self.db):
            try:
                run = self._client.get_run(run_id)
            except MlflowException as error:
                if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                    raise missing from error
                raise
        self._noted(run)
        return run

    def _folder(self, run_id: str) -> Path:
        if run_id not in self._folders:
            self._run(run_id)
        return self._folders[run_id]

    def _noted(self, run: Run) -> str:
        """Remember what never changes of a run; returns its id."""
        run_id = str(run.info.run_id)
        self._folders[run_id] = artifacts.folder_of(self.root / "artifacts", str(run.info.artifact_uri))
        if run.info.status == "FINISHED":
            self._finished.add(run_id)
        return run_id
