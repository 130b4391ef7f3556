"""The chain of stages: who is handed what, what is reused, what a kill leaves, which adapter is the final one."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from fakes import Stages

from flows import pipeline, presets, rerun, telling
from flows.orchestration.launch import Launcher, launch_run
from flows.registry import read_weights
from flows.report import Display
from stages.frame.types import EngineUnavailable, UsageError
from stages.store.workspace import StageRun, Workspace, silent
from turnwise.commands.dry_run import plan

NLAC = ["collect", "targets", "critic", "refine", "distill", "evaluate"]


def go(workspace: Workspace, **values: Any) -> telling.Summary:
    run = presets.resolve({"preset": "test", "iterations": 2, **values})
    return pipeline.run_pipeline(run, workspace, lambda parent: pipeline.plain_step(workspace, silent, parent))


def test_stages_run_in_the_order_of_the_method(workspace: Workspace, stages: Stages) -> None:
    go(workspace)
    assert stages.calls == [
        ("evaluate", -1),
        ("evaluate", -1),
        *((name, i) for i in (0, 1) for name in NLAC),
        ("evaluate", 1),
    ]


def test_each_stage_is_handed_the_runs_that_nlac_prescribes(workspace: Workspace, stages: Stages) -> None:
    runs = [row["runs"] for row in go(workspace, iterations=3).iterations[1:]]
    first, second, third = runs
    assert stages.inputs["collect", 0] == {}
    assert stages.inputs["targets", 0] == {"collect": [first["collect"]]}
    assert stages.inputs["critic", 0] == {"targets": [first["targets"]], "collect": [first["collect"]]}
    assert stages.inputs["collect", 2] == {"distill": [second["distill"]]}
    assert stages.inputs["targets", 2] == {
        "collect": [one["collect"] for one in runs], "critic": [first["critic"], second["critic"]], "distill": [second["distill"]],
    }  # fmt: skip
    assert stages.inputs["critic", 2] == {
        "targets": [third["targets"]], "collect": [one["collect"] for one in runs], "refine": [second["refine"]],
        "distill": [second["distill"]],
    }  # fmt: skip
    assert stages.inputs["refine", 2] == {
        "collect": [one["collect"] for one in runs],
        "critic": [one["critic"] for one in runs],
    }
    assert stages.inputs["distill", 2] == {
        "refine": [third["refine"]],
        "targets": [third["targets"]],
        "critic": [third["critic"]],
    }


def test_of_several_sweeps_the_first_plays_the_last_improves_and_in_each_the_critic_goes_on_from_the_one_before(
    workspace: Workspace, stages: Stages
) -> None:
    stages.win_rates |= {3: 0.6, 4: 0.6}
    runs = [row["runs"] for row in go(workspace, iterations=5, sweeps=2).iterations[1:]]
    swept, improving = ["targets", "critic"], ["targets", "critic", "refine", "distill", "evaluate"]
    assert [list(one) for one in runs] == [
        ["collect", *swept],
        improving,
        ["collect", *swept],
        improving,
        ["collect", *improving],
    ]
    first, second, third, fourth, _ = runs
    assert "critic" not in stages.inputs["critic", 0] and "critic" not in stages.inputs["targets", 0]
    assert stages.inputs["targets", 1] == {"collect": [first["collect"]], "critic": [first["critic"]]}
    assert stages.inputs["critic", 1] == {
        "targets": [second["targets"]], "collect": [first["collect"]], "critic": [first["critic"]],
    }  # fmt: skip
    assert stages.inputs["distill", 1]["critic"] == [second["critic"]]
    assert stages.inputs["targets", 2]["distill"] == stages.inputs["critic", 2]["distill"] == [second["distill"]]
    assert "critic" not in stages.inputs["critic", 2]
    assert "distill" not in stages.inputs["targets", 3] and stages.inputs["critic", 3]["critic"] == [third["critic"]]
    assert read_weights("targets", stages.inputs["targets", 3]) == [third["critic"]]
    assert read_weights("targets", stages.inputs["targets", 2]) == [second["distill"]]
    assert stages.inputs["collect", 4] == {"distill": [fourth["distill"]]}


def test_evaluations_are_counted_in_rounds_of_sweeps() -> None:
    run = presets.resolve({"iterations": 9, "sweeps": 2, "evaluate_every": 2})
    assert [i for i in range(9) if "evaluate" in pipeline.stages_of(i, run)] == [3, 7, 8]


def test_without_a_successor_the_policy_is_refined_and_distilled_from_its_last_weights(
    workspace: Workspace, stages: Stages
) -> None:
    first, second = [row["runs"] for row in go(workspace, method="hindsight").iterations[1:]]
    assert list(second) == ["collect", "refine", "distill", "evaluate"]
    assert stages.inputs["refine", 1] == {
        "collect": [first["collect"], second["collect"]], "distill": [first["distill"]],
    }  # fmt: skip
    assert stages.inputs["distill", 1] == {"refine": [second["refine"]], "distill": [first["distill"]]}
    assert stages.inputs["distill", 0] == {"refine": [first["refine"]]}


def test_by_rollouts_a_method_picks_with_the_weights_of_its_last_distill(workspace: Workspace, stages: Stages) -> None:
    first, second = [row["runs"] for row in go(workspace, method="nlrl").iterations[1:]]
    assert list(second) == ["collect", "pick", "distill", "evaluate"]
    collects = [first["collect"], second["collect"]]
    assert stages.inputs["pick", 1] == {"collect": collects, "distill": [first["distill"]]}
    assert stages.inputs["distill", 1] == {"pick": [second["pick"]], "distill": [first["distill"]]}


def test_a_method_that_picks_hands_on_what_nlac_s_refine_would(workspace: Workspace, stages: Stages) -> None:
    first, second = [row["runs"] for row in go(workspace, method="nlql").iterations[1:]]
    assert list(second) == ["collect", "targets", "critic", "pick", "distill", "evaluate"]
    collects = [first["collect"], second["collect"]]
    assert stages.inputs["pick", 1] == {"collect": collects, "critic": [first["critic"], second["critic"]]}
    assert stages.inputs["critic", 1] == {
        "targets": [second["targets"]], "collect": collects, "pick": [first["pick"]], "distill": [first["distill"]],
    }  # fmt: skip
    assert stages.inputs["distill", 1] == {
        "pick": [second["pick"]], "targets": [second["targets"]], "critic": [second["critic"]],
    }  # fmt: skip


@pytest.mark.parametrize("method", ["rft", "grpo", "sdpo"])
def test_a_baseline_acts_with_the_adapter_that_it_made(workspace: Workspace, stages: Stages, method: str) -> None:
    first, second = [row["runs"] for row in go(workspace, method=method).iterations[1:]]
    assert set(first) == {"collect", method, "evaluate"}
    assert stages.inputs["collect", 1] == {method: [first[method]]}
    assert stages.inputs["evaluate", 1] == {method: [second[method]]}


def test_the_final_adapter_is_the_earliest_best_on_validation_and_is_judged_on_test(
    workspace: Workspace, stages: Stages
) -> None:
    summary = go(workspace, iterations=3)  # win rates .3, .5, .5
    best = summary.iterations[2]["runs"]
    assert summary.final["iteration"] == 1
    assert summary.final["adapter"] == best["distill"]
    assert stages.splits == [
        ("test", -1),
        ("validation", -1),
        ("validation", 0),
        ("validation", 1),
        ("validation", 2),
        ("test", 1),
    ]
    assert stages.inputs["evaluate", 1] == {"distill": [best["distill"]], "critic": [best["critic"]]}


def test_the_summary_has_the_documented_shape(workspace: Workspace, stages: Stages) -> None:
    summary = dataclasses.asdict(go(workspace))
    assert {"run_id", "preset", "status", "seconds", "base", "final", "iterations", "match"} == set(summary)
    assert (summary["preset"], summary["status"]) == ("test", "FINISHED")
    assert (summary["base"]["win_rate"], summary["final"]["win_rate"]) == (0.1, 0.5)
    assert [(row["iteration"], row["win_rate"]) for row in summary["iterations"]] == [(-1, 0.1), (0, 0.3), (1, 0.5)]
    assert rerun.stored_summary(workspace, summary["run_id"]) == json.loads(json.dumps(summary))


def test_the_parent_run_has_the_curves(workspace: Workspace, stages: Stages) -> None:
    run_id = go(workspace).run_id
    for name in ("evaluate/win_rate", "agent/win_rate"):
        curve = workspace.tracking._client.get_metric_history(run_id, name)
        assert [(point.step, point.value) for point in curve] == [(0, 0.1), (1, 0.3), (2, 0.5)]
    metrics = workspace.tracking.metrics(run_id)
    assert metrics["final/win_rate"] == 0.5
    assert metrics["pipeline/episodes"] == 2 * 5 * 4  # of both iterations' learning stages, evaluation left out
    totals = {
        point.step: point.value for point in workspace.tracking._client.get_metric_history(run_id, "pipeline/stages_s")
    }
    assert totals[0] == 0 < totals[1]


def test_missing_data_of_any_split_is_told_before_anything_runs(workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"id": "a", "problem": "1 + 1", "answer": "2", "level": 1}\n')
    run = presets.load("tiny", ["task.env=math", f'task.options={{path="{tmp_path}"}}', "evaluate.split=train"])
    with Display(quiet=True) as display, pytest.raises(UsageError, match=r"test\.jsonl"):
        launch_run(run, workspace, Launcher(workspace.home, None), display, sets=[])
    assert not workspace.tracking.runs("pipeline", 10)


def test_the_same_run_again_reuses_every_stage(workspace: Workspace, stages: Stages) -> None:
    first = go(workspace)
    stages.calls.clear()
    second = go(workspace)
    assert stages.calls == []
    assert [row["runs"] for row in second.iterations] == [row["runs"] for row in first.iterations]
    assert second.final == first.final


def test_more_iterations_continue_a_finished_run(workspace: Workspace, stages: Stages) -> None:
    go(workspace)
    stages.calls.clear()
    go(workspace, iterations=3)
    assert stages.calls == [(name, 2) for name in NLAC]  # the best adapter is still iteration 1's, so the final stays


def test_another_seed_shares_nothing(workspace: Workspace, stages: Stages) -> None:
    go(workspace)
    before = len(stages.calls)
    go(workspace, seed=1)
    assert len(stages.calls) == 2 * before


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), "KILLED"), (EngineUnavailable("down"), "FAILED")])
@pytest.mark.parametrize("stage", NLAC)
def test_a_run_that_died_in_any_stage_goes_on_from_the_last_finished_one(
    workspace: Workspace, stages: Stages, stage: str, error: BaseException, status: str
) -> None:
    stages.raises[stage, 1] = error
    with pytest.raises(type(error)):
        go(workspace)
    (died,) = workspace.tracking.runs("pipeline", 5)
    assert died.status == status
    assert [row["iteration"] for row in rerun.stored_summary(workspace, died.run_id)["iterations"]] == [-1, 0]
    stages.calls.clear()
    summary = go(workspace)
    assert stages.calls == [(name, 1) for name in NLAC[NLAC.index(stage) :]] + [("evaluate", 1)]
    assert summary.final["win_rate"] == 0.5


def test_evaluations_can_be_rarer_but_the_last_iteration_has_one(workspace: Workspace, stages: Stages) -> None:
    summary = go(workspace, iterations=3, evaluate_every=2)
    assert [row["win_rate"] for row in summary.iterations] == [0.1, None, 0.5, 0.5]


def test_no_iterations_leave_only_the_base(workspace: Workspace, stages: Stages) -> None:
    summary = go(workspace, iterations=0)
    assert summary.final == {}
    assert summary.base["win_rate"] == 0.1


def test_a_plan_runs_nothing_and_tells_what_would_be_reused(workspace: Workspace, stages: Stages) -> None:
    config = presets.resolve({"preset": "test", "iterations": 2})
    assert [one["reuse"] for one in plan(config, workspace)] == [None] * 15
    assert stages.calls == []
    go(workspace)
    assert all(one["reuse"] for one in plan(config, workspace))
    assert not any(one["reuse"] for one in plan(config, workspace, force=True))


def test_a_changed_key_is_planned_from_its_stage_on(workspace: Workspace, stages: Stages) -> None:
    go(workspace)
    planned = plan(presets.resolve({"preset": "test", "iterations": 2}, ["critic.lr=0.5"]), workspace)
    assert [(one["stage"], one["iteration"]) for one in planned if one["reuse"]] == [
        ("evaluate", -1), ("evaluate", -1), ("collect", 0), ("targets", 0),
    ]  # fmt: skip


def again(
    workspace: Workspace, stage: str, of: str, *sets: str, force: bool = False, iteration: int | None = None
) -> tuple[rerun.Rerun, StageRun]:
    prepared = rerun.prepare(stage, of, workspace, sets=sets, iteration=iteration)
    return prepared, pipeline.plain_step(workspace, silent, force=force, tags=prepared.tags)(prepared.call)


def test_a_rerun_reads_the_stored_inputs_and_links_to_the_old_run(workspace: Workspace, stages: Stages) -> None:
    summary = go(workspace)
    stages.calls.clear()
    prepared, done = again(workspace, "critic", summary.run_id[:10], "critic.lr=0.5")
    old = summary.iterations[2]["runs"]
    assert stages.calls == [("critic", 1)]
    assert prepared.old == old["critic"]
    assert stages.inputs["critic", 1]["targets"] == [old["targets"]]
    assert workspace.tracking.tags(done.run_id)["rerun_of"] == old["critic"]
    assert done.metrics["critic/lr"] == 0.5
    assert len(workspace.tracking.runs("collect", 10)) == 2
    assert workspace.tracking.metrics(old["critic"])["critic/lr"] == 0.1


def test_a_rerun_can_name_an_iteration_or_the_stage_run_itself(workspace: Workspace, stages: Stages) -> None:
    summary = go(workspace)
    first = summary.iterations[1]["runs"]["critic"]
    assert rerun.prepare("critic", summary.run_id, workspace, iteration=0).old == first
    assert rerun.prepare("critic", first, workspace).old == first


def test_a_forced_rerun_of_the_same_config_has_the_same_fingerprint(workspace: Workspace, stages: Stages) -> None:
    summary = go(workspace)
    prepared, done = again(workspace, "critic", summary.run_id, force=True)
    assert not done.reused
    assert workspace.tracking.tags(done.run_id)["fingerprint"] == workspace.tracking.tags(prepared.old)["fingerprint"]


@pytest.mark.parametrize(
    ("stage", "of", "sets", "told"),
    [
        ("critc", "pipeline", [], "did you mean 'critic'"),
        ("critic", "collect", [], "wanted a pipeline run or a run of critic"),
        ("critic", "pipeline", ["collect.lr=1"], "does not read 'collect'"),
        ("critic", "pipeline", ["critic.lrr=1"], "did you mean 'lr'"),
        ("rft", "pipeline", [], "no finished iteration"),
        ("critic", "ffffffffff", [], "no run starts with"),
    ],
)
def test_a_rerun_that_cannot_be_is_told_in_a_sentence(
    workspace: Workspace, stages: Stages, stage: str, of: str, sets: list[str], told: str
) -> None:
    summary = go(workspace)
    names = {"pipeline": summary.run_id, "collect": summary.iterations[1]["runs"]["collect"]}
    with pytest.raises(UsageError, match=told):
        rerun.prepare(stage, names.get(of, of), workspace, sets=sets)


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"evaluate/malformed_frac": 0.97}, "base: 97% of the policy's replies could not be read"),
        ({"collect/malformed_frac": 0.6, "evaluate/malformed_frac": 0.1}, "base: 60% of the policy's replies"),
        (
            {"refine/states": 16.0, "refine/rows": 0.0, "refine/dropped": 16.0},
            "base: nothing to distil: refine could read .* in any of 16 states",
        ),
        ({"refine/states": 16.0, "refine/rows": 0.0, "refine/dropped": 4.0}, ""),  # a pleased critic
        ({"refine/rows": 0.0}, ""),  # a warm-up
        ({"collect/malformed_frac": 0.5, "refine/states": 16.0, "refine/rows": 3.0, "refine/dropped": 13.0}, ""),
    ],
)
def test_what_is_lost_without_an_error_is_told_beside_the_table(
    metrics: dict[str, float], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Display() as display:
        display.row(telling.Iteration(-1, {}, metrics, 1.0))
    found = " ".join(capsys.readouterr().err.split())
    assert re.match(told, found) if told else not found
