"""`turnwise rerun STAGE --of RUN --through LAST` and `--downstream`: a pipeline run of its own that shares the old
one's start.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from branching import NLAC, Turnwise, finished_run, old, runs_of, turnwise
from fakes import Stages

from stages.store.tracking import Tracking

__all__ = ["finished_run", "old", "turnwise"]  # fixtures


def titles(planned: Any, *, reused: bool) -> list[tuple[str, int | None]]:
    return [(one["stage"], one["iteration"]) for one in planned["stages"] if bool(one["reuse"]) is reused]


def branch(turnwise: Turnwise, old: Any, stage: str, *options: str) -> Any:
    return turnwise("rerun", stage, "--of", old["run_id"], *options)


def test_through_evaluate_runs_the_stage_and_what_follows_in_its_iteration(
    turnwise: Turnwise, stages: Stages, old: Any
) -> None:
    stages.win_rates[1] = 0.9
    new = branch(turnwise, old, "critic", "--iteration", "1", "--set", "critic.lr=0.5", "--through", "evaluate")
    assert stages.calls == [(name, 1) for name in NLAC[2:]] + [("evaluate", 1)]  # the last one on the test split
    assert runs_of(new, 0) == runs_of(old, 0)
    shared = {name for name, run_id in runs_of(new, 1).items() if run_id == runs_of(old, 1)[name]}
    assert shared == {"collect", "targets"}
    assert stages.inputs["critic", 1]["targets"] == [runs_of(old, 1)["targets"]]
    assert [row["win_rate"] for row in new["iterations"]] == [0.1, 0.3, 0.9]
    assert (new["rerun_of"], new["base"], new["final"]["iteration"]) == (old["run_id"], old["base"], 1)
    assert [(row["what"], row["old"]["win_rate"], row["new"]["win_rate"]) for row in new["compared"]] == [
        ("iteration 1", 0.5, 0.9), ("final, test", 0.5, 0.9),
    ]  # fmt: skip


def test_downstream_runs_later_iterations_too_and_the_change_holds_in_all_of_them(
    turnwise: Turnwise, stages: Stages, old: Any
) -> None:
    new = branch(turnwise, old, "critic", "--iteration", "1", "--set", "critic.lr=0.5", "--downstream")
    assert stages.calls[:-1] == [(name, 1) for name in NLAC[2:]] + [(name, 2) for name in NLAC]
    assert [row["metrics"].get("critic/lr") for row in new["iterations"]] == [None, 0.1, 0.5, 0.5]
    assert [row["metrics"].get("distill/lr") for row in new["iterations"]] == [None, 0.1, 0.1, 0.1]
    assert [row["what"] for row in new["compared"]] == ["iteration 1", "iteration 2", "final, test"]


@pytest.mark.parametrize("stage", NLAC)
@pytest.mark.parametrize("first", ["branch", "run"])
def test_downstream_from_the_first_iteration_is_the_run_that_had_the_change_from_the_start(
    turnwise: Turnwise, stages: Stages, old: Any, stage: str, first: str
) -> None:
    """Fingerprints are equal, so whichever comes second reuses every stage of the other."""
    change = ("--set", f"{stage}.lr=0.5")
    commands = {
        "branch": ("rerun", stage, "--of", old["run_id"], "--iteration", "0", *change, "--downstream"),
        "run": ("run", "preset.toml", *change),
    }
    made = {name: turnwise(*commands[name]) for name in sorted(commands, key=lambda name: name != first)}
    second = next(name for name in commands if name != first)
    before = [("evaluate", -1)] * 2 if (stage, second) == ("evaluate", "run") else []
    assert stages.calls == before
    assert made["branch"]["iterations"][1:] == [{**row, "reused": ours["reused"]} for row, ours in _pairs(made)]
    assert made["branch"]["final"] == made["run"]["final"]


def _pairs(made: dict[str, Any]) -> list[tuple[Any, Any]]:
    return list(zip(made["run"]["iterations"][1:], made["branch"]["iterations"][1:], strict=True))


def test_a_change_of_a_shared_section_holds_for_the_named_stage_alone(
    turnwise: Turnwise, stages: Stages, old: Any, home: Path
) -> None:
    new = branch(turnwise, old, "refine", "--set", "roles.max_future_tokens=7", "--through", "evaluate")
    tracking = Tracking(home / "mlflow")
    configs = {
        name: json.loads(tracking.artifact(run_id, "config.json").read_text())["config"]
        for name, run_id in runs_of(new, 2).items()
    }
    assert {name for name, config in configs.items() if config["roles"]["max_future_tokens"] == 7} == {"refine"}
    assert stages.calls == [("refine", 2), ("distill", 2), ("evaluate", 2)]  # the best adapter is still iteration 1's


def test_through_another_stage_ends_there_and_compares_its_metrics(
    turnwise: Turnwise, stages: Stages, old: Any
) -> None:
    new = branch(turnwise, old, "critic", "--set", "critic.lr=0.5", "--through", "refine")
    assert stages.calls == [("critic", 2), ("refine", 2)]
    assert (set(runs_of(new, 2)), new["final"], new["status"]) == (
        {"collect", "targets", "critic", "refine"},
        {},
        "FINISHED",
    )
    (row,) = new["compared"]
    assert (row["what"], row["old"], row["new"]) == ("refine 2", row["new"], {"refine/episodes": 4.0, "refine/lr": 0.1})
    status, _, err = turnwise("export", new["run_id"], "out", "--what", "adapter", raw=True)
    assert (status, "ends before an evaluation" in err) == (1, True)


@pytest.mark.parametrize("extent", [("--through", "evaluate"), ("--downstream",)])
@pytest.mark.parametrize("killed", ["critic", "distill", "evaluate"])
def test_a_killed_one_goes_on_with_the_same_command(
    turnwise: Turnwise, stages: Stages, old: Any, killed: str, extent: tuple[str, ...]
) -> None:
    command = ("rerun", "critic", "--of", old["run_id"], "--iteration", "1", "--set", "critic.lr=0.5", *extent)
    stages.raises[killed, 1] = KeyboardInterrupt()
    status, out, err = turnwise(*command, raw=True)
    assert (status, out) == (1, "")
    assert "the same command goes on" in err
    done = [name for name, _ in stages.calls]
    assert done == NLAC[2 : NLAC.index(killed)]
    new = turnwise(*command)
    assert [name for name, i in stages.calls if i == 1][: len(NLAC) - NLAC.index(killed)] == NLAC[NLAC.index(killed) :]
    assert new["status"] == "FINISHED"
    assert turnwise(*command)["final"] == new["final"]
    assert stages.calls == []


def test_a_dry_run_tells_what_would_run_and_runs_nothing(turnwise: Turnwise, stages: Stages, old: Any) -> None:
    command = ("rerun", "critic", "--of", old["run_id"], "--iteration", "1", "--set", "critic.lr=0.5")
    planned = turnwise(*command, "--downstream", "--dry-run")
    assert stages.calls == []
    assert planned["config"]["critic"]["lr"] == 0.5
    kept = [("evaluate", -1), ("evaluate", -1), *((name, 0) for name in NLAC), ("collect", 1), ("targets", 1)]
    assert titles(planned, reused=True) == kept
    assert titles(planned, reused=False) == [
        *((name, 1) for name in NLAC[2:]),
        *((name, 2) for name in NLAC),
        ("evaluate", None),
    ]
    told = turnwise(*command, "--through", "critic", "--dry-run", raw=True)[1]
    assert told.endswith("1 of 11 stages would run, 10 would be reused. To do it, leave out --dry-run.\n")
    turnwise(*command, "--downstream")
    assert titles(turnwise(*command, "--downstream", "--dry-run"), reused=False) == []
    forced = titles(turnwise(*command, "--downstream", "--dry-run", "--force"), reused=True)
    assert forced == kept


def test_a_finished_rerun_of_the_stage_is_taken_over_with_its_change(
    turnwise: Turnwise, stages: Stages, old: Any
) -> None:
    critic = turnwise("rerun", "critic", "--of", old["run_id"], "--set", "critic.lr=0.5")
    status, _, err = turnwise("rerun", "evaluate", "--of", critic["run_id"], raw=True)
    short = critic["run_id"][:8]
    assert (status, err.endswith(f"found a rerun of critic, and evaluate needs what comes between. Run: turnwise rerun critic --of {short} "
                                 "--through evaluate\n")) == (2, True)  # fmt: skip
    new = turnwise("rerun", "critic", "--of", short, "--through", "evaluate")
    assert stages.calls == [(name, 2) for name in NLAC[3:]]  # the critic itself is there already
    assert (new["rerun_of"], runs_of(new, 2)["critic"]) == (old["run_id"], critic["run_id"])


def test_old_stages_are_kept_even_if_the_code_would_now_make_others(
    turnwise: Turnwise, stages: Stages, old: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys
    from dataclasses import replace

    for name in NLAC:
        module = sys.modules[f"fake_{name}"]
        monkeypatch.setattr(module, "STAGE", replace(module.STAGE, version=2))
    new = branch(turnwise, old, "critic", "--set", "critic.lr=0.5", "--through", "evaluate")
    assert [runs_of(new, i) == runs_of(old, i) for i in range(3)] == [True, True, False]
    assert stages.calls == [(name, 2) for name in NLAC[2:]] + [("evaluate", 1)]


def test_one_branch_leaves_another_and_keeps_its_configs(turnwise: Turnwise, stages: Stages, old: Any) -> None:
    first = branch(turnwise, old, "critic", "--iteration", "1", "--set", "critic.lr=0.5", "--downstream")
    second = branch(turnwise, first, "refine", "--iteration", "0", "--set", "refine.lr=0.7", "--downstream")
    assert [row["metrics"]["critic/lr"] for row in second["iterations"][1:]] == [0.1, 0.5, 0.5]
    assert [row["metrics"]["refine/lr"] for row in second["iterations"][1:]] == [0.7, 0.7, 0.7]
    assert runs_of(second, 0)["critic"] == runs_of(old, 0)["critic"]


def test_it_is_a_pipeline_run_like_any_other(turnwise: Turnwise, stages: Stages, old: Any, home: Path) -> None:
    new = branch(turnwise, old, "critic", "--set", "critic.lr=0.5", "--downstream")
    run_id, tracking = new["run_id"], Tracking(home / "mlflow")
    assert [row["run_id"] for row in turnwise("runs")] == [run_id, old["run_id"]]
    summary = {key: value for key, value in new.items() if key not in ("rerun_of", "compared")}
    assert turnwise("show", run_id) == summary
    shown = turnwise("show", run_id, raw=True)[1]
    assert (
        f"stages before critic 2 are those of run {old['run_id'][:8]}; changed from there on: critic.lr 0.1 -> 0.5"
        in shown
    )
    turnwise("export", run_id, "out", "--what", "adapter")
    assert (
        home / "out" / "weights"
    ).read_text() == "distill 1 0.1"  # of the old run's second iteration, the best still
    assert (
        turnwise("rerun", "distill", "--of", run_id, "--set", "distill.lr=0.2")["rerun_of"]
        == runs_of(new, 2)["distill"]
    )
    curves = [
        [(point.step, point.value) for point in tracking._client.get_metric_history(one, "evaluate/win_rate")]
        for one in (old["run_id"], run_id)
    ]
    assert curves[0] == curves[1] == [(0, 0.1), (1, 0.3), (2, 0.5), (3, 0.5)]
    tags = tracking.tags(run_id)
    assert [tags[key] for key in ("rerun_of", "rerun_from", "changed", "seed")] == [
        old["run_id"],
        "critic 2",
        "critic.lr 0.1 -> 0.5",
        "0",
    ]
    assert tracking.info(run_id).name != tracking.info(old["run_id"]).name
    assert json.loads(tracking.artifact(run_id, "config.json").read_text())["critic"]["lr"] == 0.5


def test_the_end_says_how_old_and_new_compare(turnwise: Turnwise, stages: Stages, old: Any) -> None:
    stages.win_rates[2] = 0.8
    status, out, _ = turnwise(
        "rerun", "distill", "--of", old["run_id"], "--set", "distill.lr=0.5", "--downstream", raw=True
    )
    assert status == 0
    assert (
        "iteration 2         0.50 (0.40-0.60)    0.80 (0.70-0.90)\nfinal, test         0.50 (0.40-0.60)    0.80 (0.70-0.90)\n"
        in out
    )


def test_a_run_that_was_killed_is_branched_at_what_it_finished_and_run_to_its_end(
    turnwise: Turnwise, stages: Stages
) -> None:
    stages.raises["refine", 1] = KeyboardInterrupt()
    turnwise("run", "preset.toml", raw=True)
    (killed,) = turnwise("runs")
    new = turnwise("rerun", "critic", "--of", killed["run_id"], "--set", "critic.lr=0.5", "--downstream")
    assert stages.calls[0] == ("critic", 0)
    assert [row["metrics"]["critic/lr"] for row in new["iterations"][1:]] == [0.5, 0.5, 0.5]
    assert [row["old"].get("win_rate") for row in new["compared"]] == [0.3, None, None, None]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ["critic", "--through", "targets"],
            "--through targets: wanted critic or a stage that follows it, one of critic, refine, distill, evaluate.",
        ),
        (["critic", "--through", "evaluat"], "--through evaluat: wanted critic or a stage that follows it"),
        (["critic", "--downstream", "--set", "distill.lr=1"], "critic does not read 'distill'"),
        (["critic", "--downstream", "--iteration", "7"], "no finished iteration 7"),
        (["grpo", "--downstream"], "no finished iteration with the stage grpo"),
        (["critic", "--downstream", "--through", "evaluate"], "not allowed with argument"),
    ],
)
def test_what_cannot_be_is_told_in_a_sentence(
    turnwise: Turnwise, stages: Stages, old: Any, argv: list[str], told: str
) -> None:
    status, out, err = turnwise("rerun", *argv, "--of", old["run_id"], raw=True)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert told in err
    assert stages.calls == []


def test_the_evaluation_of_the_base_model_begins_no_branch(turnwise: Turnwise, old: Any) -> None:
    for run_id in (old["base"]["run_id"], old["iterations"][0]["runs"]["evaluate"], old["final"]["run_id"]):
        status, _, err = turnwise("rerun", "evaluate", "--of", run_id, "--downstream", raw=True)
        assert (status, "wanted a run of evaluate in a finished iteration of a pipeline run" in err) == (2, True)
