"""docs/pictures.py draws what the kept visit says. That the files are what it draws is checked with the generated pages."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pictures


def test_the_tree_tells_how_many_tokens_the_rows_of_the_visit_share() -> None:
    visit = json.loads(pictures.VISIT.read_text(encoding="utf-8"))
    rows = [visit["ids"], *(row["ids"] for row in visit["rows"])]
    prefixes = {tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)}
    drawn = pictures.tree(visit)
    assert f"have {sum(map(len, rows))} tokens. As a tree they have {len(prefixes)}." in drawn
    assert sum(one["tokens"] for one in visit["line"]) == len(visit["ids"])
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


def test_what_was_said_is_text_and_no_markup() -> None:
    visit = json.loads(pictures.VISIT.read_text(encoding="utf-8"))
    visit["rows"][0]["said"] = visit["rows"][0]["own"] = "Action: <b> & </b>"
    for drawn in (pictures.loop(visit), pictures.tree(visit)):
        assert ElementTree.fromstring(drawn).tag.endswith("svg")
