"""What is used from outside, on a small real run: the package `turnwise`, the notebook, and the queries of docs/how-to/sql.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands import RUN, SMALL, Ended
from documents import DOCS, blocks, text_of

import turnwise

pytestmark = pytest.mark.slow
QUERIES = dict(
    zip(
        re.findall(r"^## (.*)$", text_of(DOCS / "how-to/sql.md"), re.MULTILINE),
        blocks("how-to/sql.md", "sql"),
        strict=True,
    )
)
CHANGES = [f"{key}={value}" for key, value in SMALL.items()]


@pytest.fixture
def project(finished: Ended, monkeypatch: pytest.MonkeyPatch) -> turnwise.Project:
    monkeypatch.chdir(finished.home)
    return turnwise.open_project(finished.home)


def test_ten_queries_answer_about_a_run(project: turnwise.Project, finished: Ended) -> None:
    run_id = finished.done.json["run_id"]
    answers = {title: turnwise.sql(project, query, run_id) for title, query in QUERIES.items()}
    assert len(answers) == 10
    rates = answers["Win rate by iteration"].set_index("iteration").win_rate
    assert rates.to_dict() == {row["iteration"]: row["win_rate"] for row in finished.done.json["iterations"]}
    judged = turnwise.rows(project, "judgements", run_id)
    states = answers["What was dropped in refining, and why"].states.sum()
    assert states == len(judged) - len(judged[judged.run_id.isin(evaluations(finished))])
    drawn = answers["Replay priorities"].set_index(["episode_id", "turn"]).times_drawn
    stored = turnwise.rows(project, "priorities", run_id).groupby(["episode_id", "turn"]).size()
    assert all(stored[key] == times for key, times in drawn.items())
    assert [title for title, answer in answers.items() if answer.empty] in ([], ["Where the critic was wrong"])


def evaluations(ended: Ended) -> set[str]:
    summary = ended.done.json
    ends = {summary[part]["run_id"] for part in ("base", "final")}
    return ends | {row["runs"]["evaluate"] for row in summary["iterations"]}


@pytest.mark.parametrize(
    "query",
    ["selec 1", "select nothing from turns", "delete from turns", "copy turns to 'turns.csv'", "select 'a'::int"],
)
def test_a_query_that_fails_is_one_sentence_and_changes_nothing(project: turnwise.Project, query: str) -> None:
    before = turnwise.sql(project, "select count(*) as n from turns").n[0]
    with pytest.raises(turnwise.UsageError, match=r"^sql: [^\n]+$"):
        turnwise.sql(project, query)
    assert turnwise.sql(project, "select count(*) as n from turns").n[0] == before > 0


def test_the_notebook_runs_from_its_first_cell_to_its_last(project: turnwise.Project, finished: Ended) -> None:
    cells = json.loads(text_of(DOCS / "tutorial/notebook.ipynb"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    small = {'preset, changes = "tiny", []': f"preset, changes = {RUN[1]!r}, {CHANGES!r}"}
    assert set(small) < set(code)
    scope: dict[str, Any] = {}
    for cell in code:
        exec(compile(small.get(cell, cell), "docs/tutorial/notebook.ipynb", "exec"), scope)
    done = scope["done"]
    assert done.final["win_rate"] == finished.done.json["final"]["win_rate"]
    # reused
    assert {row["runs"]["critic"] for row in done.iterations[1:]} == {
        row["runs"]["critic"] for row in finished.done.json["iterations"][1:]
    }
    assert scope["again"].run_id not in {row["runs"].get("critic") for row in done.iterations}
    assert scope["critics"].iloc[0] == scope["again"].run_id


def test_the_notebook_was_executed() -> None:
    cells = [
        cell for cell in json.loads(text_of(DOCS / "tutorial/notebook.ipynb"))["cells"] if cell["cell_type"] == "code"
    ]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(bool(cell["outputs"]) for cell in cells) >= 6


def test_runs_are_set_side_by_side(project: turnwise.Project, finished: Ended) -> None:
    summary = finished.done.json
    found = turnwise.compare(project, *(row["runs"]["critic"] for row in summary["iterations"][1:]))
    assert found.loc[("config", "iteration")].tolist() == [0, 1]
    assert turnwise.config(project, summary["run_id"]).iterations == SMALL["iterations"]
    assert turnwise.runs(project).run_id.tolist() == [summary["run_id"]]
    assert len(turnwise.episodes(project, summary["run_id"])) == len(
        turnwise.rows(project, "episodes", summary["run_id"])
    )


def test_the_names_of_the_package_are_listed_in_one_place() -> None:
    assert dir(turnwise) == sorted(turnwise.__all__)
    assert all(getattr(turnwise, name) for name in turnwise.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Workspace'"):
        vars(turnwise)["__getattr__"]("Workspace")


def test_a_folder_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(turnwise.UsageError, match="is no folder"):
        turnwise.open_project(tmp_path / "nothing")
