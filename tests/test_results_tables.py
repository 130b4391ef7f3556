"""`python docs/tables.py`: the tables of the results pages are what their rows give."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from documents import DOCS, load_file

NAMED = re.compile(r"<!-- table ([\w-]+) -->")


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return load_file(DOCS / "tables.py", "docs_tables")


@pytest.fixture
def two_methods(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [_row("fast", 1, 0.9), _row("fast", 2, 0.7), _row("slow", 1, 0.3), _row("slow", 2, 0.3)]
    rows += [_row("fast", 9, 0.8, "tuning", ["lr=1"]), _row("fast", 9, 0.6, "tuning", [])]
    monkeypatch.setattr(tables, "stored", lambda name: tuple(rows))


def _row(method: str, seed: int, final: float, part: str = "table", setting: list[str] | None = None) -> dict[str, Any]:
    """Half-way it has half of what it has in the end, after 100 episodes."""
    rates = enumerate((0.0, final / 2, final), -1)
    curve = [{"iteration": n, "win_rate": rate, "episodes": 50.0 * (n + 1), "cpu_s": 10.0 * seed} for n, rate in rates]
    named = {"part": part, "method": method, "task": "desk", "seed": seed, "setting": setting or []}
    return {**named, "base": 0.0, "final": final, "curve": curve}


def _plan(**keys: Any) -> dict[str, Any]:
    return {"labels": {"slow": "the slow one"}, "columns": {}, "tables": {"one": {"data": "toy", **keys}}}


def test_the_tables_of_the_pages_are_what_the_rows_give(tables: ModuleType) -> None:
    assert tables.main(["--check"]) == 0, "run: python docs/tables.py"


def test_every_table_stands_on_one_page(tables: ModuleType) -> None:
    used = [name for page in tables.PAGES for name in NAMED.findall(page.read_text("utf-8"))]
    assert sorted(used) == sorted(tables.spec_file()["tables"])


def test_a_page_that_is_not_up_to_date_is_found(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "pairs.md"
    right = (DOCS / "results/pairs.md").read_text("utf-8")
    page.write_text(right.replace("| 0.09 [", "| 0.19 [", 1), "utf-8")
    monkeypatch.setattr(tables, "PAGES", (page,))
    assert tables.main(["--check"]) == 1
    assert "pairs.md" in capsys.readouterr().err
    assert page.read_text("utf-8") != right
    assert tables.main([]) == 0
    assert page.read_text("utf-8") == right


@pytest.mark.usefixtures("two_methods")
def test_cells_by_hand(tables: ModuleType) -> None:
    """Differences .6 and .4: their mean is .5, and Student's interval 12.71 times the standard error of .1."""
    columns = [
        {"head": "by seed", "show": "seeds"},
        {"head": "at 50", "at": 50},
        {"head": "minus", "show": "minus", "of": "slow"},
        {"head": "to", "show": "to"},
        {"head": "s", "show": "end", "axis": "cpu_s"},
    ]
    found = tables.table("one", _plan(lines=["fast", "slow", "none"], columns=columns)).splitlines()
    assert found[0] == "| method | by seed | at 50 | minus | to | s |"
    assert found[2] == "| `fast` | 0.90 0.70 | 0.40 [0.35, 0.45] | +0.50 [-0.77, +1.77] | 100 | 15 |"
    assert found[3] == "| the slow one | 0.30 0.30 | 0.15 [0.15, 0.15] |  | not reached (0 of 2) | 15 |"
    assert found[4] == "| `none` |  |  |  |  |  |"


@pytest.mark.usefixtures("two_methods")
def test_where_one_more_run_should_lie(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """.7, .8, .9: standard deviation .1, times the root of 1 + 1/3 and 4.303. Of two runs the interval is all of 0 to 1."""
    columns = [{"head": "one more", "show": "next"}]
    assert tables.table("one", _plan(lines=["fast"], columns=columns)).endswith("| `fast` | 0.00 to 1.00 |")
    rows = tuple(_row("fast", seed, final) for seed, final in enumerate((0.7, 0.8, 0.9)))
    monkeypatch.setattr(tables, "stored", lambda name: rows)
    assert tables.table("one", _plan(lines=["fast"], columns=columns)).endswith("| `fast` | 0.30 to 1.00 |")
    monkeypatch.setattr(tables, "stored", lambda name: rows[:1])
    assert tables.table("one", _plan(lines=["fast"], columns=columns)).endswith("| `fast` |  |")


@pytest.mark.usefixtures("two_methods")
def test_a_line_names_its_own_seeds_and_tuning_shows_what_was_chosen(tables: ModuleType) -> None:
    lines = [{"label": "first seed", "method": "fast", "seeds": [1]}]
    columns = [{"head": "test"}, {"head": "less", "show": "less", "of": "slow"}]
    assert tables.table("one", _plan(lines=lines, columns=columns)).endswith("| first seed | 0.90 | -0.60 |")
    tried = [{"head": "tuning", "show": "tuning"}, {"head": "chosen", "show": "chosen"}]
    assert tables.table("one", _plan(lines=["fast"], columns=tried)).endswith("| `fast` | 0.80, 0.60 | `lr=1` |")


def test_the_pictures_are_there_and_can_be_drawn_again(tables: ModuleType) -> None:
    pictures = tables.spec_file()["pictures"]
    assert all((DOCS / f"results/{name}.svg").is_file() for name in pictures)
    drawn = tables.picture(pictures["pairs"])
    assert drawn.startswith("<?xml")
    assert "parser (3)" in drawn


def test_the_figure_of_the_width_study_has_a_point_a_size_and_its_interval(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The differences are .6 and .4 on 3 actions, and on 9 there is one pair, which has no interval."""
    finals = [("3", "why", 1, 0.9), ("3", "why", 2, 0.7), ("3", "no", 1, 0.3), ("3", "no", 2, 0.3)]
    finals += [("9", "why", 1, 0.8), ("9", "no", 1, 0.1)]
    rows = tuple(_row(method, seed, final) | {"task": task} for task, method, seed, final in finals)
    monkeypatch.setattr(tables, "stored", lambda name: rows)
    sizes, arms = {"3": 3, "9": 9, "27": 27}, {"why": "told why", "no": "told No", "other": "not run yet"}
    drawn = tables.picture({"data": "toy", "sizes": sizes, "arms": arms, "minus": {"value of why": ["why", "no"]}})
    texts = re.findall(r">([^<>\n]+)</text>", drawn)
    assert drawn.startswith("<?xml") and {*arms.values(), "value of why", "27", "actions a step"} <= set(texts)
    found = load_file(DOCS / "widths.py", "docs_widths").means({"3": [0.6, 0.4], "9": [0.7]}, sizes)
    assert [(n, round(one.value, 2)) for n, one in found.items()] == [(3, 0.5), (9, 0.7)]
    assert found[3].low < 0.4 and found[9].low != found[9].low  # NaN


@pytest.mark.parametrize("page", sorted((DOCS / "results").glob("*.md")), ids=lambda page: page.stem)
def test_a_study_s_page_has_question_answer_and_limits(page: Path) -> None:
    text = page.read_text("utf-8")
    assert text.startswith("# ")
    for part in ("\n**Question.** ", "\n**Answer.** ", "\n## Limits\n"):
        assert part in text


def test_the_page_of_questions_is_short_and_links_to_every_study() -> None:
    text = (DOCS / "results.md").read_text("utf-8")
    assert len(text.splitlines()) <= 150
    for page in (DOCS / "results").glob("*.md"):
        assert f"](results/{page.name})" in text, page.name
