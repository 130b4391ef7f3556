"""Each ablation differs from its control in what its name says: which keys are changed, and the rows and steps that
both are planned to train. Where those are not the same, the numbers stand here.

Plans are compared (`flows.cost.workload`), not runs. A plan takes half of all actions to be judged Yes (`yes=0.5`), in
every arm alike, and every rewrite to be learned. In a run each critic has its own share of Yes, and a gate refuses
rewrites, so that arms with a gate train fewer rows than is planned here: a result, and not a setting.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from documents import ROOT

from flows import presets
from flows.cost.lengths import assumed
from flows.cost.workload import workload
from flows.evidence.study import cells, design

Trained = tuple[tuple[int, ...], int]
"""Rows of each kind, and steps. Kinds are the critic's (futures or numbers), the policy's, general ones; in distill the
policy's stand first.
"""

TASKS = {
    "ladder.toml": "fault",
    "table1.toml": "desk",
    "claims.toml": "desk",
    "maths.toml": "one reply",
    "twenty.toml": "game",
}

OF_WHOLE_METHODS = {"", "parser", "rft"}  # whose arms are methods of their own; any other control has ablations

CONTROLS: dict[tuple[str, str], dict[str, Trained]] = {
    ("ladder.toml", "nlac"): {"critic": ((25_600, 12_800), 800), "distill": ((6_920, 3_520), 220)},
    ("ladder.toml", "nlac, ungated"): {"critic": ((25_600, 12_800), 800), "distill": ((3_460, 1_920), 120)},
    ("table1.toml", "nlac"): {"critic": ((12_800, 6_400), 400), "distill": ((3_460, 1_920), 120)},
    ("table1.toml", "by episode"): {"self_ac": ((15_360,), 480)},
    ("claims.toml", "nlac"): {"critic": ((6_400, 3_200), 200), "distill": ((1_730, 960), 60)},
    ("claims.toml", "by episode"): {"self_ac": ((4_608,), 144)},
    ("maths.toml", "nlac"): {"critic": ((5_760, 2_880), 180), "distill": ((2_076, 1_152), 72)},
    ("twenty.toml", "nlac"): {"critic": ((4_096, 2_048), 128), "distill": ((1_856, 1_024), 64)},
}

ASKED = {"evaluate.audit_turns", "evaluate.audit_futures", "evaluate.probe_path"}  # what evaluations ask besides

CORRECT = {"targets.correct", "refine.correct"}
# The futures of a frozen successor are in every step of the critic, with a weight of 0; distill rehearses none.
FROZEN = {"critic.frozen", "distill.successor_rows"}
GENERAL = {"critic.general_rows", "distill.general_rows"}
REPLAY = {"targets.replay_size", "refine.replay_size"}
BY_TURN = {"self_ac.alpha", "self_ac.advantage"}
# Of an arm of another method the sections that differ.
HINDSIGHT = {"method", "refine", "distill"}
NLQL = {"method", "pick"}
NLRL = {"method", "pick", "distill"}
SAC = {"method", "pick", "q_critic"}
TOLD = SAC | {"task"}

ABLATIONS: dict[str, dict[str, tuple[set[str], dict[str, Trained | None]]]] = {
    # Arm: what is changed, and what a stage trains where its control trains something else.
    # None = there is no such stage.
    "ladder.toml": {
        "nlac, ungated": ({"refine.gate", "refine.refinements"}, {"distill": ((3_460, 1_920), 120)}),
        "nlac, ungated, three rewrites": ({"refine.gate"}, {}),
        "hindsight": (HINDSIGHT | {"critic", "roles"}, {"critic": None, "distill": ((6_920,), 240)}),
        "hindsight, as many steps": (HINDSIGHT | {"critic", "roles"}, {"critic": None, "distill": ((13_840,), 880)}),
        "frozen": (FROZEN, {"distill": ((6_920,), 220)}),
        "verdict only": ({"refine.critique"}, {}),
        "uncorrected": (CORRECT, {}),
        "one step": ({"targets.steps"}, {}),
        "no replay": (REPLAY, {"critic": ((23_040, 11_520), 720)}),
        "uniform replay": ({"targets.alpha", "refine.alpha"}, {}),
        "one future": ({"refine.futures"}, {}),
        "one rewrite": ({"refine.refinements"}, {"distill": ((3_460, 1_920), 120)}),
        "gate by rollouts": ({"refine.gate"}, {}),
    },
    "table1.toml": {
        "one step": ({"targets.steps"}, {}),
        "hindsight": (HINDSIGHT, {"critic": None, "distill": ((3_460,), 120)}),
        "nlql": (NLQL, {}),
        "nlrl": (NLRL, {"critic": None, "distill": ((3_480,), 120)}),
        "nlrl, as many states": (NLRL, {"critic": None, "distill": ((3_460,), 120)}),
        "frozen": (FROZEN, {"distill": ((3_460,), 120)}),
        "no replay": (REPLAY, {"critic": ((11_520, 5_760), 360)}),
        "uncorrected": (CORRECT, {}),
        "general rows": (GENERAL, {"critic": ((12_800, 6_400, 6_400), 400), "distill": ((3_460, 1_920, 1_920), 120)}),
        "sac, told": (TOLD, {"critic": None, "q_critic": ((51_200, 25_600), 1_600), "distill": ((10_380, 5_440), 340)}),
        "by turn": (BY_TURN, {}),
    },
    "claims.toml": {
        "nlrl": (NLRL, {"critic": None, "distill": ((1_740,), 60)}),
        "sac": (SAC, {"critic": None, "q_critic": ((25_600, 12_800), 800), "distill": ((5_190, 2_720), 170)}),
        "sac, told": (TOLD, {"critic": None, "q_critic": ((25_600, 12_800), 800), "distill": ((5_190, 2_720), 170)}),
        "nlql": (NLQL, {}),
        "hindsight": (HINDSIGHT, {"critic": None, "distill": ((1_730,), 60)}),
        "frozen": (FROZEN, {"distill": ((1_730,), 60)}),
        "no replay": (REPLAY, {"critic": ((5_760, 2_880), 180)}),
        "uncorrected": (CORRECT, {}),
        "general rows": (GENERAL, {"critic": ((6_400, 3_200, 3_200), 200), "distill": ((1_730, 960, 960), 60)}),
        "by turn": (BY_TURN, {}),
    },
    "maths.toml": {
        "nlac, gated": ({"refine.gate", "refine.refinements"}, {"distill": ((4_152, 2_112), 132)}),
        "nlrl": (NLRL, {"critic": None, "distill": ((2_088,), 72)}),
        "frozen": (FROZEN, {"distill": ((2_076,), 72)}),
        "hindsight": (HINDSIGHT, {"critic": None, "distill": ((2_076,), 72)}),
        "nlql": (NLQL, {}),
    },
    "twenty.toml": {
        "frozen": (FROZEN, {"distill": ((1_856,), 64)}),
        "hindsight": (HINDSIGHT, {"critic": None, "distill": ((1_856,), 64)}),
        "verdict only": ({"refine.critique"}, {}),
        "nlql": (NLQL, {}),
        "nlrl": (NLRL, {"critic": None, "distill": ((1_856,), 64)}),
    },
}


def counts(run: Any) -> dict[str, Trained]:
    """Stage -> what it trains, summed over the run's iterations."""
    found: dict[str, tuple[list[float], int]] = {}
    for work in workload(run, assumed(run, ["yes=0.5"])):
        if work.steps:
            # What rows of a tree share is an entry of its own, which predicts nothing.
            rows = [one.n for one in work.trained if one.predicted]
            before, steps = found.get(work.stage, ([0.0] * len(rows), 0))
            found[work.stage] = [a + b for a, b in zip(before, rows, strict=True)], steps + work.steps
    return {stage: (tuple(round(n) for n in rows), steps) for stage, (rows, steps) in found.items()}


@cache
def study(file: str) -> design.Study:
    return design.read(ROOT / "studies" / file)


@cache
def arms(file: str) -> dict[str, Any]:
    """Method -> the run of the study's first seed, with the settings that its stored rows were made with."""
    asked = study(file)
    stored = (ROOT / "docs" / "results" / file).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, stored) if row["part"] == "table" and row["method"] in asked.tuned]
    chosen = {row["method"]: tuple(row["setting"]) for row in rows}
    every = cells.table_cells(asked.model_copy(update={"seeds": asked.seeds[:1]}), chosen)
    return {one.method: one.run for one in every if one.task == TASKS[file]}


def different(run: Any, other: Any) -> set[str]:
    """`section.key`, and top-level keys by their name, that the two configs do not have alike."""
    found = set[str]()
    for name, ours in run.model_dump(exclude={"preset"}).items():
        theirs = getattr(other, name)
        if not isinstance(ours, dict):
            found |= {name} if ours != theirs else set()
        else:
            found |= {f"{name}.{key}" for key, value in theirs.model_dump().items() if ours[key] != value}
    return found


@pytest.mark.parametrize("file", TASKS)
def test_every_ablation_of_a_study_has_its_line_here(file: str) -> None:
    methods = study(file).methods.items()
    assert set(ABLATIONS[file]) == {name for name, one in methods if one.control not in OF_WHOLE_METHODS}


@pytest.mark.parametrize(("file", "arm"), [(file, arm) for file, lines in ABLATIONS.items() for arm in lines])
def test_an_ablation_trains_what_its_control_does_but_for_what_its_line_says(file: str, arm: str) -> None:
    changed, unequal = ABLATIONS[file][arm]
    control = study(file).methods[arm].control
    run, other, planned = arms(file)[arm], arms(file)[control], CONTROLS[file, control]
    found = different(run, other) - ASKED
    assert ({key.partition(".")[0] for key in found} if "method" in found else found) == changed
    assert counts(other) == planned
    assert not unequal.items() & planned.items()  # a line of what is equal would say nothing
    assert counts(run) == {stage: one for stage, one in (planned | unequal).items() if one}


def test_rows_and_steps_are_those_of_the_configs_by_hand() -> None:
    """Ten iterations of `nlac`, of 320 targets four times over and 192 labels twice, a tenth of these held out, in
    batches of 32 with 16 rows beside; 40 of self_ac, of 192 episodes twice over; 10 of `sac, told`, 16 times over.
    """
    found = arms("table1.toml")
    critic, labels = 10 * 4 * (320 // 32), 192 - 19
    distill = 10 * 2 * -(-labels // 32)
    assert counts(found["nlac"]) == {
        "critic": ((10 * 4 * 320, critic * 16), critic),
        "distill": ((10 * 2 * labels, distill * 16), distill),
    }
    assert counts(found["by turn"]) == {"self_ac": ((40 * 2 * 192,), 40 * 2 * (192 // 32))}
    assert counts(found["sac, told"])["q_critic"] == ((10 * 16 * 320, 10 * 16 * 10 * 16), 10 * 16 * 10)
    # The half that is judged No is rewritten three times on the ladder: 384 labels in place of 192.
    assert counts(arms("ladder.toml")["nlac"])["distill"][0][0] == 10 * 2 * (96 + 3 * 96 - 38)


def test_one_arm_of_the_ladder_makes_up_for_the_steps_of_the_critics_stage() -> None:
    """Self-distillation has no such stage, and so not its steps, which train policy rows, too."""
    found = arms("ladder.toml")
    steps = [
        sum(one for _, one in counts(found[arm]).values()) for arm in ("hindsight, as many steps", "nlac, ungated")
    ]
    assert steps[0] == pytest.approx(steps[1], rel=0.05)


@pytest.mark.parametrize(("sweeps", "steps"), [(2, 560), (4, 672), (8, 896)])
def test_sweeps_share_targets_and_the_last_batch_of_each_is_what_is_left_over(sweeps: int, steps: int) -> None:
    run: Any = presets.load(f"demo_sweeps_{sweeps}")
    one: Any = presets.load("desk+nlac_one_step")
    assert run.iterations == sweeps * one.iterations
    assert run.targets.transitions * sweeps == one.targets.transitions
    assert (counts(one)["critic"][1], counts(run)["critic"][1]) == (560, steps)
    assert counts(run)["distill"] == counts(one)["distill"]
