"""Which attention kernel a row takes. What a kernel is chosen by needs no numbers, so the trees lie on no device."""

from __future__ import annotations

import pytest

from stages.learn.tree import Branch, Tree, grow
from stages.learn.tree_flex import FlexLayout
from stages.learn.tree_kernel import MEASURED, Measured, faster, layout_for
from stages.learn.tree_layout import Layout


def row(tokens: int, branches: int, lines: int = 1) -> Tree:
    """So many tokens, and branches of ten of them for each line."""
    length = tokens // lines - 10 * branches
    grown = grow(
        [[e] * length for e in range(lines)],
        [Branch(e, length, [7] * 10) for e in range(lines) for _ in range(branches)],
    )
    assert len(grown.ids) == tokens
    return grown


@pytest.mark.parametrize("measured", MEASURED)
def test_a_measured_row_takes_the_kernel_that_was_faster_and_on_a_cpu_sdpa(measured: Measured) -> None:
    tree = row(measured.tokens, measured.branches)
    assert faster(tree.to("meta")) == ("flex" if measured.flex < measured.sdpa else "sdpa")
    assert faster(tree) == "sdpa"


def test_both_kernels_win_somewhere_and_branches_count_for_each_line() -> None:
    assert {m.flex < m.sdpa for m in MEASURED} == {True, False}
    assert faster(row(16_000, 24).to("meta")) == "flex"
    assert faster(row(16_000, 8, lines=4).to("meta")) == faster(row(16_000, 8).to("meta")) == "sdpa"


def test_what_is_shorter_than_all_measured_rows_and_what_has_no_branch_takes_sdpa() -> None:
    assert faster(row(7_080, 26).to("meta")) == faster(row(20_000, 0).to("meta")) == "sdpa"


def test_a_kernel_that_is_asked_for_is_taken() -> None:
    assert isinstance(layout_for(row(200, 2), "flex"), FlexLayout)
    assert isinstance(layout_for(row(200, 2), "sdpa"), Layout)
    assert isinstance(layout_for(row(200, 2), "auto"), Layout)
