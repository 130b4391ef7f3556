"""Evaluation: planted policies, planted forgetting, and the numbers that must come out."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import models
import pytest
from evaluate_play import INPUTS, OPTIONS, Play, bench_of, run

from flows import presets
from stages import evaluate
from stages.envs import service_desk as desk
from stages.evaluate import EvaluateConfig
from stages.frame.types import Request, UsageError
from stages.learn.statistics import share_interval, wilson


def test_win_rate_and_its_interval_by_hand(base: Path, tmp_path: Path) -> None:
    """48 visits, every (request, tier) equally often: 24 gold ones are won. The base wins none."""
    metrics, rows = run(bench_of(base, tmp_path, Play()))
    assert metrics["evaluate/win_rate"] == metrics["evaluate/return"] == 0.5
    centre = (0.5 + 1.96**2 / 96) / (1 + 1.96**2 / 48)
    half = 1.96 * math.sqrt(0.25 / 48 + 1.96**2 / (4 * 48**2)) / (1 + 1.96**2 / 48)
    assert (metrics["evaluate/win_low"], metrics["evaluate/win_high"]) == pytest.approx((centre - half, centre + half))
    assert metrics["evaluate/turns"] == 3
    assert len(rows["episodes"]) == 48
    assert len(rows["turns"]) == metrics["evaluate/env_steps"] == 144
    lost, _ = run(bench_of(base, tmp_path, Play()), {})
    assert lost["evaluate/win_rate"] == 0
    assert (lost["evaluate/win_low"], lost["evaluate/win_high"]) == wilson(0, 48)
    assert lost["evaluate/win_high"] > 0.05


def lucky(share: float) -> Any:
    """A policy that wins about this share of its visits, by the seeds of its requests."""

    def play(prompt: str, request: Request) -> str:
        right = random.Random(request.seed).random() < share
        return f"Action: {(models.right_action if right else models.wrong_action)(prompt, OPTIONS)}"

    return play


def test_trials_play_each_test_scenario_n_times_and_tell_pass_hat_k_and_a_share_interval(
    base: Path, tmp_path: Path
) -> None:
    config = {"episodes": 12, "trials": 4, "audit_turns": 0}
    metrics, rows = run(bench_of(base, tmp_path, lucky(0.9)), {}, split="test", **config)
    plays: dict[str, list[bool]] = {}
    for row in rows["episodes"]:
        plays.setdefault(row["scenario_id"], []).append(row["total_reward"] >= 1)
    assert len(rows["episodes"]) == 48 == metrics["evaluate/episodes"] and {len(p) for p in plays.values()} == {4}
    for k in (1, 2, 3, 4):
        by_hand = [mean(all(drawn) for drawn in itertools.combinations(p, k)) for p in plays.values()]
        assert metrics[f"evaluate/pass_hat_{k}"] == pytest.approx(mean(by_hand))
    assert metrics["evaluate/pass_hat_1"] == metrics["evaluate/win_rate"] > metrics["evaluate/pass_hat_4"] > 0
    ids, won = zip(*((i, w) for i, p in plays.items() for w in p), strict=True)
    assert (metrics["evaluate/win_low"], metrics["evaluate/win_high"]) == share_interval(won, ids)


def test_trials_are_of_the_test_split_alone_and_exclude_best_of(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Play())
    metrics, _ = run(bench, {}, split="validation", episodes=6, trials=3, audit_turns=0)
    assert metrics["evaluate/episodes"] == 6 and not any("pass_hat" in name for name in metrics)
    with pytest.raises(UsageError, match="set the other to 1"):
        run(bench, {}, split="test", episodes=6, trials=3, best_of=2, audit_turns=0)


def test_scenarios_are_of_the_split_and_the_same_in_every_iteration(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Play())

    def seen(split: str, iteration: int, seed: int) -> list[str]:
        outputs = bench.run(
            evaluate.STAGE,
            EvaluateConfig(split=split, episodes=20, audit_turns=0),
            INPUTS,
            iteration=iteration,
            seed=seed,
        )
        names = {row["scenario"]["name"] for row in outputs.rows["episodes"]}
        assert names <= set(desk.CUSTOMERS[split])
        return [row["scenario_id"] for row in outputs.rows["episodes"]]

    assert seen("validation", 0, 1) == seen("validation", 5, 2)
    assert set(seen("validation", 0, 1)).isdisjoint(seen("test", 0, 1))
    bench.seed = 9
    before = seen("test", 0, 1)
    bench.seed = 10
    assert seen("test", 0, 1) != before


def test_the_probe_shows_what_was_forgotten(base: Path, tmp_path: Path) -> None:
    """Planted: combine is answered as before, evaluator never, refiner for one of two rows; base: all."""
    file = tmp_path / "probe.jsonl"
    rows = [(role, f"{role} {i}") for role in ("combine", "evaluator", "refiner") for i in (0, 1)]
    lines = [
        {"role": role, "messages": [{"role": "user", "content": text}], "reply": f"as told {text}"}
        for role, text in rows
    ]
    file.write_text(
        "".join(json.dumps(line) + "\n" for line in [*lines, lines[0] | {"reply": "beyond the two rows a role"}])
    )

    def play(prompt: str, request: Request) -> str:
        text = prompt.removeprefix("<user>\n").removesuffix("\n<assistant>\n")
        if text.split()[0] not in ("combine", "evaluator", "refiner"):
            return Play()(prompt, request)
        kept = request.adapter is None or text.startswith("combine") or text == "refiner 1"
        return f"as told {text}" if kept else "as told"

    found, _ = run(bench_of(base, tmp_path, play), probe_path=str(file), probe_rows=2, audit_turns=0)
    shares = {name: value for name, value in found.items() if "probe" in name}
    assert shares == {
        "evaluate/probe_combine": 1.0, "evaluate/probe_evaluator": 0.0, "evaluate/probe_refiner": 0.5, "evaluate/probe": 0.5,
        "evaluate/probe_out_of_context": 0.0,
    }  # fmt: skip
    untrained, _ = run(bench_of(base, tmp_path, play), {}, probe_path=str(file), probe_rows=2, audit_turns=0)
    assert untrained["evaluate/probe"] == 1.0
    with pytest.raises(UsageError, match="found none"):
        run(bench_of(base, tmp_path, play), probe_path=str(tmp_path / "gone.jsonl"))


def test_the_policy_s_temperature_is_evaluate_s_own(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Play())
    run(bench, temperature=0.0, audit_turns=0)
    engine: Any = bench.engine
    assert {r.temperature for r in engine.requests} == {0.0}


def test_the_same_seed_gives_the_same_numbers(base: Path, tmp_path: Path) -> None:
    def rows() -> Any:
        metrics, found = run(bench_of(base, tmp_path, Play("perfect")))
        return metrics, [{**row, "seconds": 0} for table in found.values() for row in table]

    assert rows() == rows()


@pytest.mark.parametrize(("split", "tiers"), [("test", 3), ("validation", 2)])
def test_options_of_the_test_split_are_of_the_test_split_alone(
    base: Path, tmp_path: Path, split: str, tiers: int
) -> None:
    config = EvaluateConfig(split=split, episodes=30, audit_turns=0, test_options={"tiers": 3})
    context = models.Bench(base, tmp_path).context(config, {})
    run = presets.load("tiny", ["task.options.tiers=2", "roles.max_action_tokens=400"])
    outputs = evaluate.run(replace(context, run=run))
    assert len({row["scenario"]["tier"] for row in outputs.rows["episodes"]}) == tiers
    assert run.task.options["tiers"] == 2
