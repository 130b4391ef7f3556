"""A shard as a flow, for the workers of a Prefect work pool: the entrypoint `flows/shard.py:shard` of a deployment.

It works in the project folder `home`, which the machine of the worker must have under the same path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow

from flows.shard_worker import make
from flows.shards import FLOW, told


@flow(name=FLOW, persist_result=False, log_prints=True)
def shard(home: str, job: dict[str, Any]) -> None:
    """Make one shard.

    Args:
        home: The project folder.
        job: As the run that wants the shard tells it (`stages.store.shards.Shard`).
    """
    told(make(Path(home), job))
