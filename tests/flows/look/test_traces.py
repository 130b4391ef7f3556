"""`turnwise traces`: what of a run's episodes stands in MLflow's traces; none is made twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import viewing
from mlflow.entities import Trace
from viewing import Viewed, turnwise

from mlflow import MlflowClient
from stages.store.tracking import Tracking


@pytest.fixture(scope="module")
def viewed(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Viewed:
    return viewing.new_viewed(tmp_path_factory.mktemp("traced"), empty_store)


def stored(viewed: Viewed, run: str) -> dict[str, Trace]:
    """Episode id -> its trace."""
    tracking = Tracking(viewed.home / "mlflow")
    client = MlflowClient(tracking.uri)
    found = client.search_traces(locations=[tracking.experiment_id("pipeline")], run_id=viewed.runs[run])
    return {str(trace.info.tags["turnwise.episode"]): trace for trace in found}


def below(trace: Trace, span: Any) -> list[Any]:
    return [one for one in trace.data.spans if one.parent_id == span.span_id]


def test_an_episode_is_a_trace_with_its_turns_and_what_the_critic_said_of_them(
    viewed: Viewed, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = turnwise(capsys, viewed, "traces", viewed.runs["a"], "--json")
    told = json.loads(out)
    assert (status, told["new"]) == (0, told["episodes"])
    status, out = turnwise(capsys, viewed, "view", viewed.runs["a"], "--json")
    data = viewing.data_of(Path(json.loads(out)["file"]).read_text())
    shown = {one["id"]: one for one in data["episodes"]}
    found = stored(viewed, "a")
    assert found.keys() == shown.keys() and len(found) == told["episodes"]
    judged = 0
    for name, episode in shown.items():
        (root,) = [span for span in found[name].data.spans if span.parent_id is None]
        assert root.outputs["result"] == episode["result"] and root.outputs["reward"] == episode["reward"]
        assert root.inputs["messages"] == episode["opening"]
        turns = below(found[name], root)
        assert [span.outputs["text"] for span in turns] == [turn["text"] for turn in episode["turns"]]
        for span, turn in zip(turns, episode["turns"], strict=True):
            assert root.start_time_ns <= span.start_time_ns <= span.end_time_ns <= root.end_time_ns
            said = below(found[name], span)
            verdicts = [one.outputs["verdict"] for one in said if one.span_type == "EVALUATOR"]
            assert verdicts == [one["verdict"] for one in turn["judgements"]]
            judged += len(verdicts)
    assert judged >= 3


def test_traces_are_made_once_and_those_that_are_missing_later(
    viewed: Viewed, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "1 episodes of run" in turnwise(capsys, viewed, "traces", viewed.runs["b"], "--episodes", "1")[1]
    before = {name: trace.info.trace_id for name, trace in stored(viewed, "b").items()}
    status, out = turnwise(capsys, viewed, "traces", viewed.runs["b"], "--json")
    told = json.loads(out)
    assert (status, len(before), told["new"]) == (0, 1, told["episodes"] - 1)
    after = {name: trace.info.trace_id for name, trace in stored(viewed, "b").items()}
    assert before.items() <= after.items() and len(after) == told["episodes"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("a/collect",), "traces: wanted a pipeline run, found"),
        (("a", "--episodes", "0"), "--episodes 0: wanted 1 or more."),
    ],
)
def test_what_cannot_be_traced_is_one_sentence(
    argv: tuple[str, ...], said: str, viewed: Viewed, capsys: pytest.CaptureFixture[str]
) -> None:
    status, err = turnwise(capsys, viewed, "traces", *(viewed.runs.get(one, one) for one in argv))
    assert status == 2 and said in err and err.count("\n") == 1
