"""What the plan's hours rest on: measured steps give their seconds back, and a shared prefix is held once."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flows import presets
from flows.cost.estimate import estimate, generate_seconds, launch_seconds, side_by_side, train_flops, train_seconds
from flows.cost.lengths import assumed
from flows.cost.machine import Machine
from flows.cost.memory import engine_memory
from flows.cost.rates import CPU, GPU, WHEN, changed, rates_of
from flows.cost.shapes import DEVICES, GIB, KNOWN, Shape
from flows.cost.work import At, Prompts, Rows, Work, role_prompts
from flows.cost.workload import workload
from stages.learn.tree import n_unique
from turnwise import cli
from turnwise.commands.plan import lines, span

ROOT = Path(__file__).parents[2]
SMALL = KNOWN["Qwen/Qwen2.5-0.5B-Instruct"]
SMOL = Shape(30, 576, 9, 3, 64, 1536, 49152, tied=True)  # SmolLM2-135M


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def h200(shape: Shape = KNOWN["Qwen/Qwen2.5-7B-Instruct"], sets: Sequence[str] = (), **fields: Any) -> Machine:
    return Machine(presets.load("tau_retail+qwen7b", sets), shape, DEVICES["h200"], 1, **fields)


def seconds(rows: Sequence[Rows], rate: str) -> float:
    m = h200()
    return sum(train_seconds(m, train_flops(m, each, autocast=True), rate) for each in rows)


def test_the_measured_step_of_a_tree_is_planned_to_take_what_it_took() -> None:
    """13 turns of 300 tokens behind 4,800; at each a future behind 248 tokens and an action, of 128 tokens each."""
    states = [4800 + 300 * k for k in range(13)]
    branches = [Rows(1, state + own, 128, own) for state in states for own in (376, 128)]
    rows = [Rows(1, states[-1], 0), *branches]
    assert sum(row.fresh for row in rows) == 14_952
    assert seconds(rows, "train_trees") == pytest.approx(1.998, rel=0.02)


def test_the_measured_row_of_episodes_is_planned_to_take_what_it_took() -> None:
    """Four of 8 turns with 200 tokens an action and an observation, and 9 critic prompts of 16."""
    assert 4 * 3544 == 14_176
    assert seconds([Rows(4, 3544, 1600)], "train_rows") == pytest.approx(1.275, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "rows", "least", "most"),
    [(SMALL, 2, 0.2, 0.25), (SMALL, 20, 0.39, 0.49), (SMOL, 48, 0.7, 1.0)],
)
def test_a_pass_of_a_small_model_is_planned_to_take_what_its_launches_took(
    shape: Shape, rows: int, least: float, most: float
) -> None:
    """GRPO's and Self-AC's pass of a 0.5B model, and a critic step of SmolLM2-135M."""
    assert least < launch_seconds(h200(shape), Work("critic", passes=1, branches=rows)) < most
    known, more = (launch_seconds(h200(shape), Work("critic", passes=1, branches=n)) for n in (48, 500))
    assert known == more  # nothing is said of what was not measured


def test_a_small_model_s_training_takes_its_launches_and_a_large_one_s_its_arithmetic() -> None:
    small, large = (estimate(presets.load(name), "h200", 1) for name in ("desk", "tau_retail+qwen7b"))
    critic = next(one for one in small["stages"] if one["stage"] == "critic")
    (steps, layers) = critic["steps"], 3
    assert critic["hours"] * 3600 > steps * layers * GPU["pass"].value > 5
    slower = estimate(presets.load("tau_retail+qwen7b"), "h200", 1, ["pass=0.0091"])
    assert [one["hours"] for one in slower["stages"]] == [one["hours"] for one in large["stages"]]


@pytest.mark.parametrize("draw", ["turn", "episode"])
def test_as_many_requests_run_side_by_side_as_have_room_for_their_distinct_tokens(draw: str) -> None:
    """Against a batch of made-up prompts, whose distinct tokens are counted."""
    run = presets.load("tau_retail+qwen7b", ["roles.history=chat"])
    told = ["turns=6", "system=300", "first=10", "action=12", "observation=20", "template=30", "future=9", "thought=0"]
    at = At(run, assumed(run, told), 0, 1000.0)
    (middle, size) = at.lengths.middle, at.lengths
    p = role_prompts(at, 10_000, middle, 5, 9, draw)
    m = h200(rates=changed(GPU, {"requests": 10_000}))
    room = 20_000  # tokens
    kv = engine_memory(m)["KV cache"] * GIB / room
    m = h200(rates=m.rates, cache_bytes=kv / m.shape.kv_bytes(1))
    found = side_by_side(m, p)

    rng = random.Random(0)

    def some(n: float) -> tuple[int, ...]:
        return tuple(rng.randrange(10**6) for _ in range(int(n)))

    system = some(300)
    asked = []
    for _ in range(2000):
        line = (*system, *some(10 + 6 * 32))
        for k in range(6) if draw == "episode" else [rng.randrange(6)]:
            asked.append((*line[: int(size.state(k))], *some(30 + 5 + 9)))
    fitting = next(n for n in range(1, len(asked)) if n_unique(asked[:n]) > room)
    # By the episode the plan counts a first turn like the others, though less is said before it.
    assert found == pytest.approx(fitting, rel=0.03 if draw == "turn" else 0.06)
    assert found > 2 * room / p.length  # far more than if each had all of its own


def test_replies_of_episodes_share_the_system_message_alone_and_wait_for_the_slots() -> None:
    m = h200()
    p = Prompts(1000, 900, 100, shared=800, lived=500, together=7)
    assert (p.beside, side_by_side(m, p)) == (500, 7)
    assert Prompts(1000, 900, 100, shared=800).beside == 800
    run = presets.load("tau_retail+qwen7b", ["collect.slots=32"])
    collect = next(w for w in workload(run, assumed(run)) if w.stage == "collect")
    assert (collect.prompts[0].together, collect.prompts[0].beside) == (32, assumed(run).system)


def test_more_requests_at_once_read_the_weights_less_often() -> None:
    p = Prompts(4096, 2000, 100, shared=1900)
    few, many = (generate_seconds(h200(rates=changed(GPU, {"requests": n})), p) for n in (32, 64))
    m = h200()
    weights = m.weights / (1e12 * m.device.bandwidth * GPU["decode"].value)  # seconds a step
    assert few - many == pytest.approx(p.n * p.written * weights * (1 / 32 - 1 / 64))


def test_an_fp8_cache_holds_twice_the_tokens_and_is_read_in_half_the_time() -> None:
    p = Prompts(10**6, 20_000, 1000)
    plain, half = (
        h200(rates=changed(GPU, {"requests": 1e5})),
        h200(rates=changed(GPU, {"requests": 1e5}), cache_bytes=1),
    )
    assert side_by_side(half, p) == pytest.approx(2 * side_by_side(plain, p))
    assert 2 * half.kv_bytes == plain.kv_bytes
    run = presets.load("tau_retail+qwen7b")
    hours = [sum(one["hours"] for one in estimate(run, "h100", 1, sets)["stages"]) for sets in ([], ["cache_bytes=1"])]
    assert hours[1] < 0.9 * hours[0]


def test_requests_at_once_are_those_of_the_engine() -> None:
    run = presets.load("tau_retail+qwq32b", ["model.url=['http://127.0.0.1:1/v1', 'http://127.0.0.1:2/v1']"])
    assert Machine(run, SMALL, DEVICES["h200"], 5).requests == 512
    assert h200(sets=["model.engine=hf", "model.gen_batch=9"]).requests == 9
    assert [rates_of(card, DEVICES[card].memory)["requests"].value for card in ("h100", "a100", "l40s")] == [
        1024,
        256,
        256,
    ]


def test_every_rate_says_where_it_is_from() -> None:
    for rates, card in ((GPU, "h200"), (CPU, "cpu")):
        for rate in rates.values():
            assert rate.source and rate.what
            assert rate.on in ("", *WHEN) and rate.on in ("", *DEVICES)
            assert rate.kind(card) == (
                "assumed" if not rate.on else "measured" if rate.on == card else "measured on an h200"
            )


@pytest.mark.parametrize(("device", "known"), [("h200", "measured"), ("h100", "measured on an h200")])
def test_a_plan_says_of_each_stage_what_its_hours_rest_on(device: str, known: str) -> None:
    found = estimate(presets.load("tau_retail+qwen7b"), device, 1, ["read=0.4"])
    by_stage = {one["stage"]: one for one in found["stages"]}
    assert by_stage["critic"]["known"] == by_stage["distill"]["known"] == known
    assert by_stage["targets"]["known"] == "assumed"
    assert set(by_stage["critic"]["rests_on"]) == {"train_trees", "pass", "branch"}
    assert found["rates"]["train_trees"]["known"] == known and found["rates"]["train_trees"]["source"]
    assert (found["rates"]["read"]["value"], found["rates"]["read"]["known"]) == (0.4, "given")
    told = "\n".join(lines(found))
    for name, rate in found["rates"].items():
        assert f"{name:<16}{rate['value']:>7g} {rate['what']}: {rate['known']}" in told
    assert {name for one in found["stages"] for name in one["rests_on"]} < set(found["rates"])


def test_the_demo_on_a_cpu_is_planned_within_a_factor_of_what_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    """turnwise run demo --plain --set iterations=2 --set evaluate.probe_path=, on one core: seconds of two iterations."""
    took = {"collect": 1.7, "targets": 8.5, "critic": 14.6, "refine": 5.0, "distill": 3.8}
    assert cli.main(["plan", "demo", "--device", "cpu", "--set", "iterations=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    planned = {one["stage"]: one["hours"] * 3600 for one in found["stages"]}
    for stage, measured in took.items():
        assert 0.8 < planned[stage] / measured < 1.25, stage
    assert found["rates"]["train_trees"]["known"] == "measured"


def test_a_time_is_told_in_the_unit_that_it_fills() -> None:
    assert [span(hours) for hours in (43.41, 1, 0.5, 1 / 60, 0.01, 0)] == ["43.4h", "1h", "30m", "1m", "36s", "0s"]
