"""Reports that a deployment's run failed: posts one JSON to the address in the environment variable TURNWISE_ALERT_URL.

    {"project": "desk", "flow": "turnwise", "flow_run": "nightly", "page": "http://...", "run": "3f9c...", "stage": "critic 3",
     "error": "..."}

`run` is MLflow's run id, null if the run failed before it began. The address is written nowhere, because it often holds
a key. The receiver cannot change the run's result.
"""

from __future__ import annotations

import json
import os
import threading
import urllib.request
from collections.abc import Mapping
from typing import Any

from flows.book import EXPERIMENT
from stages.store.runs import without_password
from stages.store.workspace import Workspace

URL = "TURNWISE_ALERT_URL"
TIMEOUT_S = 10.0  # for all of it: a receiver may also send its answer byte by byte
PREFECT_RUN = "prefect_run"  # tag of a pipeline run: the flow run that made it


def failure(flow_run_id: str, error: str, workspace: Workspace) -> dict[str, Any]:
    """Where a flow run failed: its pipeline run and the failed stage. error: one sentence."""
    runs = workspace.tracking.runs(EXPERIMENT, 100)
    run = next((one for one in runs if one.tags.get(PREFECT_RUN) == flow_run_id), None)
    stages = workspace.tracking.children(run.run_id) if run else []
    failed = next((one.tags for one in stages if one.status != "FINISHED"), None)
    stage = f"{failed['stage']} {failed['iteration']}" if failed else None
    return {"run": run.run_id if run else None, "stage": stage, "error": without_password(error)}


def send(message: Mapping[str, Any]) -> str:
    """Post the message to TURNWISE_ALERT_URL. Returns the outcome in a sentence, "" if no address is set."""
    url = os.environ.get(URL)
    if not url:
        return ""
    said = [f"The alert got no answer within {TIMEOUT_S:.0f} s ({URL})."]

    def post() -> None:
        try:
            body, kind = json.dumps(message).encode(), {"Content-Type": "application/json"}
            request = urllib.request.Request(url, data=body, headers=kind)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                said[0] = f"The alert was sent ({answer.status})."
        except Exception as error:  # nothing that a receiver does may change what becomes of the run
            # The error's text may hold the address.
            said[0] = f"The alert could not be sent ({type(error).__name__}; see {URL})."

    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return said[0]
