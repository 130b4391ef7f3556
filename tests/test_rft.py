"""RFT: only what won is learned, with the ids that won."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from stages import rft
from stages.frame.contract import Config, Outputs
from stages.frame.sections import TaskConfig
from stages.frame.types import Outcome, UsageError
from stages.learn.adapter import save_adapter
from stages.play.transitions import episode_rows
from stages.rft import RftConfig, draw, told_rows
from stages.train.model import trainable

WIN = [("Action: check photo", "photo done."), ("mumble", "what?"), ("Action: close phone", "phone done. pass.")]
LOSS = [("Action: check passport", "passport done."), ("Action: close email", "email done. fail.")]
INPUTS = {"collect": ["collect0", "collect1"]}


@pytest.fixture
def bench(base: Path, tmp_path: Path) -> models.Bench:
    bench = models.Bench(base, tmp_path)
    for i, names in enumerate((("Ana", "Ben"), ("Cleo", "Dan"))):
        won = models.make_episode(bench.engine, names[0], WIN, Outcome.SCORED, reward=1.0, malformed=[1])
        lost = models.make_episode(bench.engine, names[1], LOSS, Outcome.SCORED)
        bench.memory.keep(f"collect{i}", Outputs({}, episode_rows([won, lost], i)))
    return bench


def run(bench: models.Bench, inputs: Any = INPUTS, seed: int = 0, **config: Any) -> Outputs:
    return bench.run(rft.STAGE, RftConfig(**config), inputs, seed=seed)


def winning_ids(
    bench: models.Bench, names: Collection[str] = ("Ana", "Cleo")
) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    rows = bench.memory.rows("turns", ["collect0", "collect1"])
    return {
        (tuple(r["prompt_ids"]), tuple(r["action_ids"]))
        for r in rows
        if r["episode_id"] in names and not r["malformed"]
    }


def test_ids_trained_are_the_readable_turns_of_all_wins_so_far(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = models.capture(monkeypatch)
    outputs = run(bench, epochs=3, batch=3)
    assert len(winning_ids(bench)) == 4
    assert sorted(trained) == sorted([*winning_ids(bench)] * 3)
    assert outputs.metrics["rft/wins"] == 4


@pytest.mark.parametrize(
    ("newest", "names"), [(1, ["Cleo"]), (2, ["Ana", "Cleo"]), (9, ["Ana", "Cleo"]), (0, ["Ana", "Cleo"])]
)
def test_the_newest_iterations_alone_are_learned_where_the_config_says_so(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch, newest: int, names: list[str]
) -> None:
    trained = models.capture(monkeypatch)
    outputs = run(bench, newest=newest, epochs=1)
    assert sorted(trained) == sorted(winning_ids(bench, names))
    assert outputs.metrics["rft/wins"] == 2 * len(names)


def test_no_more_rows_than_the_config_says(bench: models.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = models.capture(monkeypatch)
    run(bench, rows=3, epochs=2)
    assert len(set(trained)) == 3
    assert set(trained) < winning_ids(bench)


def test_refilled_rows_are_the_wins_again_as_often_as_each_other(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many steps in every iteration, however few wins there are."""
    trained = models.capture(monkeypatch)
    wins = winning_ids(bench)
    n = 3 * len(wins) + 1
    outputs = run(bench, rows=n, epochs=1, batch=2, refill=True)
    times = Counter(trained)
    assert set(times) == wins and sorted(times.values()) == [3] * (len(wins) - 1) + [4]
    assert outputs.metrics["rft/steps"] == -(-n // 2)
    assert draw([], 5, random.Random(0), refill=True) == []


def test_without_a_win_the_adapter_that_came_in_goes_out_to_the_bit(bench: models.Bench, tmp_path: Path) -> None:
    lost = models.make_episode(bench.engine, "Eva", LOSS, Outcome.SCORED)
    bench.memory.keep("collect2", Outputs({}, episode_rows([lost], 2)))
    save_adapter(
        models.shake(trainable(bench.context(Config(), {}), None), 3, 0.1), tmp_path / "before", bench.engine.model_hash
    )
    bench.memory.files["rftX", "adapter"] = tmp_path / "before"
    outputs = run(bench, {"collect": ["collect2"], "rft": ["rftX"]})
    one, other = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (tmp_path / "before", bench.memory.files["rft0", "adapter"])
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert outputs.metrics == {"rft/steps": 0.0, "rft/wins": 0.0}


def test_it_learns_the_winning_actions_and_nothing_without_steps(bench: models.Bench) -> None:
    """Four actions of about 19 bytes: from above 7 nats a token, which a rate of 1e-12 leaves, to below 3."""
    assert run(bench, lr=1e-12, epochs=20).metrics["rft/nll/policy"] > 7
    assert run(bench, lr=0.02, epochs=40).metrics["rft/nll/policy"] < 3


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(bench: models.Bench) -> None:
    def bits(seed: int) -> bytes:
        run(bench, seed=seed, lr=0.01, batch=2)
        return (bench.memory.files["rft0", "adapter"] / "adapter_model.safetensors").read_bytes()

    assert bits(1) == bits(1)
    assert bits(1) != bits(2)


def test_told_labels_are_the_turns_with_what_the_audit_names_in_place(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [
        ("Action: check photo", "photo done."),
        ("Action: close email", "email done. fail. gold needs close phone."),
    ]
    lost = models.make_episode(bench.engine, "Eva", turns, Outcome.SCORED)
    bench.memory.keep("collect2", Outputs({}, episode_rows([lost], 2)))
    trained = models.capture(monkeypatch)
    outputs = run(bench, {"collect": ["collect2"]}, labels="told", epochs=1)
    kept, mended = sorted(trained, key=lambda row: len(row[0]))
    stored = bench.memory.rows("turns", ["collect2"])
    assert [kept[0], mended[0]] == [tuple(row["prompt_ids"]) for row in stored]
    assert kept[1] == tuple(stored[0]["action_ids"])
    tokenizer = AutoTokenizer.from_pretrained(bench.base)
    assert mended[1] == (*tokenizer("Action: close phone", add_special_tokens=False).input_ids, tokenizer.eos_token_id)
    assert (outputs.metrics["rft/wins"], outputs.metrics["rft/corrected"]) == (0, 1)


def test_told_labels_leave_out_what_is_blamed_or_unexplained_and_prefer_the_fewest_wrong(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained_on(endings: list[str], **config: Any) -> tuple[list[str], Mapping[str, float]]:
        episodes = [
            models.make_episode(
                bench.engine, f"E{i}", [("Action: check photo", "photo done."), ("Action: close email", f"email done. {said}")], Outcome.SCORED
            )
            for i, said in enumerate(endings)
        ]  # fmt: skip
        bench.memory.keep("collect3", Outputs({}, episode_rows(episodes, 3)))
        trained = models.capture(monkeypatch)
        outputs = run(bench, {"collect": ["collect3"]}, labels="told", epochs=1, **config)
        return sorted(bench.engine.decode(row[1]) for row in trained), outputs.metrics

    check, close = "Action: check photo", "Action: close email"
    assert trained_on(["fail. gold bars close email."])[0] == [check]
    rows, metrics = trained_on(["fail.", "fail. gold bars check photo."])
    assert rows == [close] and metrics["rft/left_out"] == 3
    rows, _ = trained_on(["fail. 2 wrong.", "fail. 1 wrong.", "fail. 2 wrong."], rows=2)
    assert rows == [check, close]


def test_told_labels_want_an_environment_that_can_tell(bench: models.Bench) -> None:
    context = replace(bench, task=TaskConfig(env="twenty_questions")).context(RftConfig(labels="told"), INPUTS)
    with pytest.raises(UsageError, match=r"twenty_questions has no function `lessons`; use \"wins\""):
        told_rows(context, [], random.Random(0))
