"""What a page of docs/results/ quotes of a study is what its rows say: each `mean [low, high]`, and each row by seed.

A mean has a bootstrap interval; what has a sign is a difference, and has Student's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from documents import DOCS

from flows.evidence.claims import BASELINES
from flows.evidence.study.figures import at, differences, stratified_mean, students_mean
from flows.evidence.study.rows import Row, evaluated

STUDIES = sorted(
    path
    for path in (DOCS / "results").glob("*.md")
    if "<!-- table" in path.read_text("utf-8") and path.stem != "processor"
)
"""Pages with a table of rows. Two files of the same runs are on one page alone: tests/test_again.py has it."""
NUMBER = r"([+-]?\d?\.\d\d)"
QUOTED = re.compile(rf"{NUMBER} \[{NUMBER}, {NUMBER}\]")
SEEDS = re.compile(r"(?<![\w.])(?:\d?\.\d\d ){2,4}\d?\.\d\d(?![\w.])")
ROUNDED = 0.0051  # two digits, and what binary makes of them


def texts_of_rows(page: Path) -> list[str]:
    """A page without what no row has: figures of programs, and of an earlier base model. The claims are of two studies."""
    text = re.sub(r"^\| (?:7|8|10) \|.*|^.*base model before.*", "", page.read_text("utf-8"), flags=re.MULTILINE)
    return text.split("\n## The same claims")


def rows_of(section: str) -> list[Row]:
    """The table's rows of the files that a page names."""
    cells: dict[tuple[str, str, int], Row] = {}
    for name in sorted(set(re.findall(r"results/(\w+\.jsonl)", section))):
        for row in map(json.loads, (DOCS / "results" / name).read_text("utf-8").splitlines()):
            if row["part"] == "table":
                cells[row["method"], row["task"], row["seed"]] = row
    return sorted(cells.values(), key=lambda row: row["seed"])


def measured(rows: list[Row], costs: dict[str, set[int]]) -> Iterator[list[Row]]:
    """The rows with what may be compared as their `final`: on test, on validation at the end and after so many episodes or
    CPU seconds, wins and, where rows have them, returns.
    """
    yield rows
    with_return = [row for row in rows if "final_return" in row]
    yield [row | {"final": row["final_return"]} for row in with_return]
    for measure, some in (("win_rate", rows), ("return", with_return)):
        yield [row | {"final": evaluated(row)[-1][measure]} for row in some]
        for axis, at_costs in costs.items():
            for x in at_costs:
                yield [row | {"final": at(evaluated(row), axis, x, measure)} for row in some]


def parts(seeds: list[Any]) -> tuple[list[Any], ...]:
    return (seeds, seeds[:3], seeds[:5], seeds[5:])


def samples(rows: list[Row]) -> Iterator[list[list[float]]]:
    """What an interval may be of, by task one number a seed: of one method or its base, and what one has over another, run by run;
    of all seeds, of the first three, and of the five that were run first and those added.
    """
    arms: dict[str, list[Row]] = {}
    by_task: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        arms.setdefault(row["method"], []).append(row)
        by_task.setdefault((row["method"], row["task"]), []).append(row)
    for arm in by_task.values():
        yield from ([[row[what] for row in some]] for some in parts(arm) for what in ("final", "base"))
    for one, other in permutations(sorted(arms), 2):
        found = differences(arms[one], arms[other])
        yield from ([some] for values in found.values() for some in parts(values))
        if len(found) > 1:
            yield list(found.values())


def close(quoted: tuple[float, ...], found: tuple[float, ...]) -> bool:
    return all(abs(a - b) < ROUNDED for a, b in zip(quoted, found, strict=True))


def unfounded(section: str, rows: list[Row]) -> list[str]:
    """The intervals and rows by seed in a section that no sample of its rows has."""
    costs = {
        axis: {int(found.replace(",", "")) for found in re.findall(rf"(\d[\d,]*) {name}", section)}
        for axis, name in (("episodes", "episodes"), ("cpu_s", "CPU seconds"))
    }
    known = [
        sample
        for some in measured(rows, costs)
        for sample in samples(some)
        if len(sample[0]) > 1 and not math.isnan(sum(map(sum, sample)))
    ]
    by_mean: dict[int, list[list[list[float]]]] = {}
    for sample in known:
        mean = sum(sum(one) / len(one) for one in sample) / len(sample)
        for cent in {math.floor(100 * mean), math.ceil(100 * mean)}:
            by_mean.setdefault(cent, []).append(sample)
    wrong = []
    for match in QUOTED.finditer(section):
        interval = students_mean if match.group()[0] in "+-" else stratified_mean
        quoted = tuple(map(float, match.groups()))
        means = map(interval, by_mean.get(round(100 * quoted[0]), []))
        if not any(close(quoted, (mean.value, mean.low, mean.high)) for mean in means):
            wrong.append(match.group())
    for by_seed in SEEDS.findall(section):
        quoted = tuple(map(float, by_seed.split()))
        if not any(len(sample[0]) == len(quoted) and close(quoted, tuple(sample[0])) for sample in known):
            wrong.append(by_seed)
    return wrong


@pytest.mark.parametrize("page", STUDIES, ids=lambda page: page.stem)
def test_what_is_quoted_of_a_study_is_in_its_rows(page: Path) -> None:
    for text in texts_of_rows(page):
        assert len(QUOTED.findall(text)) > 5
        assert unfounded(text, rows_of(text)) == []


VERSUS = re.compile(rf"{NUMBER} \[{NUMBER}, {NUMBER}\] (?:over|against) (?:`([^`]+)`|(\w+))")


@pytest.mark.parametrize(
    ("title", "file"),
    [
        ("Sixteen claims, three seeds", "claims.jsonl"),
        ("The same claims, tuned, five seeds", "table1.jsonl"),
    ],
)
def test_the_claims_differences_are_their_rows_by_student_s_interval(title: str, file: str) -> None:
    """Rows 1, 3 to 6 and 15: what one arm has over another that is named behind its interval."""
    text = (DOCS / "results/claims.md").read_text("utf-8")
    section = re.split(r"\n## ", text[text.index(f"## {title}") :])[0]
    table = section[section.index("| | claim |") :]
    arms: dict[str, list[Row]] = {}
    for row in rows_of(f"results/{file}"):
        arms.setdefault(row["method"], []).append(row)
    seen = []
    for line in table.splitlines():
        if re.match(r"\| (?:1|3|4|5|6|15) \|", line):
            ours = "by turn" if line.startswith("| 15") else "nlac"
            for *quoted, named, word in VERSUS.findall(line):
                other = named or word
                mean = students_mean(list(differences(arms[ours], arms[other]).values()))
                assert close(tuple(map(float, quoted)), (mean.value, mean.low, mean.high)), (line, other)
                seen.append(other)
    assert {*BASELINES, "parser", "sac", "sac, told", "no replay", "frozen", "hindsight", "nlql", "by episode"} <= set(
        seen
    )


def test_a_figure_that_no_row_gives_is_found() -> None:
    [text] = texts_of_rows(DOCS / "results/pairs.md")
    rows = rows_of(text)
    quoted = QUOTED.search(text)
    assert quoted is not None
    assert unfounded(text.replace(quoted.group(), ".77 [.70, .79]", 1), rows) == [".77 [.70, .79]"]
    assert unfounded(text + "\n.77 .70 .79\n", rows) == [".77 .70 .79"]
    assert unfounded(text + "\n+.08 [-.24, +.40]\n", rows) == []
    assert unfounded(text + "\n+.08 [+.00, +.23]\n", rows) == ["+.08 [+.00, +.23]"]  # the bootstrap's


@pytest.mark.parametrize(
    "page",
    [DOCS / "results.md", DOCS / "explanation/choosing.md", DOCS.parent / "README.md"],
    ids=lambda page: page.name,
)
def test_what_other_pages_quote_is_in_the_results(page: Path) -> None:
    sources = [
        *(DOCS / "results").glob("*.md"),
        *(DOCS / "archive").glob("results-*.md"),
        DOCS / "explanation/measurements.md",
    ]
    there = {tuple(map(float, found)) for path in sources for found in QUOTED.findall(path.read_text("utf-8"))}
    quoted = QUOTED.findall(page.read_text("utf-8"))
    assert quoted
    assert [" ".join(found) for found in quoted if tuple(map(float, found)) not in there] == []
