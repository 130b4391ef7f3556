"""What docs/results.md quotes of a study is what its rows say: each `mean [low, high]` of win rates, and each row by seed."""

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

from flows.claims.sources import BASELINES
from flows.study.figures import at, differences, stratified_mean, students_mean
from flows.study.rows import Row, evaluated

STUDIES = (
    "The claims", "Table 1", "Long visits", "Frozen episodes", "Sweeps", "Self-AC: credit by turn",
    "Self-AC on arithmetic", "Horizon", "The ladder", "A critic that is a number", "Noise", "20 Questions",
    "Mathematics", "Held-out pairs",
)  # fmt: skip
"""Sections whose intervals are of win rates; of the claims the table of methods, before that of the verdicts."""
NUMBER = r"([+-]?\d?\.\d\d)"
QUOTED = re.compile(rf"{NUMBER} \[{NUMBER}, {NUMBER}\]")
STUDENTS = re.compile(rf"{NUMBER}(?: \[[^]]*\])?, t \[{NUMBER}, {NUMBER}\]")
SEEDS = re.compile(r"(?<![\w.])(?:\d?\.\d\d ){2,4}\d?\.\d\d(?![\w.])")
ROUNDED = 0.0051  # two digits, and what binary makes of them


def sections() -> dict[str, str]:
    text = (DOCS / "results.md").read_text("utf-8")
    return {part.splitlines()[0]: part.partition("| | claim |")[0] for part in re.split(r"\n## ", text)[1:]}


def rows_of(section: str) -> list[Row]:
    """The table's rows of the files that a section names."""
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
    for form, interval in ((QUOTED, stratified_mean), (STUDENTS, students_mean)):
        for match in form.finditer(section):
            quoted = tuple(map(float, match.groups()))
            means = map(interval, by_mean.get(round(100 * quoted[0]), []))
            if not any(close(quoted, (mean.value, mean.low, mean.high)) for mean in means):
                wrong.append(match.group())
    for by_seed in SEEDS.findall(section):
        quoted = tuple(map(float, by_seed.split()))
        if not any(len(sample[0]) == len(quoted) and close(quoted, tuple(sample[0])) for sample in known):
            wrong.append(by_seed)
    return wrong


@pytest.mark.parametrize("name", STUDIES)
def test_what_is_quoted_of_a_study_is_in_its_rows(name: str) -> None:
    section = next(text for title, text in sections().items() if title.startswith(name))
    if name == "The claims":  # the text before speaks of earlier rows, too
        section = "results/claims.jsonl\n" + section[section.index("| method |") :]
    assert len(QUOTED.findall(section)) > 5
    assert not unfounded(section, rows_of(section))


VERSUS = re.compile(rf"{NUMBER} \[{NUMBER}, {NUMBER}\] (?:over|against) (?:`([^`]+)`|(\w+))")


@pytest.mark.parametrize(
    ("title", "file"),
    [
        ("The claims of the two sources, small", "claims.jsonl"),
        ("The claims, tuned and with five seeds", "table1.jsonl"),
    ],
)
def test_the_claims_differences_are_their_rows_by_student_s_interval(title: str, file: str) -> None:
    """Rows 1, 3 to 6 and 15: what one arm has over another that is named behind its interval."""
    text = (DOCS / "results.md").read_text("utf-8")
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
    section = next(text for title, text in sections().items() if title.startswith("Held-out pairs"))
    rows = rows_of(section)
    quoted = QUOTED.search(section)
    assert quoted is not None
    assert unfounded(section.replace(quoted.group(), ".77 [.70, .79]", 1), rows) == [".77 [.70, .79]"]
    assert unfounded(section + "\n.77 .70 .79\n", rows) == [".77 .70 .79"]
    assert unfounded(section + "\n+.08 [+.00, +.23], t [-.24, +.40]\n", rows) == []
    assert unfounded(section + "\n+.08 [+.00, +.23], t [+.01, +.40]\n", rows) == ["+.08 [+.00, +.23], t [+.01, +.40]"]


@pytest.mark.parametrize("page", [DOCS / "choosing.md", DOCS.parent / "README.md"], ids=lambda page: page.name)
def test_what_other_pages_quote_is_in_the_results(page: Path) -> None:
    there = {
        tuple(map(float, found))
        for name in ("results.md", "results-earlier.md", "measurements.md")
        for found in QUOTED.findall((DOCS / name).read_text("utf-8"))
    }
    quoted = QUOTED.findall(page.read_text("utf-8"))
    assert len(quoted) > 5
    assert [" ".join(found) for found in quoted if tuple(map(float, found)) not in there] == []
