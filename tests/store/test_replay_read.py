"""What a stage reads: the columns that it names, as arrays, in the order written."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from toys import turn_row

from stages.frame.types import MissingInput
from stages.store.replay import PIECE, Replay


def turn_of(episode: str, turn: int, prompt: list[int] | None = None, log_probs: Any = (-0.5, -0.25)) -> dict[str, Any]:
    row = turn_row(turn, [1, 2] if prompt is None else prompt, [7, 8], list(log_probs))
    return {**row, "episode_id": episode}


def test_a_stage_reads_the_columns_that_it_names_and_nothing_else(replay: Replay) -> None:
    rows = [turn_of(name, turn) for name in ("a", "b") for turn in (0, 1)]
    replay.commit("r1", "collect", {"turns": rows})
    replay.commit("r2", "collect", {"turns": rows[:1]})
    found = replay.read("turns", ["r2", "r1"], ["episode_id", "turn", "action_ids", "log_probs"])
    assert [(row["episode_id"], row["turn"]) for row in found] == [("a", 0), ("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert set(found[0]) == {"episode_id", "turn", "action_ids", "log_probs"}
    assert (found[0]["action_ids"], found[0]["log_probs"]) == (array("i", [7, 8]), array("d", [-0.5, -0.25]))
    keys = [("b", 1), ("a", 0), ("c", 0)]
    chosen = replay.read("turns", ["r1"], ["episode_id", "prompt_ids"], by=["episode_id", "turn"], among=keys)
    assert [row["episode_id"] for row in chosen] == ["a", "b"]  # in the order written, not in that of the keys
    assert [len(replay.read("turns", ["r1"], ["turn"], by=["turn"], among=few)) for few in ([(1,)], [])] == [2, 0]


def test_a_column_that_there_is_not_and_a_run_that_wrote_nothing_are_told(replay: Replay) -> None:
    replay.commit("r1", "collect", {})
    with pytest.raises(ValueError, match="no column 'texts' in table turns; there are run_id, episode_id"):
        replay.read("turns", ["r1"], ["texts"])
    with pytest.raises(ValueError, match="no column 'texts'"):
        replay.read("turns", ["r1"], ["turn"], by=["texts"], among=[("x",)])
    with pytest.raises(MissingInput, match="rows of turns were wanted from run r9, but it never committed"):
        replay.read("turns", ["r1", "r9"], ["turn"])
    assert replay.read("turns", ["r1"], ["turn"]) == replay.read("turns", [], ["turn"]) == []


def test_rows_keep_their_order_over_many_pieces(replay: Replay) -> None:
    """More rows than DuckDB hands over at a time, lists of all lengths, empty and missing ones among them."""
    n = 2 * PIECE + 7
    turns = [turn_of(f"e{i % 11}", i, list(range(i % 5)), [-0.5] * (i % 3)) for i in reversed(range(n))]
    turns[3]["log_probs"] = None
    turns[4]["log_probs"] = [-0.5, None]
    replay.commit("r1", "collect", {"turns": turns})
    found = replay.read("turns", ["r1"], ["turn", "prompt_ids", "log_probs"])
    assert [row["turn"] for row in found] == [*reversed(range(n))]
    assert [list(row["prompt_ids"]) for row in found] == [one["prompt_ids"] for one in turns]
    assert [row["log_probs"] for row in found][3:5] == [None, [-0.5, None]]
    rest = [i for i in range(n) if i not in (3, 4)]
    assert [list(found[i]["log_probs"]) for i in rest] == [turns[i]["log_probs"] for i in rest]
    few = replay.read("turns", ["r1"], ["turn"], by=["episode_id"], among=[("e3",)])
    assert [row["turn"] for row in few] == [i for i in reversed(range(n)) if i % 11 == 3]


def test_arrays_hold_what_a_list_would(replay: Replay) -> None:
    """To the last bit, as the rows that a person is shown."""
    turns = [turn_of("a", 0, [2**31 - 1, 0, -5], [-1e-300, -0.1]), turn_of("a", 1, [], [])]
    replay.commit("r1", "collect", {"turns": turns})
    whole, found = replay.rows("turns", ["r1"]), replay.read("turns", ["r1"], ["prompt_ids", "log_probs"])
    for name in ("prompt_ids", "log_probs"):
        assert [row[name].tolist() for row in found] == [row[name] for row in whole] == [one[name] for one in turns]
    assert not found[1]["prompt_ids"]  # empty, as a list would be
