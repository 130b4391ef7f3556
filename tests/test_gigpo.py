"""GiGPO: the advantage of a turn within its state, against a loop; without its weight all is GRPO's, to the bit."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file
from test_grpo import group_rows, head

from stages import grpo
from stages.frame.contract import Outputs
from stages.frame.types import Outcome
from stages.grpo import GrpoConfig, episode_advantages, step_advantages, step_batches
from stages.play.transitions import episode_rows
from stages.train.model import trainable

CHECK, PASSPORT = ("Action: check photo", "photo done."), ("Action: check passport", "passport done.")
PHONE, EMAIL = ("Action: close phone", "phone done."), ("Action: close email", "email done.")
PLAYED = {
    "Ana a": ([CHECK, PHONE], 1.0), "Ana b": ([CHECK, EMAIL], 0.0), "Ana c": ([PASSPORT, PHONE], 0.0),
    "Ben a": ([CHECK, PHONE], 0.0), "Ben b": ([CHECK, CHECK, PHONE], 1.0), "Cleo a": ([CHECK, PHONE], 1.0),
}  # fmt: skip
"""Episode -> its turns and reward. Those of one first word are a group: the desk reads that word as the customer."""


def rows(bench: models.Bench) -> dict[str, list[Any]]:
    played = []
    for name, (turns, reward) in PLAYED.items():
        one = models.make_episode(bench.engine, name.split()[0], turns, Outcome.SCORED, reward=reward)
        played.append(episode_rows([one], 0))
        for row in (*played[-1]["episodes"], *played[-1]["turns"]):
            row["episode_id"] = name
        played[-1]["episodes"][0]["scenario_id"] = name.split()[0]
        for t in played[-1]["turns"][:1]:
            t["reward"] = t["reward"] or 0.25  # something is paid at the first turn, too
    return {table: [row for each in played for row in each[table]] for table in ("episodes", "turns")}


def slow(found: dict[str, list[Any]], config: GrpoConfig) -> tuple[dict[Any, float], set[Any]]:
    """Each turn against all others, by what the policy read; and the turns that have a partner."""
    advantages, having = {}, set()
    scenario = {e["episode_id"]: e["scenario_id"] for e in found["episodes"]}

    def returned(turn: Any) -> float:
        return sum(
            float(config.gamma ** (t["turn"] - turn["turn"]) * t["reward"])
            for t in found["turns"]
            if t["episode_id"] == turn["episode_id"] and t["turn"] >= turn["turn"]
        )

    for turn in found["turns"]:
        alike = [
            returned(t)
            for t in found["turns"]
            if scenario[t["episode_id"]] == scenario[turn["episode_id"]]
            and list(t["prompt_ids"]) == list(turn["prompt_ids"])
        ]
        mean = sum(alike) / len(alike)
        spread = (sum((x - mean) ** 2 for x in alike) / len(alike)) ** 0.5
        value = returned(turn) - mean
        key = (turn["episode_id"], turn["turn"])
        advantages[key] = config.step_weight * (value / (spread + 1e-6) if config.step_scale == "deviation" else value)
        having |= {key} if len(alike) > 1 else set()
    return advantages, having


@pytest.mark.parametrize("scale", ["deviation", "none"])
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_a_turn_s_advantage_equals_a_loop(bench: models.Bench, scale: Any, gamma: float) -> None:
    found, config = rows(bench), GrpoConfig(step_weight=0.7, gamma=gamma, step_scale=scale)
    fast, metrics = step_advantages(found["episodes"], found["turns"], config)
    wanted, having = slow(found, config)
    assert fast == pytest.approx(wanted, abs=1e-5)
    assert any(abs(value) > 0.01 for value in wanted.values())
    # Ana: three first turns and two second ones behind "check photo"; Ben: two of each; Cleo has nobody.
    assert len(having) == 3 + 2 + 2 + 2
    later = [key for key in wanted if key[1]]
    assert metrics == {"grpo/partner_frac": 9 / 13, "grpo/partner_frac_later": 4 / len(later)}
    assert fast["Cleo a", 0] == fast["Cleo a", 1] == fast["Ana c", 1] == fast["Ben b", 2] == 0


def test_what_differs_in_the_state_or_in_the_scenario_is_no_partner(bench: models.Bench) -> None:
    found = rows(bench)
    for turn in found["turns"]:
        if turn["episode_id"] == "Ana b" and turn["turn"] == 1:
            turn["prompt_ids"] = [*turn["prompt_ids"], 7]
    for episode in found["episodes"]:
        if episode["episode_id"] == "Ben b":
            episode["scenario_id"] = "another"
    fast, metrics = step_advantages(found["episodes"], found["turns"], GrpoConfig(step_weight=1))
    assert metrics == {"grpo/partner_frac": 3 / 13, "grpo/partner_frac_later": 0}
    assert fast["Ana a", 1] == fast["Ben a", 0] == 0 != fast["Ana a", 0]


def test_the_loss_gets_the_sum_of_both_advantages(bench: models.Bench) -> None:
    found, config = rows(bench), GrpoConfig(step_weight=0.5, batch=100)
    episodes = [e for e in found["episodes"] if e["scenario_id"] != "Cleo"]
    turns = [t for t in found["turns"] if t["episode_id"] != "Cleo a"]
    whole = episode_advantages(episodes)
    steps, _ = step_advantages(episodes, turns, config)
    wanted, _ = slow({"episodes": episodes, "turns": turns}, config)
    model = trainable(bench.context(config, {}), None)
    (part,) = next(step_batches(turns, whole, config, random.Random(0), model, steps))
    got = {row.key: float(value) for row, value in zip(part.rows.rows, part.advantage_R, strict=True)}
    assert got == pytest.approx({key: whole[key[0]] + value for key, value in wanted.items()}, abs=1e-5)


def run(bench: models.Bench, name: str, **config: Any) -> tuple[Outputs, bytes]:
    outputs = bench.run(grpo.STAGE, GrpoConfig(max_gap=1e9, lr=0.01, **config), {"collect": ["collect0"]}, name=name)
    return outputs, (bench.memory.files[name, "adapter"] / "adapter_model.safetensors").read_bytes()


def test_without_the_weight_nothing_is_changed_and_no_reward_is_read(bench: models.Bench) -> None:
    bench.memory.keep("collect0", Outputs({}, group_rows({"a": [1.0, 0.0, 0.0], "b": [0.0, 1.0]})))
    plain, bits = run(bench, "plain")  # these rows have no reward
    other, same = run(bench, "other", step_weight=0, gamma=0.5, step_scale="none")
    assert bits == same and plain.metrics == other.metrics
    assert not any("partner" in name for name in plain.metrics)


def test_a_group_of_equal_returns_teaches_where_its_turns_differ(bench: models.Bench) -> None:
    """Both episodes return 1, one of them at once: by turn the discount tells them apart, by episode nothing does."""
    found = group_rows({"a": [1.0, 1.0]})
    for turn in found["turns"]:
        turn["prompt_ids"] = [7, 8, turn["turn"]]
        turn["reward"] = float((turn["episode_id"], turn["turn"]) in (("a0", 0), ("a1", 1)))
    bench.memory.keep("collect0", Outputs({}, found))
    still, _ = run(bench, "still")
    assert still.metrics["grpo/steps"] == 0
    outputs, _ = run(bench, "moved", step_weight=1, gamma=0.5, batch=2, epochs=1)
    assert outputs.metrics["grpo/steps"] == 2 and outputs.metrics["grpo/used_frac"] == 1
    assert outputs.metrics["grpo/partner_frac"] == outputs.metrics["grpo/partner_frac_later"] == 1
    config = GrpoConfig(step_weight=1, gamma=0.5)
    fast, _ = step_advantages([head("a0", "a", 1), head("a1", "a", 1)], found["turns"], config)
    assert fast == pytest.approx({("a0", 0): 1, ("a1", 0): -1, ("a0", 1): -1, ("a1", 1): 1}, abs=1e-4)


def test_it_trains_on_turns_of_an_advantage_and_on_no_others(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rows(bench)
    bench.memory.keep("collect0", Outputs({}, found))
    trained = models.capture(monkeypatch)
    outputs, _ = run(bench, "one", step_weight=1, epochs=1)
    whole = episode_advantages(found["episodes"])
    steps, _ = slow(found, GrpoConfig(step_weight=1))
    wanted: dict[Any, int] = defaultdict(int)
    for turn in found["turns"]:
        if abs(whole.get(turn["episode_id"], 0.0) + steps[turn["episode_id"], turn["turn"]]) > 1e-6:
            wanted[tuple(turn["prompt_ids"]), tuple(turn["action_ids"])] += 1
    assert sorted(trained) == sorted(row for row, n in wanted.items() for _ in range(n))
    before = load_file(bench.memory.files["one", "adapter"] / "adapter_model.safetensors")
    assert any(bool(torch.count_nonzero(value)) for name, value in before.items() if "lora_B" in name)
    assert len(outputs.rows["certificates"]) == 11  # every turn of a group's episodes


def test_the_preset_is_grpo_s_with_that_weight() -> None:
    from flows import presets

    plain, found = (presets.load(name).model_dump(exclude={"preset"}) for name in ("desk+grpo", "desk+gigpo"))
    assert found["grpo"] == plain["grpo"] | {"step_weight": 1.0}
    assert {**found, "grpo": None} == {**plain, "grpo": None}
