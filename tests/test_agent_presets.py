"""The presets of math, game24 and wiki_search run their whole loop on the model that ships for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows import presets
from stages.corpora import agents, game24_trees, wiki_walks
from stages.corpora.tokenizers import byte_tokenizer
from turnwise import cli

MODEL = Path(__file__).parent.parent / "data" / "base_agents"
SMALL = {
    "iterations": 1, "collect.first_episodes": 8, "self_ac.epochs": 1, "self_ac.batch": 4, "evaluate.episodes": 6, "model.lora_rank": 4,
}  # fmt: skip


@pytest.mark.parametrize(("preset", "options"), [("game24", game24_trees.OPTIONS), ("wiki_search", wiki_walks.OPTIONS)])
def test_a_preset_plays_what_its_base_model_was_shown(preset: str, options: dict[str, Any]) -> None:
    assert presets.load(preset).task.options.items() >= options.items()


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["math_cot", "game24", "wiki_search"])
def test_a_whole_loop_on_the_shipped_model(
    preset: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nearly every reply can be read, every episode is one row of turns, each with a value. An untrained model's
    replies cannot be read at all.
    """
    (home / "data").mkdir(exist_ok=True)
    (home / "data" / "base_agents").symlink_to(MODEL)
    monkeypatch.chdir(home)
    sets = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]
    assert cli.main(["run", preset, "--plain", "--quiet", "--json", *sets]) == 0
    run: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert run["status"] == "FINISHED"
    (_, row) = run["iterations"]
    assert set(row["runs"]) == {"collect", "self_ac", "evaluate"}
    found = row["metrics"]
    assert found["collect/malformed_frac"] < 0.1
    assert found["collect/turns"] > 2
    assert found["self_ac/rows"] == 8 and found["self_ac/split"] == found["self_ac/dropped"] == 0
    assert run["final"]["episodes"] == 6


def test_the_shipped_model_is_small_and_holds_no_pickle() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 6_000_000
    assert not [file.name for file in MODEL.iterdir() if file.suffix in (".bin", ".pt", ".pkl")]


def test_the_shipped_tokenizer_is_the_one_of_the_corpus() -> None:
    """So the prompts that the model was made with are those of today: a changed word of a prompt wants a new model."""
    made = byte_tokenizer(agents.texts(agents.prompts()), 1000)
    assert (
        json.loads((MODEL / "tokenizer.json").read_text())["model"]
        == json.loads(made.backend_tokenizer.to_str())["model"]
    )
