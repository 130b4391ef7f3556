"""Reruns with what follows, over the real stages: equal to the run that had the change from the start, killed in every
stage, under Prefect.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from commands import ITERATIONS, NLAC, RUN, TITLES, Commands, Ended, seen, stage_runs, titles_by_status

ROOT = Path(__file__).parents[2]
CHANGE = ("--set", "critic.lr=0.01")  # a hundred times the preset's
LAST = ITERATIONS - 1
# what a critic's change in the last iteration runs, apart from the final evaluation
AGAIN = tuple(f"{name} {LAST}" for name in NLAC[2:])

pytestmark = pytest.mark.slow


def rerun(ended: Ended, iteration: int, extent: str) -> list[str]:
    of = ended.done.json["run_id"]
    return ["rerun", "critic", "--of", of, "--iteration", str(iteration), *CHANGE, *extent.split(), "--plain", "--json"]


def test_downstream_from_the_start_is_byte_for_byte_the_run_that_had_the_change(
    finished: Ended, fresh_copy: Path, command: Commands, undisturbed: Ended
) -> None:
    branch = command(finished.home, *rerun(finished, 0, "--downstream"))
    assert (branch.status, branch.told) == (0, [])
    kept = TITLES[: TITLES.index("critic 0")]
    assert branch.reused == list(kept)
    whole = command(fresh_copy, *RUN, *CHANGE)
    assert (whole.status, whole.reused) == (0, [])
    found, expected = seen(finished.home, branch.json), seen(fresh_copy, whole.json)
    assert {title: found[title] for title in TITLES} == {title: expected[title] for title in TITLES}
    weights = "adapter/adapter_model.safetensors"
    assert found["distill 1"]["files"][weights] != undisturbed.seen["distill 1"]["files"][weights]
    same = command(finished.home, *RUN, *CHANGE)
    assert (same.ran, stage_runs(same.json)) == ([], stage_runs(branch.json))


@pytest.fixture
def fresh_copy(empty_store: Path, base: Path, tmp_path: Path) -> Path:
    """A second project folder, in which nothing was run yet."""
    from commands import make_home

    return make_home(tmp_path / "second", empty_store, base)


def test_one_that_is_killed_in_every_stage_ends_as_one_that_is_not(
    finished: Ended, command: Commands, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(finished.home, tmp_path / "other"))
    argv = rerun(finished, LAST, "--through evaluate")
    killed = [command(finished.home, *argv, title=title, moment="inside", act="kill") for title in AGAIN]
    assert [done.status for done in killed] == [-9] * len(AGAIN)
    done, smooth = command(finished.home, *argv), command(other, *argv)
    n_finished = TITLES.index(AGAIN[-1])
    assert done.reused[:n_finished] == list(TITLES[:n_finished])
    assert (done.ran[0], smooth.ran[: len(AGAIN)]) == (AGAIN[-1], list(AGAIN))
    assert seen(finished.home, done.json) == seen(other, smooth.json)
    assert titles_by_status(finished.home)["KILLED"] == Counter([*AGAIN, *["pipeline"] * len(AGAIN)])
    (row, final) = done.json["compared"]
    assert (row["what"], final["what"]) == (f"iteration {LAST}", "final, test")
    assert row["old"]["win_rate"] == finished.done.json["iterations"][-1]["win_rate"]
    assert row["new"]["win_rate"] == done.json["iterations"][-1]["win_rate"]


UNDER_PREFECT = """
import json, sys
from pathlib import Path
import fakes, pytest
from turnwise import cli
from flows.orchestration import server
home = Path(sys.argv[1])
stop = server.Server.stop
def ask_then_stop(self):
    from flows.orchestration import deployments
    from prefect.client.orchestration import get_client
    deployed = deployments.rerun("refine", old["run_id"], ["refine.lr=0.7"], iteration=0, downstream=True)
    with get_client(sync_client=True) as client:
        flows = {run.id: run for run in client.read_flow_runs()}
        tasks = [(flows[one.flow_run_id].name, one.name, one.state_name) for one in client.read_task_runs()]
        found = {"flows": sorted((run.name, run.state_name) for run in flows.values()), "tasks": tasks, "deployed": deployed}
    (home / "found.json").write_text(json.dumps(found))
    stop(self)
server.Server.stop = ask_then_stop
with pytest.MonkeyPatch.context() as patch, fakes.fake_stages(patch):
    patch.setattr("flows.workspace.model_hash", lambda run: "base")
    patch.setattr("flows.workspace.make_engine", lambda run: None)
    assert cli.main(["run", str(home / "two.toml"), "--home", str(home), "--plain", "--quiet"]) == 0
    from stages.store.tracking import Tracking
    old = {"run_id": Tracking(home / "mlflow").runs("pipeline", 1)[0].run_id}
    again = ["rerun", "critic", "--of", old["run_id"], "--set", "critic.lr=0.5", "--through", "evaluate"]
    sys.exit(cli.main([*again, "--home", str(home), "--quiet"]))
"""


def test_under_prefect_what_runs_again_is_a_flow_of_tasks_from_the_command_and_from_a_deployment(home: Path) -> None:
    (home / "data").mkdir()
    (home / "two.toml").write_text("iterations = 2\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", UNDER_PREFECT, str(home)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "iteration 1         0.50 (0.40-0.60)    0.50 (0.40-0.60)" in done.stdout
    found = json.loads((home / "found.json").read_text())
    (of_command, _), (of_deployment, _) = sorted(found["flows"], key=lambda run: ", rerun critic 1 of " not in run[0])
    assert [state for _, state in found["flows"]] == ["Completed"] * 2
    tasks = {
        flow: Counter(name for run, name, state in found["tasks"] if (run, state) == (flow, "Completed"))
        for flow, _ in found["flows"]
    }
    assert tasks[of_command] == Counter([*AGAIN, "evaluate final"])
    later = [f"{name} {i}" for i in range(2) for name in NLAC]
    assert tasks[of_deployment] == Counter([*later[later.index("refine 0") :], "evaluate final"])
    assert [row["metrics"].get("refine/lr") for row in found["deployed"]["iterations"]] == [None, 0.7, 0.7]
