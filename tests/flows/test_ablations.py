"""Each ablation differs from what it is an ablation of in what its name says: the rows that train and the steps taken are
compared, and where they are not the same, the difference is written here and in docs/results.md.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from documents import ROOT

from flows import presets
from flows.cost.lengths import assumed
from flows.cost.workload import workload
from flows.study import cells, design

Counts = dict[str, tuple[int, int]]


def counts(run: Any) -> Counts:
    """Stage -> (rows that train, target rows and policy rows together; steps), each summed over the run."""
    found: dict[str, list[float]] = {}
    for work in workload(run, assumed(run, ["yes=0.5"])):
        if work.steps:
            mine = found.setdefault(work.stage, [0, 0])
            mine[0] += sum(rows.n for rows in work.trained if rows.own is not None)
            mine[1] += work.steps
    return {stage: (round(rows), round(steps)) for stage, (rows, steps) in found.items()}


@cache
def arms(file: str, task: str) -> dict[str, Any]:
    """Method -> the run of a study's first seed, with its preset's settings."""
    asked = design.read(ROOT / "studies" / file)
    every = cells.table_cells(asked, dict.fromkeys(asked.tuned, ()))
    return {one.method: one.run for one in every if one.task == task and one.seed == asked.seeds[0]}


def keys(run: Any) -> dict[str, Any]:
    """`section.key` -> value, and top-level keys by their name."""
    found = run.model_dump(exclude={"preset"})
    flat = {name: value for name, value in found.items() if not isinstance(value, dict)}
    return flat | {f"{name}.{key}": value for name in found.keys() - flat.keys() for key, value in found[name].items()}


def different(run: Any, other: Any) -> set[str]:
    """Keys that the two configs do not have alike."""
    ours, theirs = keys(run), keys(other)
    return {key for key in ours if ours[key] != theirs[key]}


ASKED = {"evaluate.audit_turns", "evaluate.audit_futures", "evaluate.probe_path"}  # what evaluations ask besides
FROZEN = {"critic.frozen", "distill.successor_rows"}


def without_successor_rows(run: Any) -> Any:
    return run.model_copy(update={"distill": run.distill.model_copy(update={"successor_rows": 0})})


@pytest.mark.parametrize(
    ("file", "task", "arm", "changed"),
    [
        ("claims.toml", "desk", "frozen", FROZEN),
        ("claims.toml", "desk", "uncorrected", {"targets.correct", "refine.correct"}),
        ("claims.toml", "desk", "general rows", {"critic.general_rows", "distill.general_rows"}),
        ("ladder.toml", "fault", "frozen", FROZEN),
        ("ladder.toml", "fault", "nlac, ungated, three rewrites", {"refine.gate"}),
        ("ladder.toml", "fault", "verdict only", {"refine.critique"}),
        ("ladder.toml", "fault", "uncorrected", {"targets.correct", "refine.correct"}),
        ("ladder.toml", "fault", "one step", {"targets.steps"}),
        ("ladder.toml", "fault", "uniform replay", {"targets.alpha", "refine.alpha"}),
        ("maths.toml", "one reply", "frozen", FROZEN),
        ("twenty.toml", "game", "frozen", FROZEN),
    ],
)
def test_an_ablation_trains_as_many_rows_in_as_many_steps(file: str, task: str, arm: str, changed: set[str]) -> None:
    """A frozen successor has no rows to be rehearsed on while the policy learns; all others are as many."""
    run, nlac = arms(file, task)[arm], arms(file, task)["nlac"]
    assert different(run, nlac) - ASKED == changed
    assert counts(without_successor_rows(run)) == counts(without_successor_rows(nlac))


def test_what_picks_in_place_of_rewriting_trains_as_many_rows_in_as_many_steps() -> None:
    for file, task in (("claims.toml", "desk"), ("maths.toml", "one reply"), ("twenty.toml", "game")):
        found = arms(file, task)
        assert counts(found["nlql"]) == counts(found["nlac"])


def test_where_there_is_no_critic_the_policy_takes_fewer_steps_and_one_arm_of_the_ladder_makes_up_for_it() -> None:
    found = arms("claims.toml", "desk")
    assert counts(found["hindsight"])["distill"][1] == counts(found["nlac"])["distill"][1]
    assert "critic" not in counts(found["hindsight"])
    found = arms("ladder.toml", "fault")
    steps = [
        sum(one for _, one in counts(found[arm]).values()) for arm in ("hindsight, as many steps", "nlac, ungated")
    ]
    assert steps[0] == pytest.approx(steps[1], rel=0.05)


def test_without_replay_there_are_a_tenth_fewer_targets() -> None:
    """An iteration has 288 transitions of its own, and nlac draws 320."""
    found = arms("claims.toml", "desk")
    assert counts(found["nlac"])["critic"][1] == 200 and counts(found["no replay"])["critic"][1] == 180
    assert counts(found["nlac"])["distill"][1] == counts(found["no replay"])["distill"][1]


@pytest.mark.parametrize(("sweeps", "steps"), [(2, 560), (4, 672), (8, 896)])
def test_sweeps_share_targets_and_the_last_batch_of_each_is_what_is_left_over(sweeps: int, steps: int) -> None:
    run: Any = presets.load(f"demo_sweeps_{sweeps}")
    one: Any = presets.load("demo_one_step")
    assert run.iterations == sweeps * one.iterations
    assert run.targets.transitions * sweeps == one.targets.transitions
    assert (counts(one)["critic"][1], counts(run)["critic"][1]) == (560, steps)
    assert counts(run)["distill"] == counts(one)["distill"]
