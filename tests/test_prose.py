"""docs/prose.py counts what a reader reads, and docs/curves.py draws what the rows say."""

from __future__ import annotations

import re
from pathlib import Path

import curves
import prose
import pytest

PAGE = """# A heading of many words that is not counted

One two three. Four `code in backticks` six!
It goes on here, e.g. over a line. See [a link](nowhere.md) (and more).

- An item
- Another item,
  on two lines

| a table | is not counted |
| --- | --- |

    indented code is not counted

```bash
nor is this
```
"""


def test_sentences_are_those_of_paragraphs_and_items() -> None:
    assert prose.sentences(PAGE) == [
        "One two three.",
        "Four code six!",
        "It goes on here, e.g over a line.",
        "See a link (and more).",
        "An item",
        "Another item, on two lines",
    ]


@pytest.mark.parametrize(("words", "status"), [(18, 0), (19, 1)])
def test_a_mean_above_the_limit_is_an_error(
    words: int, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{'word ' * words}end.\n\n{'word ' * (words - 2)}end.\n")
    assert prose.main([str(page)]) == status
    assert f"mean {words:.1f} words" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "status"), [(35, 0), (36, 1)])
def test_one_sentence_that_is_too_long_is_an_error(words: int, status: int, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{'word ' * (words - 1)}end. {'Short. ' * 9}\n")
    assert prose.main([str(page)]) == status


def test_the_curves_end_where_the_rows_end() -> None:
    picture = curves.curves()
    for panel in curves.PANELS:
        for arm in panel.arms:
            points = curves._points(panel, arm.method)
            assert points[0][0] == 0
            assert all(worst <= mean <= best for _, worst, mean, best in points)
            end = f"{curves.HIGH * (1 - points[-1][2]):.1f}"
            assert re.search(rf',{end}" fill="none" stroke="{arm.colour}"', picture)


def test_an_arm_without_rows_is_told() -> None:
    with pytest.raises(ValueError, match="no rows of 'nothing'"):
        curves._points(curves.PANELS[0], "nothing")
