"""`turnwise lineage RUN`: every run that a run was made from stands there once, below what it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from branching import NLAC, Turnwise, finished_run, old, runs_of, turnwise

from flows.lineage import Node, text
from stages.store.tracking import Tracking

__all__ = ["finished_run", "old", "turnwise"]  # fixtures


def test_the_graph_of_a_pipeline_run_is_sorted_and_has_each_run_once(turnwise: Turnwise, old: Any) -> None:
    nodes = turnwise("lineage", old["run_id"])
    ids = [node["run_id"] for node in nodes]
    assert len(ids) == len(set(ids)) == 2 + 3 * len(NLAC) + 1
    for n, node in enumerate(nodes):
        assert {each for runs in node["inputs"].values() for each in runs} <= set(ids[:n])
    by_title = {node["title"]: node for node in nodes}
    assert by_title["critic 1"]["run_id"] == runs_of(old, 1)["critic"]
    assert by_title["critic 1"]["inputs"]["targets"] == [runs_of(old, 1)["targets"]]
    assert by_title["evaluate final"]["run_id"] == old["final"]["run_id"]


def test_a_stage_run_has_what_it_was_made_from_and_nothing_else(turnwise: Turnwise, old: Any) -> None:
    titles = [node["title"] for node in turnwise("lineage", runs_of(old, 1)["targets"])]
    assert titles == [f"{name} 0" for name in NLAC[:-1]] + ["collect 1", "targets 1"]


def test_a_branch_tells_which_runs_the_old_one_made(turnwise: Turnwise, old: Any) -> None:
    new = turnwise("rerun", "critic", "--of", old["run_id"], "--set", "critic.lr=0.5", "--through", "critic")
    _, out, _ = turnwise("lineage", new["run_id"], raw=True)
    lines = {line.split()[1]: line for line in out.splitlines() if line.startswith("  ")}
    made = f"(made by run {old['run_id'][:8]})"
    assert made in lines[runs_of(old, 2)["targets"][:8]]
    assert made not in lines[runs_of(new, 2)["critic"][:8]]
    assert "<- targets 2; collect 0-2" in lines[runs_of(new, 2)["critic"][:8]]


def test_the_drawing_has_a_box_a_run_and_is_kept_with_the_run(turnwise: Turnwise, old: Any, home: Path) -> None:
    turnwise("lineage", old["run_id"], "--svg", "drawn.svg")
    drawn = (home / "drawn.svg").read_text()
    boxes = [title.text or "" for title in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}title")]
    assert [title.rpartition(" ")[2] for title in boxes] == [
        node["run_id"] for node in turnwise("lineage", old["run_id"])
    ]
    assert Tracking(home / "mlflow").artifact(old["run_id"], "lineage.svg").read_text() == drawn


def test_two_inputs_of_one_iteration_are_told_by_id() -> None:
    pair = [Node(letter * 8, "critic", "iteration", 0, "", {}) for letter in "ab"]
    last = Node("c" * 8, "distill", "iteration", 1, "", {"critic": [node.run_id for node in pair]})
    assert text([*pair, last])[-1].endswith("<- critic aaaaaaaa, bbbbbbbb")


@pytest.mark.parametrize("options", [("nothing",), ("RUN", "--svg", "no/such/folder.svg")])
def test_what_cannot_be_shown_or_written_is_one_sentence(
    turnwise: Turnwise, old: Any, options: tuple[str, ...]
) -> None:
    status, _, err = turnwise("lineage", *(old["run_id"] if one == "RUN" else one for one in options), raw=True)
    assert (status, err.count("\n")) == (2, 1)
