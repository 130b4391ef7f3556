"""MLflow's database: made completely or not at all, upgraded once, opened with its migrations checked.

One that machines share is never upgraded from here: the others may have an older MLflow.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from stages.frame.types import UsageError
from stages.store import sqlite
from stages.store.database import Database
from stages.store.machine import first_line
from stages.store.sqlite import SqliteFile

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


def connect(db: Database) -> MlflowClient:
    """To be called by one process at a time. Raises UsageError where its MLflow is another one."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing leaves the machine unasked
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are told in our own sentence
    from mlflow.exceptions import MlflowException

    if isinstance(db, SqliteFile):
        if not db.exists():
            _create(db.path)
        sqlite.check(db.path)
    try:
        client = _client(db.uri)
        client.search_experiments(max_results=1)
    except MlflowException as error:
        if "out-of-date database schema" not in str(error):
            raise
        if not isinstance(db, SqliteFile):
            raise _of_another(db, error) from error
        _upgrade(db.path)
        client = _client(db.uri)
    return client


def _of_another(db: Database, error: Exception) -> UsageError:
    found = first_line(error).partition(". Take")[0]
    return UsageError(
        f"the store {db} was wanted, but another version of MLflow made it ({found}). Install the same MLflow on all "
        "machines; for a newer one, stop all runs, make a backup and run: mlflow db upgrade URI"
    )


def _client(uri: str) -> MlflowClient:
    from mlflow.tracking import MlflowClient

    return MlflowClient(uri, registry_uri=uri)  # else MLFLOW_REGISTRY_URI would put our models elsewhere


def _create(db: Path) -> None:
    """Make the store under another name first: MLflow's migrations, killed halfway, leave a file that never opens."""
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

    unfinished = db.with_suffix(".part")
    for leftover in db.parent.glob(f"{unfinished.name}*"):
        leftover.unlink()
    sqlite.check(unfinished)
    engine = create_sqlalchemy_engine(f"sqlite:///{unfinished}")
    _initialize_tables(engine)
    engine.dispose()  # the last connection to close takes the write-ahead log into the file
    unfinished.replace(db)


def _upgrade(db: Path) -> None:
    from alembic.util import CommandError
    from mlflow.store.db.utils import _upgrade_db, create_sqlalchemy_engine

    backup = sqlite.copy(db, db.with_suffix(".before-upgrade.db"))
    try:
        _upgrade_db(create_sqlalchemy_engine(f"sqlite:///{db}"))
    except CommandError as error:
        backup.unlink()
        found = f"it was written by a newer MLflow than the one installed ({first_line(error)})"
        raise UsageError(
            f"the store {db} was wanted, but {found}. Install the newer one, or use another folder"
        ) from error


def experiment_of(client: MlflowClient, name: str, location: str, *, shared: bool) -> str:
    """Id of the experiment, made where there is none. shared: all must keep their artifacts in one place, or UsageError."""
    from mlflow.exceptions import MlflowException

    known = client.get_experiment_by_name(name)
    if known is None:
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            known = client.get_experiment_by_name(name)  # another process was quicker
            assert known is not None
    if shared and known.artifact_location.rstrip("/") != location:
        raise UsageError(
            f"turnwise.toml: artifacts: this store keeps those of {name} at {known.artifact_location}, but {location} "
            "was given. Give all machines the same place, or another database"
        )
    if known.lifecycle_stage == "deleted":  # on MLflow's page; its runs stay deleted, new ones need it back
        client.restore_experiment(known.experiment_id)
    return str(known.experiment_id)
