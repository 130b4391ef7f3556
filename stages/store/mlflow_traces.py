"""Episodes as traces of a run: a span for each episode, below it one for each turn, then one for each role asked."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

EPISODE = "turnwise.episode"  # tag of a trace: the episode's id
SOME = 1000  # traces that are looked at, to see which episodes have one


@dataclass(frozen=True)
class Span:
    """A piece of an episode. start_s and end_s: seconds since the epoch. kind: MLflow's type of it, such as AGENT or LLM."""

    name: str
    kind: str
    start_s: float
    end_s: float
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    below: Sequence[Span] = ()


def add(client: MlflowClient, uri: str, experiment_id: str, run_id: str, episodes: Mapping[str, Span]) -> int:
    """Write the episodes, by their ids, that have no trace of this run yet; how many there were."""
    import mlflow

    before = client.search_traces(locations=[experiment_id], run_id=run_id, max_results=SOME, include_spans=False)
    known = {trace.info.tags.get(EPISODE) for trace in before}
    # Else its exporter says, as Python ends, that it has nothing left to do.
    logging.getLogger("mlflow.tracing.export").setLevel(logging.WARNING)
    mlflow.set_tracking_uri(uri)  # traces leave by MLflow's own thread, which knows this address alone
    made = [_trace(client, experiment_id, run_id, name, span) for name, span in episodes.items() if name not in known]
    mlflow.flush_trace_async_logging()
    if made:
        client.link_traces_to_run(made, run_id)
    return len(made)


def _trace(client: MlflowClient, experiment_id: str, run_id: str, episode_id: str, span: Span) -> str:
    root = client.start_trace(
        span.name, span.kind, dict(span.inputs), {key: str(value) for key, value in span.attributes.items()},
        {EPISODE: episode_id}, experiment_id, _ns(span.start_s),
    )  # fmt: skip
    for one in span.below:
        _below(client, root, one)
    client.end_trace(root.trace_id, dict(span.outputs), end_time_ns=_ns(span.end_s))
    return str(root.trace_id)


def _below(client: MlflowClient, parent: Any, span: Span) -> None:
    made = client.start_span(
        span.name, parent.trace_id, parent.span_id, span.kind, dict(span.inputs), dict(span.attributes),
        _ns(span.start_s),
    )  # fmt: skip
    for one in span.below:
        _below(client, made, one)
    client.end_span(parent.trace_id, made.span_id, dict(span.outputs), end_time_ns=_ns(span.end_s))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
