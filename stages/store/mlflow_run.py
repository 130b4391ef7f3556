"""A run as a value: it moves from one tracking store to another and keeps the id by which others name it.

MLflow would give a new run a new id. So a row is put into its table of runs, and all else goes through its client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from stages.store.machine import process_tags
from stages.store.runs import shown

if TYPE_CHECKING:
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

BATCH = 900  # points at once: MLflow takes 1000 entities, 100 of them params
CONTEXT = "mlflow.data.context"


class ReadSet(BaseModel):
    """A set of scenarios that a run reads, as MLflow keeps it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: str
    name: str
    digest: str
    source_type: str
    source: str
    profile: str


class Record(BaseModel):
    """A run that has ended, without its artifacts and rows. metrics: (name, value, milliseconds since the epoch, step)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str = Field(pattern="^[0-9a-f]{32}$")
    experiment: str
    name: str
    status: Literal["FINISHED", "FAILED", "KILLED"]
    started_ms: int
    ended_ms: int
    tags: dict[str, str]
    params: dict[str, str]
    metrics: list[tuple[str, float, int, int]]
    reads: list[ReadSet]


def read_record(client: MlflowClient, run_id: str, experiment: str) -> Record:
    """All that the store knows of a run that has ended, but for what tells whether its process is dead."""
    from mlflow.store.tracking.dbmodels.models import SqlMetric

    run = client.get_run(run_id)
    with client._tracking_client.store.ManagedSessionMaker() as session:
        found = session.query(SqlMetric).filter(SqlMetric.run_uuid == run_id).order_by(SqlMetric.key, SqlMetric.step)
        points = [(m.key, float("nan") if m.is_nan else m.value, m.timestamp, m.step) for m in found]
    own = {*process_tags(), "sequence", "heartbeat"}
    sets = [(one.dataset, {tag.key: tag.value for tag in one.tags}) for one in run.inputs.dataset_inputs]
    return Record(
        run_id=run_id,
        experiment=experiment,
        name=run.info.run_name,
        status=run.info.status,
        started_ms=run.info.start_time,
        ended_ms=run.info.end_time,
        tags={key: value for key, value in run.data.tags.items() if not own & shown({key: value}).keys()},
        params=run.data.params,
        metrics=points,
        reads=[
            ReadSet(role=tags.get(CONTEXT, ""), name=one.name, digest=one.digest, source_type=one.source_type,
                    source=one.source, profile=one.profile or "")
            for one, tags in sets
        ],
    )  # fmt: skip


def put_row(client: MlflowClient, record: Record, experiment_id: str, artifacts: str) -> None:
    """Open a run under the record's id, or open the one again that a kill left half-written."""
    from mlflow.store.tracking.dbmodels.models import SqlRun

    with client._tracking_client.store.ManagedSessionMaker(read_only=False) as session:
        session.merge(
            SqlRun(
                run_uuid=record.run_id,
                name=record.name,
                experiment_id=int(experiment_id),
                artifact_uri=artifacts,
                status="RUNNING",
                start_time=record.started_ms,
                end_time=None,
                user_id="",
                source_type="UNKNOWN",
                source_name="",
                source_version="",
                entry_point_name="",
                lifecycle_stage="active",
            )
        )


def put_record(client: MlflowClient, record: Record, own: Mapping[str, str]) -> None:
    """Tags, params, metrics and sets of an open run. What is there already is not doubled. own: tags of its new process."""
    from mlflow.entities import Metric, Param, RunTag

    tags = {**record.tags, **own, "mlflow.runName": record.name}
    client.log_batch(record.run_id, tags=[RunTag(key, value) for key, value in tags.items()])
    put_values(
        client,
        record.run_id,
        [Metric(*point) for point in record.metrics],
        [Param(*one) for one in record.params.items()],
    )
    put_sets(client, record.run_id, record.reads)


def put_values(client: MlflowClient, run_id: str, points: list[Metric], pairs: list[Param]) -> None:
    """Metrics and params of an open run, in one transaction where MLflow's limits of a batch allow it."""
    while points or pairs:
        client.log_batch(run_id, metrics=points[:BATCH], params=pairs[:100])
        points, pairs = points[BATCH:], pairs[100:]


def put_sets(client: MlflowClient, run_id: str, sets: Sequence[ReadSet]) -> None:
    """The scenarios that an open run reads, as its datasets."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    client.log_inputs(
        run_id,
        [
            DatasetInput(
                Dataset(one.name, one.digest, one.source_type, one.source, profile=one.profile),
                [InputTag(CONTEXT, one.role)],
            )
            for one in sets
        ],
    )
