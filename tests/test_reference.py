"""The generated pages of docs/reference/ hold everything that they are made from."""

from __future__ import annotations

import re
from pathlib import Path

from documents import DOCS, config_keys, generator, text_of

from stages.store.columns import SHARED, WHAT
from stages.store.tables import TABLES


def test_every_config_key_is_on_its_page_once() -> None:
    found = re.findall(r"^\| `([\w.]+)` \|", text_of(DOCS / "reference/config.md"), re.MULTILINE)
    keys = [key for key, field in config_keys().items() if "." in key or not hasattr(field.annotation, "model_fields")]
    assert not set(keys) - set(found)
    assert len([key for key in found if not key.startswith("task.options.")]) == len(keys)


def test_the_options_of_every_environment_are_on_the_page_of_config_keys() -> None:
    from stages import envs

    page = text_of(DOCS / "reference/config.md")
    for name in envs.environments():
        assert f"## Options of {name}\n" in page


def test_every_column_says_what_it_holds_and_no_other_does() -> None:
    assert WHAT.keys() == TABLES.keys()
    for table, columns in TABLES.items():
        own = WHAT[table][1]
        assert set(own) | (set(SHARED) & set(columns)) == set(columns), table
        assert not set(own) & set(SHARED), table


def test_a_type_is_told_in_words() -> None:
    kind = generator().kind
    assert kind({"type": "number", "exclusiveMinimum": 0, "maximum": 1}) == "number, above 0, at most 1"
    assert (
        kind({"anyOf": [{"type": "string"}, {"items": {"type": "string"}, "type": "array"}]}) == "text or list of texts"
    )
    assert kind({"enum": ["turn", "episode"], "type": "string"}) == "`turn`, `episode`"


def test_a_list_of_modules_becomes_a_table_and_other_indented_text_stays_code() -> None:
    text = generator().room_text(
        "What it is\n    a = 1\nand more.\n\nModules:\n\n    one   the first | best\n    two   the second\n"
    )
    assert text == (
        "What it is\n\n    a = 1\n\nand more.\n\n"
        "| file | what is in it |\n|---|---|\n| `one.py` | the first \\| best |\n| `two.py` | the second |\n"
    )


def test_a_folder_without_a_list_has_the_first_sentence_of_each_file(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text('"""A room."""')
    (tmp_path / "one.py").write_text('"""Counts files\nand `x.py`. Second sentence.\n\nMore.\n"""')
    said = generator().said_of_files(tmp_path)
    assert said == [("one", "Counts files and `x.py`")]
    assert generator().room_text("A room.", said).endswith("|---|---|\n| `one.py` | Counts files and `x.py` |\n")


def test_a_tag_in_a_cell_is_shown_and_no_markup() -> None:
    assert generator().grid(("a",), [("x <think> | `<b>`",)]) == "| a |\n|---|\n| x `<think>` \\| `<b>` |\n"
