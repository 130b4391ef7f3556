"""`turnwise study` through real processes, over stages that learn nothing: what is finished is never run again, whatever
became of the study; what its report is made of.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections import Counter
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest
from fake_turnwise import TURNWISE, shell
from waiting import ended as all_ended
from waiting import until

from flows import presets
from flows.evidence.study.elsewhere import recipe
from flows.evidence.study.keep import CURVES, FILES
from flows.workspace import open_workspace
from stages.store import sqlite
from stages.store.tracking import Tracking

pytestmark = pytest.mark.slow

STUDY = """
title = "Two <methods> & a tuning"
seeds = [1, 2]
sets = ["iterations=2"]
[methods.nlac]
preset = "plain.toml"
control = "rft"
[methods.rft]
preset = "plain.toml"
sets = ["method=rft"]
settings = "preset"
[tasks.desk]
[tuning]
seeds = [7]
n = 2
[tuning.space.nlac]
"distill.lr" = [0.1, 0.2]
"""
N_TUNING, N_TABLE = 2, 4
LIMIT_S = 120.0  # of what a busy machine takes for a run of a few stages
GRPO = '[methods.grpo]\npreset = "plain.toml"\nsets = ["method=grpo"]\nsettings = "preset"\n'


def with_study(home: Path) -> Path:
    (home / "plain.toml").write_text("")
    (home / "study.toml").write_text(STUDY)
    return home


@pytest.fixture
def project(home: Path) -> Path:
    return with_study(home)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> tuple[Path, Any]:
    """A project folder with a study that was run once, and what it printed."""
    home = tmp_path_factory.mktemp("ended")
    (home / "mlflow").mkdir()
    sqlite.copy(empty_store, home / "mlflow" / "mlflow.db")
    assert states(with_study(home)) == {"to run": N_TUNING + 2, "to run after its tuning": 2}
    status, found, err = study(home, "--out", "out")
    assert (status, found["reused"], found["missing"]) == (0, False, []), err
    return home, found


def study(project: Path, *more: str, **environment: str) -> tuple[int, Any, str]:
    """Exit status, what it printed as JSON, and stderr."""
    options = shlex.join(["study", "study.toml", "--home", str(project), "--plain", "--json", "--jobs", "2", *more])
    status, out, err = shell(f"{TURNWISE} {options}", project, **environment)
    return status, json.loads(out) if out else None, err


def states(project: Path) -> Counter[str]:
    _, listed, _ = study(project, "--dry-run")
    return Counter(one["state"] for one in listed)


def runs(project: Path, experiment: str = "pipeline") -> list[str]:
    return [info.status for info in Tracking(project / "mlflow").runs(experiment, 1000)]


def rows_of(found: Any) -> list[dict[str, Any]]:
    path = next(Path(name) for name in found["files"] if name.endswith("cells.jsonl"))
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_finished_study_starts_nothing_the_second_time_and_another_method_its_own_cells_alone(
    ended: tuple[Path, Any],
) -> None:
    project, first = ended
    assert runs(project) == ["FINISHED"] * (N_TUNING + N_TABLE)
    assert runs(project, "study") == ["FINISHED"]
    assert states(project) == {"finished": N_TUNING + N_TABLE}

    status, again, err = study(project)
    assert (status, err, again["reused"], again["run_id"]) == (0, "", True, first["run_id"])
    assert len(runs(project)) == N_TUNING + N_TABLE
    assert runs(project, "study") == ["FINISHED"]

    (project / "study.toml").write_text(STUDY.replace("[tasks.desk]", f"{GRPO}[tasks.desk]"))
    status, more, err = study(project)
    assert (status, len(rows_of(more))) == (0, N_TUNING + N_TABLE + 2)
    assert sorted(line.partition(":")[0] for line in err.splitlines()) == [
        "2 runs, 2 at a time", "grpo / desk / seed 1", "grpo / desk / seed 2",
    ]  # fmt: skip
    assert len(runs(project)) == N_TUNING + N_TABLE + 2


def test_a_run_of_the_same_config_by_hand_is_a_cell_and_one_with_another_config_is_none(project: Path) -> None:
    for seed, iterations in ((1, 2), (2, 3)):
        sets = f"--set iterations={iterations} --set method=rft --set seed={seed}"
        assert shell(f"{TURNWISE} run plain.toml --plain --home {project} {sets}", project)[0] == 0
    assert states(project) == {"finished": 1, "to run": N_TUNING + 1, "to run after its tuning": 2}


def killed(project: Path, number: signal.Signals) -> int:
    """Kill a study when one more run of it is finished, see all that it started end, and return its exit status."""
    before = runs(project).count("FINISHED")
    command = [
        *shlex.split(TURNWISE),
        "study",
        "study.toml",
        "--home",
        str(project),
        "--plain",
        "--quiet",
        "--jobs",
        "1",
    ]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    child = subprocess.Popen(command, cwd=project, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert until(lambda: runs(project).count("FINISHED") > before, LIMIT_S)
    below = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(number)
    status = child.wait(LIMIT_S)
    assert until(lambda: all_ended(below))
    return status


def test_a_killed_study_ends_its_runs_and_the_next_one_goes_on(project: Path) -> None:
    assert killed(project, signal.SIGTERM) == 1
    assert killed(project, signal.SIGKILL) == -signal.SIGKILL
    assert 2 <= runs(project).count("FINISHED") < N_TUNING + N_TABLE
    status, found, err = study(project)
    assert (status, len(rows_of(found))) == (0, N_TUNING + N_TABLE), err
    assert runs(project).count("FINISHED") == N_TUNING + N_TABLE  # none was run twice
    assert set(runs(project, "study")) == {"FINISHED", "KILLED"}


def test_a_run_that_fails_is_told_and_the_others_go_on(project: Path) -> None:
    status, found, _ = study(project, FAIL_AT="rft")
    assert status == 1
    assert {row["method"] for row in rows_of(found)} == {"nlac"}
    assert [line.partition(": EngineUnavailable: nobody answers (exit status 1")[0] for line in found["missing"]] == [
        "rft / desk / seed 1", "rft / desk / seed 2",
    ]  # fmt: skip
    assert runs(project, "study") == ["FAILED"]
    page = Path(found["files"][0]).read_text()
    assert "nobody answers" in page


def test_only_some_cells_are_run_and_the_others_are_named_as_missing(project: Path) -> None:
    status, found, _ = study(project, "--only", "rft")
    assert (status, {row["method"] for row in rows_of(found)}) == (0, {"rft"})
    assert found["missing"][-1] == "nlac: not tuned, for want of runs"
    assert study(project, "--only", "rtf/desk")[0] == 2
    before = runs(project)
    status, again, _ = study(project, "--jobs", "0")  # as while another process is at it, or after one was stopped
    assert (status, rows_of(again), runs(project)) == (0, rows_of(found), before)
    status, printed, _ = shell(f"{TURNWISE} study study.toml --home {project} --plain --jobs 0", project)
    last = printed.rstrip().splitlines()[-3:]
    assert (status, last[0]) == (0, "missing: nlac: not tuned, for want of runs")
    assert last[1].startswith(f"{N_TUNING} runs not run yet")
    assert "missing: nlac / desk" not in printed  # each is in the table
    assert study(project, "--jobs", "-1")[0] == 2


class References(HTMLParser):
    """What a page refers to, and the text in it that is no markup."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.styles = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe", "img", "object", "base")
        self.found += [
            value or "" for name, value in attrs if name in ("href", "xlink:href", "src", "srcset", "action")
        ]
        self.styles += "".join(value or "" for name, value in attrs if name in ("style", "clip-path", "fill"))

    def handle_data(self, data: str) -> None:
        self.styles += data if "url(" in data or "@import" in data else ""


def test_the_report_is_one_file_that_refers_to_nothing_outside_and_says_what_was_done(ended: tuple[Path, Any]) -> None:
    home, found = ended
    out = home / "out"
    assert sorted(path.name for path in out.iterdir()) == sorted((*FILES, CURVES))
    [drawing] = (out / CURVES).iterdir()
    assert drawing.name == "1-desk.svg"
    assert ElementTree.fromstring(drawing.read_bytes()).tag == "{http://www.w3.org/2000/svg}svg"
    page, table = (out / "report.html").read_text(), (out / "table.md").read_text()
    seen = References(page)
    assert seen.found
    assert all(name.startswith("#") for name in seen.found)
    assert "@import" not in seen.styles
    assert seen.styles.count("url(") == seen.styles.count("url(#")
    assert "http" not in page
    assert "<h1>Two &lt;methods&gt; &amp; a tuning</h1>" in page
    assert page.count("<svg") == 1
    for said in ("turnwise study study.toml", "distill.lr=0.2", "chosen", "+0.00 [+0.00, +0.00]", "0.50 [0.50, 0.50]"):
        assert said in page
        assert said in table
    assert (out / "study.toml").read_text() == STUDY
    row = rows_of(found)[-1]
    assert {key: row[key] for key in ("part", "method", "task", "seed", "base", "final", "sets")} == {
        "part": "table", "method": "rft", "task": "desk", "seed": 2, "base": 0.1, "final": 0.5, "sets": ["iterations=2", "method=rft"],
    }  # fmt: skip
    assert [point["win_rate"] for point in row["curve"]] == [0.1, 0.3, 0.5]
    assert (row["final_return"], [point["return"] for point in row["curve"]]) == (0.5, [0.1, 0.3, 0.5])


def rows_file(folder: Path, found: Any) -> Path:
    (folder / "kept.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows_of(found)))
    return folder / "kept.jsonl"


def test_what_finished_elsewhere_is_not_run_again_and_what_differs_is(
    ended: tuple[Path, Any], project: Path, tmp_path: Path
) -> None:
    rows = [row for row in rows_of(ended[1]) if row["method"] in ("nlac", "rft")]
    kept = rows_file(tmp_path, ended[1])
    _, listed, _ = study(project, "--rows", str(kept), "--dry-run")
    assert Counter(one["state"] for one in listed) == {"finished": N_TUNING + N_TABLE}
    assert {one["run_id"] for one in listed} == {row["run"] for row in rows}
    status, again, err = study(project, "--rows", str(kept))
    assert (status, runs(project), again["missing"]) == (0, [], []), err
    assert [{**row} for row in rows_of(again)] == rows

    (project / "study.toml").write_text(STUDY.replace("iterations=2", "iterations=3"))
    _, listed, _ = study(project, "--rows", str(kept), "--dry-run")
    assert "finished" not in {one["state"] for one in listed}


def test_a_recipe_changes_with_what_a_run_is_made_of_and_with_nothing_else(project: Path) -> None:
    workspace, load = open_workspace(project), partial(presets.load, "tiny")
    made = recipe(load(["seed=1"]), workspace)
    assert recipe(load(["seed=1", "preset=other", "grpo.lr=0.5", "timezone=Asia/Tokyo"]), workspace) == made
    for change in (
        "seed=2",
        "iterations=3",
        "critic.lr=0.5",
        "evaluate.episodes=3",
        "task.max_turns=9",
        "episodes_of=abc",
    ):
        assert recipe(load(["seed=1", change]), workspace) != made, change


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"\xff\n", "cannot be read (it is no UTF-8)"),
        (b"{}\n", "line 1: wanted a row of a finished run, found none with 'recipe'"),
        (b"[" * 9999 + b"\n", "line 1: wanted a row"),
        (b'{"recipe": "a", "commit": "b", "base": 0.1, "final": "high", "curve": []}\n', "found none with 'final'"),
    ],
)
def test_a_file_that_holds_no_rows_is_one_sentence(text: bytes | None, told: str, project: Path) -> None:
    if text is not None:
        (project / "kept.jsonl").write_bytes(text)
    status, _, err = study(project, "--rows", str(project / "kept.jsonl"))
    assert (status, err.count("\n")) == (2, 1) and told in err, err
    assert runs(project) == []


def test_rows_stand_for_no_episodes(project: Path, tmp_path: Path) -> None:
    text = STUDY.replace("[methods.nlac]", 'source = "rft"\n[methods.nlac]').partition("[tuning]")[0]
    (project / "study.toml").write_text(text.replace('settings = "preset"\n', ""))
    (tmp_path / "kept.jsonl").write_text("")
    status, _, err = study(project, "--rows", str(tmp_path / "kept.jsonl"))
    assert status == 2 and "learns from the episodes of rft" in err, err
