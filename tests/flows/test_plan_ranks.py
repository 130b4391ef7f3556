"""The plan of several devices that train, and of episodes that are played while an iteration trains."""

from __future__ import annotations

from typing import Any

import pytest

from flows import presets
from flows.cost.estimate import estimate
from turnwise.commands.plan import lines

SERVERS = 'model.url=["http://10.0.0.1:8000/v1","http://10.0.0.2:8000/v1"]'


def planned(preset: str, n: int, *sets: str) -> dict[str, Any]:
    return estimate(presets.load(preset, sets), "h100", n)


def hours(found: dict[str, Any], stage: str = "critic") -> float:
    (one,) = (each for each in found["stages"] if each["stage"] == stage)
    return float(one["hours"])


def test_devices_that_train_together_share_the_arithmetic_and_not_the_generating() -> None:
    one, two = (planned("tau_retail+qwen7b", n, f"train.processes={n}") for n in (1, 2))
    assert hours(two) == pytest.approx(hours(one) / 2)
    assert hours(two, "targets") == hours(one, "targets")
    assert [stage["link_gb"] for stage in one["stages"]] == [0.0] * len(one["stages"])
    # The gradients of 15,360 steps, there and back; each device takes half of both from the other.
    (critic,) = (each for each in two["stages"] if each["stage"] == "critic")
    assert critic["link_gb"] == pytest.approx(15360 * 2 * 4 * two["adapter"] / 2 / 1e9)
    assert two["memory_gib"]["critic"] == one["memory_gib"]["critic"]


def test_layers_that_are_dealt_out_take_less_memory_and_are_sent_with_every_pass() -> None:
    plain, dealt = (
        planned("tau_retail+qwq32b", 8, "train.processes=4", f"train.shard={shard}") for shard in ("none", "layers")
    )
    weights = [found["memory_gib"]["critic"]["weights"] for found in (plain, dealt)]
    assert weights[0] == pytest.approx(61, abs=1)
    # A quarter of the layers, two whole ones, and 1.5 GiB each of embeddings and head.
    assert weights[0] / 4 < weights[1] < weights[0] / 3
    sent = [sum(stage["link_gb"] for stage in found["stages"]) for found in (plain, dealt)]
    assert sent[1] > 10 * sent[0] > 0
    assert any(said.startswith("does not fit: distill") for said in plain["verdict"])
    assert not any(said.startswith("does not fit: distill") for said in dealt["verdict"])


def test_what_is_played_while_an_iteration_trains_goes_off_the_hours() -> None:
    found = {lag: planned("tau_retail+qwq32b", 5, f"collect.lag={lag}", SERVERS) for lag in (0, 1)}
    assert found[0]["overlapped_hours"] == 0
    runs = presets.load("tau_retail+qwq32b").iterations
    assert found[1]["overlapped_hours"] == pytest.approx(hours(found[1], "collect") * (runs - 1) / runs)
    assert any("go by while an iteration trains (collect.lag)" in line for line in lines(found[1]))
    # An engine in the process that trains has nothing to gain.
    assert planned("tau_retail+qwen7b", 1, "collect.lag=1")["overlapped_hours"] == 0


def test_more_trainers_than_devices_are_told() -> None:
    assert any(
        "train.processes=4 wants as many devices" in said for said in planned("desk", 1, "train.processes=4")["verdict"]
    )
    told = planned("tau_retail+qwq32b", 4, "train.processes=4")["verdict"]
    assert any("4 of the devices train and others serve" in said for said in told)


def test_each_address_has_a_copy_of_the_model_in_memory_and_in_each_decoding_step() -> None:
    one, two = (planned("tau_retail+qwq32b", 5, *sets) for sets in ((), (SERVERS,)))
    assert one["memory_gib"]["engine"]["weights"] == pytest.approx(61 / 4, abs=0.5)
    assert two["memory_gib"]["engine"]["weights"] == pytest.approx(61 / 2, abs=0.5)
    # Both decode as much; of two copies each has half of the requests, and every step reads both.
    assert hours(two, "targets") > hours(one, "targets")
