"""The certificates that self_ac and grpo leave: what broke is found, counted and, if asked for, stops the run; gaps are
those of a plain pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import models
import pytest
import torch

from stages import grpo, self_ac
from stages.frame.contract import Outputs
from stages.frame.types import Outcome
from stages.learn.episode_row import NotAPrefix
from stages.play.transitions import episode_rows
from stages.store.tables import arrow

PHOTO = 300  # a token of five letters, which the engine encodes as five
CHECK = ("Action: check photo", "photo done.")
GIVE = ("Action: give cash", "cash done.")
CLOSE = ("Action: close phone", "Mia audits: fail.")
LENGTHS = (3, 1, 2, 3)


class Merging(models.Recorder):
    """The scripted engine with one token more, which it produces and does not read."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join("photo" if token == PHOTO else super(Merging, self).decode([token]) for token in token_ids)


@pytest.fixture
def bench(base: Path, tmp_path: Path) -> models.Bench:
    """Ana0 to Ana3, of one scenario, of 3, 1, 2 and 3 turns, the second and the last won, the third cut short."""
    bench = models.Bench(base, tmp_path, engine=Merging())
    outcomes = [Outcome.TRUNCATED if i == 2 else Outcome.SCORED for i in range(4)]
    made = [
        models.make_episode(bench.engine, f"Ana{i}", [CHECK, GIVE, CLOSE][:n], outcome, reward=float(i % 2))
        for i, (n, outcome) in enumerate(zip(LENGTHS, outcomes, strict=True))
    ]
    bench.memory.keep("collect0", Outputs({}, episode_rows(made, 0)))
    for head in bench.memory.tables["episodes", "collect0"]:
        head["scenario_id"] = "same"
    return bench


def run(bench: models.Bench, stage: Any = self_ac.STAGE, **options: Any) -> Outputs:
    # The log-probs are made up, all of them -0.1.
    return bench.run(stage, stage.config(**({"max_gap": 1e9} | options)), {"collect": ["collect0"]})


def merge(bench: models.Bench, name: str, k: int = 0) -> int:
    """The first five letters of "photo" in the turn's reply become one token. Returns its position."""
    turn = next(
        row for row in bench.memory.tables["turns", "collect0"] if (row["episode_id"], row["turn"]) == (name, k)
    )
    ids, word = turn["action_ids"], list(b"photo")
    start = next(i for i in range(len(ids)) if ids[i : i + 5] == word)
    turn["action_ids"] = [*ids[:start], PHOTO, *ids[start + 5 :]]
    turn["log_probs"] = turn["log_probs"][: len(turn["action_ids"])]
    return len(turn["prompt_ids"]) + start


def by_turn(outputs: Outputs) -> dict[tuple[str, int], Mapping[str, Any]]:
    rows = outputs.rows["certificates"]
    assert arrow("certificates", "r", rows).num_rows == len(rows)  # they fit the table
    return {(row["episode_id"], row["turn"]): row for row in rows}


def test_every_turn_that_is_trained_on_has_a_certificate(bench: models.Bench) -> None:
    outputs = run(bench)
    found = by_turn(outputs)
    assert list(found) == [(f"Ana{i}", k) for i, n in enumerate(LENGTHS) for k in range(n)]
    assert all(
        (row["extended"], row["position"], row["produced"], row["rendered"]) == (True, None, None, None)
        for row in found.values()
    )
    assert (
        outputs.metrics["self_ac/cert_turns"],
        outputs.metrics["self_ac/cert_broken"],
        outputs.metrics["self_ac/split"],
    ) == (9, 0, 0)


def test_a_reply_that_is_tokenised_differently_breaks_its_turn_alone_and_splits_the_row(bench: models.Bench) -> None:
    """A first turn, after which the episode goes on; and an only one, whose row cannot be split."""
    positions = {(name, 0): merge(bench, name) for name in ("Ana0", "Ana1")}
    outputs = run(bench)
    found = by_turn(outputs)
    assert {key: row["position"] for key, row in found.items() if not row["extended"]} == positions
    for key in positions:
        assert (found[key]["produced"], found[key]["rendered"]) == ([*"eck ", "photo", "<256>"], [*"eck ", *"phot"])
    counted = {name: outputs.metrics[f"self_ac/{name}"] for name in ("cert_turns", "cert_broken", "split", "rows")}
    assert counted == {"cert_turns": 9, "cert_broken": 2, "split": 1, "rows": 5}


def test_a_last_turn_is_held_against_its_messages_rendered_now(bench: models.Bench) -> None:
    """What the stored conversation says of the reply is not what the engine produced: white space before it went."""
    head = bench.memory.tables["episodes", "collect0"][3]
    assert head["messages"][-2]["content"] == CLOSE[0]
    head["messages"] = [
        *head["messages"][:-2],
        {"role": "assistant", "content": CLOSE[0].upper()},
        head["messages"][-1],
    ]
    outputs = run(bench)
    found = by_turn(outputs)
    (key,) = [key for key, row in found.items() if not row["extended"]]
    assert key == ("Ana3", 2)
    assert found[key]["produced"][4:] == list("ctio") and found[key]["rendered"][4:] == list("CTIO")
    assert (outputs.metrics["self_ac/cert_broken"], outputs.metrics["self_ac/split"]) == (1, 0)


@pytest.mark.parametrize("unusable", ["error", "drop"])
def test_a_broken_turn_stops_the_run_where_it_is_to_be_an_error(bench: models.Bench, unusable: str) -> None:
    run(bench, broken="error")
    at = merge(bench, "Ana3")
    said = rf"^episode Ana3, turn 0: the next state must .* from token {at} on: produced 'e\|c\|k\| \|photo\|<256>', rendered 'e\|c\|k\| \|p\|h\|o\|t'\. .* self_ac.broken to split$"
    with pytest.raises(NotAPrefix, match=said) as stopped:
        run(bench, broken="error", unusable=unusable)
    assert (stopped.value.turn, stopped.value.position) == (0, at)


def test_an_episode_that_is_dropped_has_no_certificate_and_stops_nothing(bench: models.Bench) -> None:
    merge(bench, "Ana3")
    for row in bench.memory.tables["turns", "collect0"]:
        if row["episode_id"] == "Ana3":
            row["log_probs"] = []
    assert {name for name, _ in by_turn(run(bench, broken="error", unusable="drop"))} == {"Ana0", "Ana1", "Ana2"}


def plain_gaps(bench: models.Bench) -> dict[tuple[str, int], list[float]]:
    """|engine - trainer| of every token, by a pass of the base model over each turn: a fresh adapter is the base."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bench.base).eval()
    found = {}
    for turn in bench.memory.tables["turns", "collect0"]:
        prompt, action = turn["prompt_ids"], turn["action_ids"]
        with torch.no_grad():
            log_probs = model(torch.tensor([[*prompt, *action]])).logits[0].log_softmax(-1)
        gaps = [
            abs(float(log_probs[len(prompt) + i - 1, token]) - old)
            for i, (token, old) in enumerate(zip(action, turn["log_probs"], strict=True))
        ]
        found[turn["episode_id"], turn["turn"]] = gaps
    return found


@pytest.mark.parametrize("stage", [self_ac.STAGE, grpo.STAGE], ids=["self_ac", "grpo"])
def test_the_gap_of_a_turn_is_that_of_a_loop_over_its_tokens(bench: models.Bench, stage: Any) -> None:
    """In one step of all turns, a broken one too. Their tokens' mean is what the first step measured."""
    merge(bench, "Ana0")
    outputs = run(bench, stage, batch=96, lr=1e-12)
    slow, found, metrics = plain_gaps(bench), by_turn(outputs), outputs.metrics
    assert found.keys() == slow.keys()
    for key, gaps in slow.items():
        assert (found[key]["gap_mean"], found[key]["gap_max"]) == pytest.approx(
            (sum(gaps) / len(gaps), max(gaps)), abs=1e-4
        )
    means, every = [sum(gaps) / len(gaps) for gaps in slow.values()], [gap for gaps in slow.values() for gap in gaps]
    assert metrics[f"{stage.name}/cert_gap_mean"] == pytest.approx(sum(means) / len(means), abs=1e-4)
    assert metrics[f"{stage.name}/gap_mean_first"] == pytest.approx(sum(every) / len(every), abs=1e-4)
    assert (
        metrics[f"{stage.name}/cert_gap_max"]
        == pytest.approx(metrics[f"{stage.name}/gap_max_first"], abs=1e-4)
        == pytest.approx(max(every), abs=1e-4)
    )
    assert (metrics[f"{stage.name}/cert_gap_turns"], metrics[f"{stage.name}/cert_gap_above"]) == (9, 0)


def test_turns_above_the_allowed_gap_are_counted_where_the_mean_over_all_is_not(bench: models.Bench) -> None:
    means = sorted(sum(gaps) / len(gaps) for gaps in plain_gaps(bench).values())
    every = [gap for gaps in plain_gaps(bench).values() for gap in gaps]
    allowed = (means[-1] + sum(every) / len(every)) / 2
    above = sum(mean > allowed for mean in means)
    assert above > 0
    assert run(bench, batch=96, max_gap=allowed).metrics["self_ac/cert_gap_above"] == above


def test_only_turns_of_the_first_step_have_a_gap(bench: models.Bench) -> None:
    """Later the weights are others: one episode of four a step; or three turns of nine, a pass each."""
    found = by_turn(run(bench, batch=1, lr=0.01))
    measured = {name for (name, _), row in found.items() if row["gap_mean"] is not None}
    assert len(measured) == 1
    assert all((row["gap_mean"] is None) == (name not in measured) for (name, _), row in found.items())
    outputs = run(bench, grpo.STAGE, batch=3, lr=0.01, pass_tokens=1)
    assert (
        sum(row["gap_mean"] is not None for row in outputs.rows["certificates"])
        == 3
        == outputs.metrics["grpo/cert_gap_turns"]
    )


def test_grpo_counts_what_broke_and_says_nothing_of_last_turns(bench: models.Bench) -> None:
    """Its rows are turns, so none is lost; after the last one it reads no state."""
    at = merge(bench, "Ana0")
    merge(bench, "Ana1")
    outputs = run(bench, grpo.STAGE)
    found = by_turn(outputs)
    last = {(f"Ana{i}", n - 1) for i, n in enumerate(LENGTHS)}
    assert {key for key, row in found.items() if row["extended"] is None} == last
    assert [(key, row["position"]) for key, row in found.items() if row["extended"] is False] == [(("Ana0", 0), at)]
    assert (outputs.metrics["grpo/cert_turns"], outputs.metrics["grpo/cert_broken"]) == (5, 1)


def test_a_turn_that_taught_grpo_nothing_has_no_certificate(bench: models.Bench) -> None:
    for head in bench.memory.tables["episodes", "collect0"]:
        head["scenario_id"], head["total_reward"] = (
            ("lost", 0.0) if head["episode_id"] in ("Ana0", "Ana2") else ("mixed", head["total_reward"])
        )
    bench.memory.tables["episodes", "collect0"][1]["total_reward"] = 0.5
    assert {name for name, _ in by_turn(run(bench, grpo.STAGE))} == {"Ana1", "Ana3"}
