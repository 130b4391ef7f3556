"""The page of a flow run: what it shows, and that a run goes on where it cannot be kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.orchestration import page
from flows.telling import Iteration, Summary

RATES = {"evaluate/win_rate": 0.5, "evaluate/win_low": 0.4, "evaluate/win_high": 0.6, "collect/return": 0.25}


def test_it_has_a_row_an_iteration_the_result_and_the_way_to_mlflow() -> None:
    ends: dict[str, Any] = {"win_rate": 0.5, "win_low": 0.4, "win_high": 0.6, "iteration": 0}
    summary = Summary("3f9c", "demo", "FINISHED", 1.0, base=ends, final=ends)
    text = page.markdown([(-1, {"evaluate/win_rate": 0.0}), (0, RATES)], "http://127.0.0.1:5000/#/x", summary)
    lines = text.splitlines()
    assert lines[0].startswith("[MLflow's run](http://127.0.0.1:5000/#/x)")
    assert any(line.startswith("| base |") for line in lines)
    assert lines[-1].startswith("| 0 | 0.50 (0.40-0.60)") and lines[-1].endswith("| 0.25 |")
    assert "Validation: " in text and "0.00 -> 0.50, best 0.50" in text and "adapter of iteration 0" in text


def test_a_run_goes_on_where_its_page_cannot_be_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def away(*args: Any, **kwargs: Any) -> None:
        tried.append(args)
        raise ConnectionError("the server is away")

    monkeypatch.setattr(page, "create_markdown_artifact", away)
    shown = page.Page(home, "#/x")
    for number in range(2):
        shown.add(Iteration(number, {}, RATES, 0.0))
    assert len(tried) == 2
