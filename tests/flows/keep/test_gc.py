"""`turnwise gc`: what is kept, what is deleted, and that everything deleted comes back where it is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import RUN, Commands, Ended, stage_runs
from fakes import WEIGHTS, Stages, fake_stages

from flows import presets
from flows.keep.garbage import delete, survey
from flows.orchestration.launch import Launcher, launch_rerun, launch_run
from flows.registry import METHODS, READS, WIRING
from flows.report import Display
from flows.rerun import prepare
from flows.telling import Summary
from stages.frame.types import Dropped
from stages.store.stage_context import Inputs
from stages.store.workspace import Workspace
from turnwise import cli

RATES = {-1: 0.1, 0: 0.3, 1: 0.9, 2: 0.5, 3: 0.5, 4: 0.5, 5: 0.5}


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stages]:
    with fake_stages(monkeypatch) as found:
        found.win_rates = RATES  # iteration 1 has the best adapter
        yield found


def go(workspace: Workspace, **values: Any) -> Summary:
    run = presets.resolve({"preset": "test", "iterations": 5, **values})
    return launch_run(run, workspace, Launcher(workspace.home, None), Display(quiet=True), sets=[])


def collected(workspace: Workspace, keep: int = 2) -> list[str]:
    """Deletes; titles of the runs whose weights went."""
    return [f"{one.stage} {one.iteration}" for one in delete(workspace, survey(workspace, keep))]


def runs_of(summary: Summary) -> dict[str, str]:
    return {f"{s} {row['iteration']}": run for row in summary.iterations for s, run in row["runs"].items()}


def test_the_newest_iterations_what_they_read_and_the_chosen_one_are_kept(workspace: Workspace, stages: Stages) -> None:
    go(workspace)
    why = {f"{one.stage} {one.iteration}": one.why for one in survey(workspace, 2)}
    assert why == {
        "critic 0": "", "distill 0": "", "critic 2": "",
        "critic 1": "of the chosen adapter's iteration", "distill 1": "of the chosen adapter's iteration",
        "distill 2": "a kept iteration reads them",
        **{f"{stage} {i}": "of the newest iterations" for stage in ("critic", "distill") for i in (3, 4)},
    }  # fmt: skip
    assert [one.run_id for one in survey(workspace, 5) if not one.why] == []


def test_only_weights_are_deleted_and_only_with_yes(
    workspace: Workspace, stages: Stages, capsys: pytest.CaptureFixture[str]
) -> None:
    go(workspace)
    files = {path for path in workspace.home.rglob("*") if path.is_file() and "artifacts" in path.parts}
    assert cli.main(["gc", "--home", str(workspace.home)]) == 0
    shown = capsys.readouterr().out
    assert "To do it: turnwise gc --keep 2 --yes" in shown
    assert {path for path in files if path.is_file()} == files
    assert cli.main(["gc", "--home", str(workspace.home), "--yes", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    gone = {path for path in files if not path.is_file()}
    assert {path.name for path in gone} == {WEIGHTS} and len(gone) == 3
    assert [one["stage"] for one in told["runs"] if one["dropped"]] == ["critic", "distill", "critic"]
    assert told["freed_bytes"] > 0 and told["kept_bytes"] > 0 and told["deleted"]
    assert cli.main(["gc", "--home", str(workspace.home), "--yes"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("freed 0.0 MB of 0 runs")
    assert cli.main(["gc", "--home", str(workspace.home), "--keep", "0"]) == 2


def test_more_iterations_reuse_what_was_dropped(workspace: Workspace, stages: Stages) -> None:
    before = runs_of(go(workspace))
    assert collected(workspace) == ["critic 0", "distill 0", "critic 2"]
    stages.calls.clear()
    after = runs_of(go(workspace, iterations=6))
    assert stages.calls == [(name, 5) for name in (*METHODS["nlac"], "evaluate")]
    assert {title: run for title, run in after.items() if not title.endswith(" 5")} == before


def test_a_stage_that_reads_dropped_weights_has_them_made_again(workspace: Workspace, stages: Stages) -> None:
    """A changed distill from the start on: critic 0, which it reads, is made once more; later ones are new anyway."""
    before = runs_of(go(workspace))
    old = workspace.tracking.artifact(before["critic 0"], "adapter") / WEIGHTS
    text = old.read_text()
    collected(workspace)
    with pytest.raises(Dropped, match="turnwise rerun critic --of"):
        workspace.tracking.artifact(before["critic 0"], "adapter")
    stages.calls.clear()
    after = runs_of(go(workspace, distill={"lr": 0.5}))
    assert after["critic 0"] == before["critic 0"] and after["distill 0"] != before["distill 0"]
    assert stages.calls[:3] == [("critic", 0), ("distill", 0), ("evaluate", 0)]
    assert stages.calls.count(("critic", 0)) == 1
    again = workspace.tracking.artifact(before["critic 0"], "adapter") / WEIGHTS
    assert again != old and again.read_text() == text
    (stand_in,) = workspace.tracking.stand_ins(before["critic 0"])
    assert collected(workspace, keep=5) == []
    assert not workspace.tracking.is_dropped(stand_in)  # critic 0 is of the newest five


def test_what_is_needed_is_made_again_as_far_back_as_it_was_dropped(workspace: Workspace, stages: Stages) -> None:
    stages.win_rates = {**RATES, 1: 0.2, 4: 0.9}
    before = go(workspace)
    runs = runs_of(before)
    assert collected(workspace, keep=1) == [
        *("critic 0", "distill 0", "critic 1", "distill 1", "critic 2", "distill 2"), "critic 3"
    ]  # fmt: skip
    stages.calls.clear()
    again = prepare("refine", before.run_id, workspace, sets=["refine.lr=0.7"], iteration=2)
    launch_rerun(again, workspace, Launcher(workspace.home, None), Display(quiet=True), sets=[], force=False)
    assert stages.calls == [
        ("critic", 0), ("distill", 0), ("critic", 1), ("distill", 1), ("critic", 2), ("refine", 2)
    ]  # fmt: skip
    assert all(workspace.tracking.tags(run)["stands_for"] in runs.values() for run in [
        one for title in ("critic 0", "distill 1", "critic 2") for one in workspace.tracking.stand_ins(runs[title])
    ])  # fmt: skip
    stages.calls.clear()
    go(workspace)
    assert stages.calls == []  # a stand-in changes no id, so nothing follows from it
    assert collected(workspace, keep=1) == [
        *("critic 0", "distill 0", "critic 1", "distill 1", "critic 2")
    ]  # fmt: skip


def test_a_rerun_of_the_run_itself_stands_in_for_it(workspace: Workspace, stages: Stages) -> None:
    """As the sentence says; and weights that would be others now are not passed off as the old ones."""
    runs = runs_of(go(workspace))
    collected(workspace)
    again = prepare("critic", runs["critic 0"], workspace)
    assert again.replaces and not prepare("critic", runs["critic 0"], workspace, sets=["critic.lr=0.7"]).replaces
    launch_rerun(again, workspace, Launcher(workspace.home, None), Display(quiet=True), sets=[], force=True)
    assert workspace.tracking.artifact(runs["critic 0"], "adapter").is_dir()


def test_what_runs_keeps_what_it_reads_and_the_best_so_far(workspace: Workspace, stages: Stages) -> None:
    runs, tracking = runs_of(go(workspace)), workspace.tracking
    reading = tracking.start("distill", "d", {"inputs": json.dumps({"critic": [runs["critic 0"]]})})
    assert collected(workspace) == ["distill 0", "critic 2"]
    tracking.finish(reading)
    going, rates, made = tracking.start("pipeline", "p", {}), (0.7, 0.2, 0.7, None), []
    for i in range(len(rates)):
        made.append(tracking.start("critic", f"critic {i}", {"pipeline": going, "iteration": str(i)}))
        (workspace.home / "a").mkdir(exist_ok=True)
        (workspace.home / "a" / WEIGHTS).write_text(str(i))
        tracking.save(made[-1], workspace.home / "a", "adapter")
        tracking.finish(made[-1])
    rows = [
        {"iteration": i, "win_rate": rate, "runs": {"critic": one}}
        for i, (rate, one) in enumerate(zip(rates, made, strict=True))
    ]
    tracking.write_json(going, "summary.json", {"iterations": rows, "final": {}})
    gone = {one.run_id for one in delete(workspace, survey(workspace, 2))}
    assert gone == {runs["critic 0"], made[1]}  # of the running one not the newest two, nor the best so far
    tracking.finish(going, "KILLED")  # what it needs to go on is its newest, and in the end the best
    assert collected(workspace) == []


def test_reads_are_inputs_and_every_stage_of_a_method_has_them() -> None:
    assert set(READS) == {"evaluate", *(stage for chain in METHODS.values() for stage in chain)}
    for stage, upstream in READS.items():
        assert set(upstream) <= set(WIRING[stage])
        for name in upstream:
            # "all" of those that read the newest critic's weights and every one's priorities.
            newest = {
                ("refine", "critic"),
                ("pick", "critic"),
                ("pick", "q_critic"),
                ("targets", "critic"),
                ("q_critic", "q_critic"),
            }
            assert WIRING[stage][name] in ("last", "newest") or (stage, name) in newest


@pytest.mark.slow
def test_the_real_stages_read_the_weights_that_the_table_names(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[tuple[str, str]] = set()
    real = Inputs.artifact

    def artifact(self: Inputs, run_id: str, path: str) -> Path:
        found = real(self, run_id, path)
        read.add((self.stage, self.workspace.tracking.experiment(run_id)))
        return found

    monkeypatch.setattr(Inputs, "artifact", artifact)
    assert cli.main([*RUN, "--quiet", "--home", str(fresh)]) == 0
    said = {
        (stage, name)
        for stage, names in READS.items()
        for name in names
        if {stage, name} <= {"evaluate", *METHODS["nlac"]}
    }
    # What other methods and further sweeps read in its place.
    assert read == said - {("targets", "critic"), ("critic", "critic"), ("refine", "distill"), ("distill", "distill")}


@pytest.mark.slow
def test_real_weights_come_back_to_the_bit(finished: Ended, command: Commands) -> None:
    runs, home = stage_runs(finished.done.json), finished.home
    files = {title: [*home.rglob(f"{run}/artifacts/*/*.safetensors")] for title, run in runs.items()}
    bits = {title: {file.parent.name: file.read_bytes() for file in found} for title, found in files.items()}
    summary = next(home.glob("mlflow/artifacts/pipeline/*/artifacts/summary.json"))
    told = json.loads(summary.read_text())
    summary.write_text(json.dumps({**told, "final": {**told["final"], "iteration": 1}}))  # whichever was better
    done = command(home, "gc", "--keep", "1", "--yes", "--json")
    gone = [f"{one['stage']} {one['iteration']}" for one in done.json["runs"] if one["dropped"]]
    assert gone == ["critic 0"]
    again = command(home, "rerun", "distill", "--of", runs["distill 0"], "--plain", "--json", "--quiet")
    assert again.status == 0, again.err
    stand_in = [path for path in (home / "mlflow" / "artifacts" / "critic").iterdir() if path.name not in runs.values()]
    assert len(stand_in) == 1
    for name, content in bits["critic 0"].items():
        assert (stand_in[0] / "artifacts" / name / "adapter_model.safetensors").read_bytes() == content


def test_weights_of_a_run_that_never_finished_go_and_of_a_rerun_stay(workspace: Workspace) -> None:
    (workspace.home / "a").mkdir()
    (workspace.home / "a" / WEIGHTS).write_text("x")
    made = {}
    for status in ("FAILED", "KILLED", "FINISHED", "RUNNING"):
        made[status] = workspace.tracking.start("distill", status, {"iteration": "0"})
        workspace.tracking.save(made[status], workspace.home / "a", "adapter")
        if status != "RUNNING":
            workspace.tracking.finish(made[status], status)  # type: ignore[arg-type]
    why = {one.run_id: one.why for one in survey(workspace, 1)}
    assert why == {
        made["FAILED"]: "",
        made["KILLED"]: "",
        made["FINISHED"]: "of no pipeline run",
        made["RUNNING"]: "it runs",
    }
