"""The claims and what they rest on: verdicts by hand, programs that run once, and sentences for what is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from fake_turnwise import TURNWISE, shell

from flows.evidence import kinds, programs
from flows.evidence.claims import CLAIMS
from flows.evidence.kinds import (
    CostOfAnEpisode,
    Elsewhere,
    Evidence,
    Finding,
    Found,
    Higher,
    Larger,
    Metric,
    Passes,
    Printed,
    Sooner,
    together,
)
from flows.evidence.programs import Program, Said
from flows.evidence.study import design
from turnwise import cli

STUDIES = Path(__file__).parents[3] / "studies"
PROGRAM = Program("benchmarks.none")
TABLE = "| name | ratio |\n| --- | --- |\n| a | 1.05 ± 0.02 |\n| b | 1.20 |\n\n| other |\n|---|\n| a |\n"


def row(method: str, seed: int, final: float, *curve: float) -> dict[str, Any]:
    """An iteration costs 10 episodes and 5 seconds."""
    points = [
        {"iteration": i - 1, "win_rate": rate, "episodes": 10.0 * i, "cpu_s": 5.0 * i} for i, rate in enumerate(curve)
    ]
    return {"method": method, "task": "desk", "seed": seed, "final": final, "curve": points, "run": f"{method}{seed}"}


def found(*rows: dict[str, Any], metrics: Mapping[str, list[dict[str, float]]] = {}, said: str = TABLE) -> Found:
    return Found(rows, 0.6, lambda one: metrics[one["run"]], {PROGRAM: Said(said, 0)})


PAIRS = (row("a", 1, 0.9), row("a", 2, 0.8), row("b", 1, 0.5), row("b", 2, 0.42), row("c", 1, 0.8), row("c", 2, 0.9))


@pytest.mark.parametrize(
    ("method", "controls", "verdict"),
    [
        ("a", ("b",), "holds"),  # +.40 and +.38, Student's interval +.26 to +.52
        ("b", ("a",), "does not hold"),
        ("a", ("c",), "not decided"),  # +.1 and -.1
        ("a", ("b", "c"), "not decided"),  # each control has to be beaten
        ("b", ("a", "c"), "does not hold"),
        ("a", ("d",), "not run"),
    ],
)
def test_a_difference_is_decided_by_its_interval(method: str, controls: tuple[str, ...], verdict: str) -> None:
    assert Higher(method, controls).find(found(*PAIRS)).verdict == verdict


def test_three_seeds_that_agree_by_much_and_by_little_decide_nothing() -> None:
    """+.5, +.1, +.1: above 0 in every pair, as chance has it in 1 of 4 cases; Student's interval is -.34 to +.81."""
    finals = (0.5, 0.1, 0.1)
    rows = [row(name, seed, rate) for seed in range(3) for name, rate in (("a", finals[seed]), ("b", 0.0))]
    assert Higher("a", ("b",)).find(found(*rows)) == Finding("+0.23 [-0.34, +0.81] over b", "not decided")


def test_one_seed_decides_nothing() -> None:
    assert Higher("a", ("b",)).find(found(row("a", 1, 0.9), row("b", 1, 0.1))).verdict == "not decided"


@pytest.mark.parametrize(
    ("mine", "other", "verdict"),
    [
        ([(0.0, 0.7), (0.0, 0.8)], [(0.0, 0.1, 0.6), (0.0, 0.2, 0.3)], "holds"),  # 10 against 20, 10 against never
        ([(0.0, 0.7), (0.0, 0.1)], [(0.0, 0.1, 0.6), (0.0, 0.6)], "not decided"),
        ([(0.0, 0.1), (0.0, 0.1)], [(0.0, 0.1, 0.6), (0.0, 0.6)], "does not hold"),
        ([(0.0, 0.1), (0.0, 0.1)], [(0.0, 0.1), (0.0, 0.1)], "not decided"),  # neither ever did
    ],
)
def test_sooner_wants_every_pair(mine: Any, other: Any, verdict: str) -> None:
    rows = [row("a", i, 0, *curve) for i, curve in enumerate(mine)] + [
        row("b", i, 0, *curve) for i, curve in enumerate(other)
    ]
    assert Sooner("a", ("b",)).find(found(*rows)).verdict == verdict


def test_the_cost_of_an_episode_and_of_the_whole_way() -> None:
    rows = (row("a", 1, 0, 0.0, 0.7), row("b", 1, 0, 0.0, 0.1, 0.6))
    told = CostOfAnEpisode("a", ("b",)).find(found(*rows))
    assert told.figure == (
        "CPU seconds an episode: a 0.50, b 0.50; a 5 CPU seconds to 0.6 (median); b 10, more in 1 of 1"
    )
    assert told.verdict == "holds"


def test_metrics_are_of_the_base_the_last_iteration_that_has_them_or_the_mean() -> None:
    metrics = {"a1": [{"x": 1.0}, {"x": 2.0}, {"x": 4.0}, {}], "a2": [{"x": 1.0}, {"x": 3.0}, {"x": 4.2}, {}]}
    one = found(row("a", 1, 0), row("a", 2, 0), metrics=metrics)
    assert list(Metric("a", "x", "base").values(one).values()) == [1.0, 1.0]
    assert list(Metric("a", "x").values(one).values()) == [4.0, 4.2]
    assert list(Metric("a", "x", "mean").values(one).values()) == [3.0, 3.6]
    last, base = Metric("a", "x"), Metric("a", "x", "base")
    assert Larger("x", last, base).find(one) == Finding("x 4.10 against 1.00, +3.10 [+1.83, +4.37]", "holds")
    assert Larger("x", last, base, by=3.5).find(one).verdict == "not decided"
    assert Larger("x", last, 6.0).find(one).verdict == "does not hold"
    assert Larger("x", last, 6.0, by=-3.5).find(one).verdict == "holds"
    assert Larger("x", last, base, decides=False).find(one).verdict is None
    assert Larger("x", last, Metric("b", "x")).find(one).verdict == "not run"


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [
        ({"most": 1.08}, "holds"),
        ({"most": 1.06}, "not decided"),  # 1.05 + .02
        ({"most": 1.0}, "does not hold"),
        ({"least": 1.0}, "holds"),
        ({}, None),
        ({"more_than": lambda said: said.cell("ratio", "b")}, "does not hold"),
    ],
)
def test_what_a_program_printed_is_within_its_bounds_with_its_half_width(bounds: Any, verdict: str | None) -> None:
    told = Printed("ratio", PROGRAM, lambda said: said.cell("ratio", "a"), **bounds).find(found())
    assert told.verdict == verdict and told.figure.startswith("ratio 1.05 ± 0.02")


def test_what_a_program_did_not_print_is_no_verdict() -> None:
    for cell in (("ratio", "z"), ("speed",)):
        told = Printed("x:", PROGRAM, lambda said, cell=cell: said.cell(*cell), most=9.0).find(found())  # type: ignore[misc]
        assert told.verdict == "not run"


@pytest.mark.parametrize(
    ("said", "verdict"),
    [("12 passed in 3 s", "holds"), ("1 failed, 11 passed", "does not hold"), ("No module named pytest", "not run")],
)
def test_tests_that_could_not_be_run_refute_nothing(said: str, verdict: str) -> None:
    assert Passes("tests:", PROGRAM).find(found(said=said)).verdict == verdict


def test_together_each_must_hold_and_what_is_told_beside_decides_nothing() -> None:
    def verdict(*each: Any) -> str:
        return together([Finding("", one) for one in each])

    assert verdict("holds", None) == verdict("holds") == "holds"
    assert verdict("holds", "not decided") == verdict(None) == "not decided"
    assert verdict("does not hold", "not decided", "holds") == "does not hold"
    assert verdict("does not hold", "not run") == "not run"


@pytest.mark.parametrize("name", ["claims.toml", "table1.toml"])
def test_the_seventeen_claims_have_a_control_each_and_their_methods_are_in_both_studies(name: str) -> None:
    assert [claim.number for claim in CLAIMS] == list(range(1, 18))
    assert all(claim.control and claim.paper and claim.rests_on for claim in CLAIMS)
    evidence: list[Evidence] = [one for claim in CLAIMS for one in claim.rests_on]
    assert {method for one in evidence for method in one.methods} <= set(design.read(STUDIES / name).methods)


def test_the_methods_of_evidence_elsewhere_are_in_that_study() -> None:
    elsewhere = [one for claim in CLAIMS for one in claim.rests_on if isinstance(one, Elsewhere)]
    for one in elsewhere:
        study = design.read(STUDIES / f"{one.study}.toml")
        assert one.task in study.tasks and set(one.evidence.methods) <= set(study.methods)
    assert elsewhere


def test_evidence_elsewhere_is_of_the_stored_rows_of_one_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "root", lambda: tmp_path)
    one = Elsewhere("other", "long", Higher("a", ("b",)))
    assert one.find(found(*PAIRS)).verdict == "not run"  # those rows are of the study at hand

    def keep(*finals: float) -> None:
        rows = [
            {"part": "table", **row(m, s, f), "task": "long"}
            for (m, s), f in zip(product("ab", (1, 2)), finals, strict=True)
        ]
        others = [{"part": "tuning", **row("a", 1, 0.0)}, {"part": "table", **row("a", 1, 0.0), "task": "short"}]
        (tmp_path / "docs/results/other.jsonl").write_text("\n".join(json.dumps(each) for each in (*rows, *others)))

    (tmp_path / "docs" / "results").mkdir(parents=True)
    keep(0.9, 0.8, 0.5, 0.42)
    assert one.find(found()) == Finding("other, long: +0.39 [+0.26, +0.52] over b", "holds")
    assert replace(one, decides=False).find(found()).verdict is None
    keep(0.5, 0.42, 0.9, 0.8)
    assert one.find(found()).verdict == "does not hold"
    monkeypatch.setattr(kinds, "root", lambda: None)
    assert one.find(found()).verdict == "not run"
    assert replace(one, decides=False).find(found()).verdict is None


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program that counts how often it ran, and ends badly where a file `broken` is."""
    folder = tmp_path / "repository"
    (folder / "benchmarks").mkdir(parents=True)
    (folder / "benchmarks" / "counted.py").write_text(
        "import pathlib, sys\n"
        "file = pathlib.Path('count'); n = len(file.read_text()) if file.exists() else 0\n"
        "file.write_text('x' * (n + 1)); print(f'| ratio |\\n|---|\\n| {n + 1} |', *sys.argv[1:])\n"
        "sys.exit(pathlib.Path('broken').exists())\n"
    )
    monkeypatch.setattr(programs, "root", lambda: folder)
    return folder


def test_a_program_runs_once_until_its_code_changes_and_a_failure_is_tried_again(
    repository: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.evidence.programs import said_by
    from flows.report import Display
    from flows.workspace import open_workspace

    program, workspace = Program("benchmarks.counted", ("--pairs", "3")), open_workspace(home)

    def go() -> Said:
        with Display(quiet=True) as display:
            return said_by(program, "", workspace, display, repository)

    (repository / "broken").write_text("")
    assert (go().status, go().status) == (1, 1)
    (repository / "broken").unlink()
    assert (go().cell("ratio"), go().cell("ratio")) == ("3", "3")
    assert "--pairs 3" in go().text
    (repository / "benchmarks" / "other.py").write_text("changed = True\n")
    assert go().cell("ratio") == "4"
    assert not list((home / "data").rglob("*.log"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments", "cells"),
    [
        (
            "benchmarks.speed.inference_cost",
            "--pairs 1 --width 32 --layers 1 --batch 2 --new-tokens 4",
            [("share", "shape of Qwen2.5-7B"), ("ratio", "merged")],
        ),
        ("benchmarks.speed.packed_pass", "--critic 4 --width 32 --layers 1 --pairs 1", [("ratio",)]),
    ],
)
def test_a_program_prints_the_cells_that_its_claims_read(module: str, arguments: str, cells: list[Any]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments.split()], cwd=STUDIES.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for column, *holding in cells:
        assert Said(done.stdout, 0).cell(column, *holding)


def test_bad_questions_are_one_sentence(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "few.toml").write_text('seeds = [1]\n[methods.rft]\npreset = "desk+rft"\n')
    for more, wanted in (
        (["--only", "18"], "turnwise: --only 18: there is no such claim; they have the numbers 1 to 17.\n"),
        (["--study", str(home / "few.toml")], "turnwise: few.toml: there is no method 'nlac', which a claim rests on; add it, or use studies/claims.toml.\n"),
        (["--study", str(home / "none.toml")], f"turnwise: There is no study file {home / 'none.toml'}. Give a file that exists, such as studies/tiny.toml.\n"),
    ):  # fmt: skip
        assert cli.main(["claims", "--home", str(home), *more]) == 2
        assert capsys.readouterr().err == wanted


@pytest.mark.slow
def test_claims_are_judged_by_runs_which_the_second_time_are_all_there(home: Path) -> None:
    methods = "".join(f'[methods."{name}"]\npreset = "plain.toml"\n' for name in ("nlac", "nlql", "sac", "sac, told"))
    (home / "plain.toml").write_text("")
    (home / "small.toml").write_text(f'seeds = [1, 2]\nsets = ["iterations=2"]\n{methods}')
    options = f"claims --home {home} --study small.toml --only 3 --only 6 --plain --jobs 2"
    status, out, err = shell(f"{TURNWISE} {options} --json", home)
    told = {one["number"]: one for one in json.loads(out)}
    assert (status, sorted(told)) == (0, [3, 6]) and "2 runs, 2 at a time" in err  # four names of one config
    assert {one["verdict"] for one in told.values()} == {"not decided"}  # the stages learn nothing: all are alike
    assert told[6]["figures"] == ["+0.00 [+0.00, +0.00] over nlql"]
    status, out, err = shell(f"{TURNWISE} {options} --out seen", home)
    assert (status, err) == (0, "") and out.startswith("| | claim | verdict |")
    assert "| 6 | Rewriting beats picking" in (home / "seen" / "claims.md").read_text()

    # The same by rows in another folder: nothing runs.
    status, _, err = shell(f"{TURNWISE} study --home {home} small.toml --jobs 0 --out rows", home)
    assert status == 0, err
    other = home / "other"
    other.mkdir()
    elsewhere = f"claims --home {other} --study small.toml --rows rows/cells.jsonl --plain --json"
    status, out, err = shell(f"{TURNWISE} {elsewhere} --only 3 --only 6", home)
    assert (status, err) == (0, "")
    assert {one["number"]: one for one in json.loads(out)} == told
