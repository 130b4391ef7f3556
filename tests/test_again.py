"""`python -m benchmarks.evidence.again`: how far runs moved that were made twice, and what docs/results/processor.md quotes of it."""

from __future__ import annotations

import json
import sys
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from documents import DOCS

from benchmarks.evidence import again


def _row(recipe: str, run: str, method: str, seed: int, final: float) -> dict[str, Any]:
    return {
        "part": "table", "recipe": recipe, "run": run, "method": method, "task": "desk", "seed": seed, "final": final,
    }  # fmt: skip


FIRST = [_row("a", "1", "fast", 1, 0.9), _row("b", "2", "fast", 2, 0.5), _row("c", "3", "slow", 1, 0.1), _row("d", "4", "slow", 2, 0.3),
         _row("e", "5", "slow", 3, 0.7)]  # fmt: skip
SECOND = [_row("b", "6", "fast", 2, 0.8), _row("a", "7", "fast", 1, 0.9), _row("c", "8", "slow", 1, 0.1), _row("d", "9", "slow", 2, 0.2),
          _row("e", "5", "slow", 3, 0.7), _row("x", "10", "fast", 3, 0.0), {**_row("a", "11", "fast", 1, 0.0), "part": "tuning"}]  # fmt: skip
"""Made twice are a to d: e is one run in both, x is in one alone, and the tuning is not looked at."""


def test_pairs_are_runs_of_one_recipe_that_were_made_twice() -> None:
    some = again.pairs(FIRST, SECOND)
    assert [(one["run"], other["run"]) for one, other in some] == [("1", "7"), ("2", "6"), ("3", "8"), ("4", "9")]
    assert again.moved(some) == pytest.approx([0.0, 0.3, 0.0, -0.1])


def test_how_far_they_moved_by_hand() -> None:
    some = again.pairs(FIRST, SECOND)
    assert again.root_mean_square([0.0, 0.3, 0.0, -0.1]) == pytest.approx((0.1 / 4) ** 0.5)
    # seeds .9 .5, .9 .8, .1 .3 and .1 .2: half of the square of what is between
    assert again.apart(some) == pytest.approx(((0.08 + 0.005 + 0.02 + 0.005) / 4) ** 0.5)
    # rates .9 .65 .1 .25
    assert again.drawn_anew(some, 50) == pytest.approx((2 / 50 * (0.09 + 0.2275 + 0.09 + 0.1875) / 4) ** 0.5)


def test_two_tests_of_one_policy_differ_as_the_bound_says() -> None:
    """The sum over all outcomes of ten independent visits."""
    chance = [comb(10, wins) * 0.3**wins * 0.7 ** (10 - wins) for wins in range(11)]
    mean_square = sum(p * q * ((a - b) / 10) ** 2 for a, p in enumerate(chance) for b, q in enumerate(chance))
    one = (_row("a", "1", "fast", 1, 0.3), _row("a", "2", "fast", 1, 0.3))
    assert again.drawn_anew([one], 10) == pytest.approx(mean_square**0.5)


def test_files_without_a_run_that_was_made_twice_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in FIRST))
    monkeypatch.setattr(sys, "argv", ["again", str(rows), str(rows)])
    with pytest.raises(SystemExit):
        again.main()
    assert "no run of one recipe that was made twice" in capsys.readouterr().err


def _made_twice(study: str) -> list[again.Pair]:
    return again.pairs(*(again.read(DOCS / "results" / f"{name}.jsonl") for name in (study, f"{study}_again")))


def test_what_the_page_says_of_it() -> None:
    """The table of docs/results/processor.md, and the figures below it."""
    text = (DOCS / "results/processor.md").read_text("utf-8")
    section = text.partition("\n## ")[0]
    some = _made_twice("claims")
    table = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")
    ]
    found = again.by_method(some)
    assert len(table) == len(found) == 16
    for label, *rates, difference in table:
        pairs = found[label.split("`")[0], "desk"]
        assert [float(rate) for rate in " ".join(rates).split()] == pytest.approx(
            [row["final"] for rows in zip(*pairs, strict=True) for row in rows], abs=0.0051
        )
        assert float(difference.split()[0]) == pytest.approx(fmean(again.moved(pairs)), abs=0.0051)
    far, means = again.moved(some), [fmean(again.moved(pairs)) for pairs in found.values()]
    near = sum(abs(by) < again.NEAR for by in far)
    for quoted in (
        f"by {again.root_mean_square(far):.3f} (root mean square; at most {max(map(abs, far)):.2f})",
        f"a mean of three by {again.root_mean_square(means):.3f} (at most {max(map(abs, means)):.2f})",
        f"({fmean(far):+.3f}): of {len(far)} runs {near} move by less than {again.NEAR}",
        f"at most {again.drawn_anew(some, 96):.3f}",
        f"lie {again.apart(some):.3f} apart",
    ):
        assert quoted in section, quoted


def test_what_the_page_says_of_the_long_desk_s_controls() -> None:
    """Its runs by seed, first and again, are pairs of one recipe; RFT's are equal."""
    text = (DOCS / "results/processor.md").read_text("utf-8").partition("## The long desk")[2]
    found = again.by_method(_made_twice("table1"))
    both = {
        method: [" ".join(f"{row['final']:.2f}" for row in rows) for rows in zip(*pairs, strict=True)]
        for (method, _), pairs in found.items()
    }
    assert {method: len(pairs) for (method, _), pairs in found.items()} == {"rft": 5, "grpo": 5, "ppo": 3}
    assert both["rft"][0] == both["rft"][1]
    for first, second in both.values():
        assert f"| {first} | {second} |" in text
