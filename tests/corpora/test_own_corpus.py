"""A corpus of one's own: a module of the project folder, from which a small model of a task is made."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows import presets, registry
from stages.corpora import own
from stages.frame import own as modules
from stages.frame.types import UsageError
from stages.store.contents import code_hash, contents
from turnwise import cli

WORDS = """from stages.corpora import Example
from stages.frame.types import Message

SHARE = {"policy": 0.5, "corrector": 0.5}


def example(rng, roles, role=None):
    role = role or rng.choice(list(SHARE))
    state = [{"role": "system", "content": "Say a number."}, {"role": "user", "content": "Now."}]
    said = f"Thought: any. Action: {rng.randint(1, 9)}"
    prompt = roles.policy(state) if role == "policy" else roles.prompt(role, state, text=said)
    return Example(role, tuple(prompt), said)
"""


@pytest.fixture
def project(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (home / "teach").mkdir()
    (home / "teach" / "words.py").write_text(WORDS)
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield home
    forget()


def forget() -> None:
    for name in ("teach.words", "teach"):
        sys.modules.pop(name, None)
    modules._imported.cache_clear()
    code_hash.cache_clear()


def test_a_model_is_made_from_it_with_its_rows_and_a_card(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = (
        "corpus=teach.words", "steps=2", "width=16", "layers=1", "heads=2", "batch=4", "general_rows=5",
        "probe_rows=3",
    )  # fmt: skip
    argv = [part for one in sets for part in ("--set", f"pretrain.{one}")]
    assert cli.main(["pretrain", *argv, "--out", "small", "--home", str(project), "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)["metrics"]
    assert {"pretrain/policy", "pretrain/corrector"} <= found.keys()
    rows = [json.loads(line) for line in (project / "small" / "probe.jsonl").read_text().splitlines()]
    assert [row["role"] for row in rows] == ["policy"] * 3 + ["corrector"] * 3
    vocabulary = json.loads((project / "small" / "tokenizer.json").read_text())["model"]["vocab"]
    assert {*"123456789", "Say", "Thought:", "any", "Judge", "unreadable"} <= vocabulary.keys()
    assert "a base model for a task of one's own" in (project / "small" / "README.md").read_text().lower()


def test_its_code_is_part_of_the_fingerprint_of_pretrain(project: Path) -> None:
    def made() -> Any:
        forget()
        return contents(registry.load_stage("pretrain"), presets.resolve({}, ["pretrain.corpus=teach.words"]))

    before = made()
    (project / "teach" / "words.py").write_text(f"# Ours.\n{WORDS}")
    assert made() == before
    (project / "teach" / "words.py").write_text(WORDS.replace("1, 9", "1, 8"))
    assert made().keys() == before.keys() == {"pretrain.corpus"} and made() != before
    assert contents(registry.load_stage("pretrain"), presets.resolve({})) == {}


@pytest.mark.parametrize(
    ("corpus", "said"),
    [
        (
            "dsek",
            "pretrain.corpus: value error, wanted desk, twenty, maths, wide, agents, or a module of your own with a dot",
        ),
        ("teach.word", "pretrain.corpus: there is no module 'teach.word'"),
        ("teach.empty", "pretrain.corpus: teach/empty.py lacks SHARE, example; it has to export SHARE, example."),
    ],
)
def test_what_is_wrong_with_one_is_a_sentence(corpus: str, said: str, project: Path) -> None:
    (project / "teach" / "empty.py").write_text("")
    with pytest.raises(UsageError, match=re.escape(said)):
        own.load(presets.resolve({}, [f"pretrain.corpus={corpus}"]).pretrain.corpus)  # type: ignore[attr-defined]


def test_a_reply_is_right_that_can_be_read_where_the_corpus_does_not_say() -> None:
    for role, good, bad in (
        ("policy", "Thought: any. Action: 3", "3"),
        ("successor", "Future: won.", "won"),
        ("evaluator", "Optimality: No. Why.", "no"),
        ("corrector", "same", "other"),
    ):
        row = {"role": role, "reply": "same"}
        assert own.readable(row, good) == {role: True}
        assert own.readable(row, bad) == {role: False}
