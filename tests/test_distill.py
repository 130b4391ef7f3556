"""Distillation: L2 on the refined actions as they are, the peak rule on held-out rows, and the KL option."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file

from stages import distill
from stages.distill import DistillConfig
from stages.frame.contract import Config, Outputs
from stages.learn.adapter import save_adapter, trainable_state
from stages.learn.fit import fit
from stages.train import network
from stages.train.model import trainable
from stages.train.passes import mean_nll, pass_kl, step_passes
from stages.train.rows import target_rows, weighed

REFINED = [models.successor_row(f"p{i}", f"Desk. {i}", f"Action: {'abc'[i % 3]}", role="policy") for i in range(20)]
TARGETS = [models.successor_row(f"e{i}", f"Predict. {i}", f"Future: {i % 2}") for i in range(6)]
INPUTS = {"refine": ["refine0"], "targets": ["targets0"], "critic": ["critic0"]}


@pytest.fixture
def bench(base: Path, tmp_path: Path) -> models.Bench:
    bench = models.Bench(base, tmp_path)
    bench.memory.keep("refine0", Outputs({}, {"targets": REFINED}))
    bench.memory.keep("targets0", Outputs({}, {"targets": TARGETS}))
    for seed, folder in enumerate(("adapter", "target")):
        save_adapter(
            models.shake(trainable(bench.context(Config(), {}), None), seed, 0.1),
            tmp_path / folder,
            bench.engine.model_hash,
        )
        bench.memory.files["critic0", folder] = tmp_path / folder
    return bench


def run(bench: models.Bench, seed: int = 0, inputs: Any = INPUTS, **config: Any) -> Outputs:
    return bench.run(distill.STAGE, DistillConfig(**config), inputs, seed=seed)


def weights(bench: models.Bench, name: str = "distill0", folder: str = "adapter") -> dict[str, torch.Tensor]:
    return dict(load_file(bench.memory.files[name, folder] / "adapter_model.safetensors"))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def pairs(rows: list[dict[str, Any]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(row["student_ids"]), tuple(row["completion_ids"])) for row in rows]


def test_ids_trained_are_the_rows_ids_and_never_the_teacher_s(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = models.capture(monkeypatch)
    run(bench, epochs=2, batch=8, successor_rows=2, held_out=0.0)
    assert Counter(row for row in trained if row in pairs(REFINED)) == Counter(pairs(REFINED * 2))
    others = [row for row in trained if row not in pairs(REFINED)]
    assert len(others) == 2 * 3 * 2
    assert set(others) <= set(pairs(TARGETS))


@pytest.mark.parametrize(("share", "n"), [(0.0, 0), (0.1, 2), (0.26, 5), (0.99, 19)])
def test_held_out_rows_are_never_trained_on(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch, share: float, n: int
) -> None:
    trained = models.capture(monkeypatch)
    outputs = run(bench, held_out=share, successor_rows=0, epochs=3)
    assert len(set(trained)) == 20 - n
    assert outputs.metrics["distill/rows"] == 20 - n
    assert outputs.metrics["distill/held_out_rows"] == n
    assert ("distill/held_out_nll" in outputs.metrics) == (n > 0)


def test_training_starts_from_the_critic_s_adapter(bench: models.Bench) -> None:
    run(bench, lr=1e-12)
    one, other = weights(bench), dict(load_file(bench.memory.files["critic0", "adapter"] / "adapter_model.safetensors"))
    assert all(torch.allclose(one[name], other[name], atol=1e-9) for name in one)


def test_one_epoch_holds_no_rows_out(bench: models.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to choose among, so all rows are trained on."""
    trained = models.capture(monkeypatch)
    outputs = run(bench, held_out=0.5, successor_rows=0, epochs=1)
    assert len(set(trained)) == 20
    assert outputs.metrics["distill/held_out_rows"] == 0


def watch(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """The adapter's tensors after each step of the next run."""
    states: list[dict[str, torch.Tensor]] = []

    def watched(model: Any, *args: Any, after_step: Any, **options: Any) -> Any:
        def also(done: Any) -> None:
            after_step(done)
            states.append(trainable_state(model))

        return fit(model, *args, after_step=also, **options)

    monkeypatch.setattr(network, "fit", watched)
    return states


def averaged(
    start: dict[str, torch.Tensor], states: list[dict[str, torch.Tensor]], rate: float
) -> dict[str, torch.Tensor]:
    """(1 - rate)^n start + sum_k rate (1 - rate)^(n - k) state_k, with the names of a saved adapter."""
    n, found = len(states), {}
    for name, value in start.items():
        steps = [state[name.replace(".weight", ".default.weight")] for state in states]
        found[name] = (1 - rate) ** n * value
        found[name] = found[name] + sum(rate * (1 - rate) ** (n - k) * step for k, step in enumerate(steps, 1))
    return found


@pytest.mark.parametrize("rate", [0.0, 0.1, 1.0])
def test_the_target_follows_every_step_from_where_the_critic_left_it(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    states = watch(monkeypatch)
    run(bench, lr=0.01, batch=6, ema_rate=rate)
    assert len(states) == 4
    found, expected = weights(bench, folder="target"), averaged(weights(bench, "critic0", "target"), states, rate)
    assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in expected.items())
    assert (rate == 0.0) == same(found, weights(bench, "critic0", "target"))


def test_the_peak_rule_keeps_the_target_of_the_best_epoch(bench: models.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    states, told = watch(monkeypatch), iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(distill, "mean_nll", lambda model, rows, **options: next(told))
    run(bench, epochs=3, batch=6, lr=0.01, ema_rate=0.1)  # 18 rows: 3 steps an epoch
    found, expected = weights(bench, folder="target"), averaged(weights(bench, "critic0", "target"), states[:6], 0.1)
    assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in expected.items())


@pytest.mark.parametrize(
    ("curve", "best"), [([3.0, 1.0, 2.0], 2), ([1.0, 2.0, 3.0], 1), ([3.0, 2.0, 1.0], 3), ([2.0, 1.0, 1.0], 2)]
)
def test_the_peak_rule_keeps_the_weights_of_the_best_epoch(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch, curve: list[float], best: int
) -> None:
    """The held-out NLL is planted; the first of equals is kept."""
    states, told = watch(monkeypatch), iter(curve)
    monkeypatch.setattr(distill, "mean_nll", lambda model, rows, **options: next(told))
    outputs = run(bench, epochs=3, batch=6, lr=0.01)  # 18 rows: 3 steps an epoch
    found = weights(bench)
    assert all(
        torch.equal(states[3 * best - 1][name.replace(".weight", ".default.weight")], value)
        for name, value in found.items()
    )
    assert next(told, None) is None
    assert (outputs.metrics["distill/best_epoch"], outputs.metrics["distill/held_out_nll"]) == (best, min(curve))


def test_the_kept_weights_have_the_held_out_nll_that_is_reported(bench: models.Bench) -> None:
    """Too high a rate, so that the best epoch is not the last; the NLL is measured anew from the saved adapter."""
    outputs = run(bench, epochs=6, batch=4, lr=0.05, held_out=0.3, seed=3)
    rows = target_rows(REFINED)
    random.Random(3).shuffle(rows)
    model = trainable(bench.context(Config(), {}), bench.memory.files["distill0", "adapter"])
    assert mean_nll(model, rows[:6]) == pytest.approx(outputs.metrics["distill/held_out_nll"], abs=1e-5)


def test_kl_coef_0_is_as_if_there_were_no_kl(bench: models.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any) -> Any:
        raise AssertionError("the KL was computed")

    monkeypatch.setattr(distill, "pass_kl", forbidden)
    run(bench, kl_coef=0.0, lr=0.01)
    with pytest.raises(AssertionError, match="was computed"):
        run(bench, kl_coef=0.1)


def policy_kl(bench: models.Bench) -> float:
    model = trainable(bench.context(Config(), {}), bench.memory.files["distill0", "adapter"])
    return sum(
        float(pass_kl(model, each, "policy").detach())
        for each in step_passes({"policy": target_rows(REFINED)}, 0, "cpu")
    )


def test_kl_coef_holds_the_policy_near_the_base(bench: models.Bench) -> None:
    """The first loss is L2 + coef KL; after 12 epochs the KL is below half of what it is without the term."""
    options: dict[str, Any] = {"lr": 0.02, "epochs": 12, "successor_rows": 0, "held_out": 0.0, "batch": 20}
    start = run(bench, **options).metrics
    free = policy_kl(bench)
    held = run(bench, kl_coef=3.0, **options).metrics
    assert held["distill/loss_first"] == pytest.approx(
        start["distill/loss_first"] + 3.0 * held["distill/kl_first"], abs=1e-4
    )
    assert policy_kl(bench) < 0.5 * free


def test_a_step_in_passes_is_the_whole_one_with_kl_and_held_out_rows(bench: models.Bench) -> None:
    options: dict[str, Any] = {"lr": 0.02, "epochs": 2, "batch": 20, "kl_coef": 0.5, "held_out": 0.3}
    one, many = run(bench, **options).metrics, run(bench, pass_tokens=60, **options).metrics
    assert set(one) == set(many)
    assert many["distill/tokens"] > one["distill/tokens"]  # less is shared
    same = [name for name in one if "/tokens" not in name]
    assert [many[name] for name in same] == pytest.approx([one[name] for name in same], rel=1e-3)


def test_layers_that_are_worked_out_again_change_nothing(bench: models.Bench) -> None:
    options: dict[str, Any] = {"lr": 0.02, "epochs": 2, "kl_coef": 0.5}
    plain = run(bench, **options).metrics
    bench.checkpointing = True
    assert dict(run(bench, **options).metrics) == pytest.approx(dict(plain), rel=1e-4)


def test_it_learns_the_refined_actions_and_nothing_without_steps(bench: models.Bench) -> None:
    """Held-out NLL a token of actions whose form is shared: from above 6 to below 4; at rate 1e-12 it stays."""
    stuck = run(bench, lr=1e-12, epochs=20).metrics
    found = run(bench, lr=0.02, epochs=20).metrics
    assert stuck["distill/held_out_nll"] > 6
    assert found["distill/held_out_nll"] < 4


def test_where_refine_left_nothing_the_critic_s_adapter_is_passed_on(bench: models.Bench) -> None:
    """A critic that says Yes to everything, capped, leaves no rows: the run goes on, to the bit where it was."""
    bench.memory.keep("refine1", Outputs({}, {"targets": []}))
    outputs = run(bench, inputs=INPUTS | {"refine": ["refine1"]})
    for folder in ("adapter", "target"):
        assert same(weights(bench, folder=folder), weights(bench, "critic0", folder))
    assert outputs.metrics == {"distill/steps": 0.0, "distill/rows": 0.0, "distill/held_out_rows": 0.0}


def test_rows_of_another_role_are_left_alone(bench: models.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of one run id hold one role each; should they ever hold both, L2 still trains on actions."""
    bench.memory.keep("refine1", Outputs({}, {"targets": [*REFINED, *TARGETS]}))
    trained = models.capture(monkeypatch)
    run(bench, inputs=INPUTS | {"refine": ["refine1"]}, successor_rows=0, held_out=0.0)
    assert set(trained) == set(pairs(REFINED))


def test_the_learning_rate_falls_with_the_iteration(bench: models.Bench) -> None:
    bench.run(
        distill.STAGE,
        DistillConfig(lr=0.01, lr_decay_start=1, lr_decay_end=3, lr_final=0.2),
        INPUTS,
        name="distill1",
        iteration=2,
    )
    bench.run(distill.STAGE, DistillConfig(lr=0.006), INPUTS, name="distill2", iteration=2)
    one, other = weights(bench, "distill1"), weights(bench, "distill2")
    assert all(torch.allclose(one[name], other[name], atol=1e-7) for name in one)


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(bench: models.Bench) -> None:
    def bits(seed: int) -> bytes:
        run(bench, seed, lr=0.01, epochs=2)
        return (bench.memory.files["distill0", "adapter"] / "adapter_model.safetensors").read_bytes()

    assert bits(1) == bits(1)
    assert bits(1) != bits(2)


LONG = [
    models.successor_row(f"k{i}", f"Desk. {i}", "Action: " + "so " * 30, role="policy") | {"info": {"kept": True}}
    for i in range(4)
]
SHORT = [
    models.successor_row(f"n{i}", f"Desk. {i}", "Action: a", role="policy") | {"info": {"kept": False}}
    for i in range(6)
]


@pytest.mark.parametrize("weight", ["token", "row"])
@pytest.mark.parametrize("pass_tokens", [0, 200])
def test_a_kind_s_share_of_a_step_s_loss_is_that_of_its_tokens_or_of_its_rows(
    bench: models.Bench, weight: Any, pass_tokens: int
) -> None:
    """Against a loop: 4 kept actions of 99 tokens, 6 rewritten ones of 10, 6 successor rows of 10."""
    bench.memory.keep("refine1", Outputs({}, {"targets": [*LONG, *SHORT]}))
    options: dict[str, Any] = {
        "batch": 10, "successor_rows": 6, "held_out": 0.0, "lr": 1e-12, "pass_tokens": pass_tokens, "weight": weight,
    }  # fmt: skip
    metrics = run(bench, inputs=INPUTS | {"refine": ["refine1"]}, **options).metrics
    n_kept, n_new = (len(rows[0]["completion_ids"]) for rows in (LONG, SHORT))
    assert (n_kept, n_new, len(TARGETS[0]["completion_ids"])) == (99, 10, 10)
    assert metrics["distill/kept_share"] == pytest.approx(4 * 99 / (4 * 99 + 6 * 10) if weight == "token" else 4 / 10)

    model = trainable(bench.context(Config(), {}), bench.memory.files["critic0", "adapter"])
    rows = [target_rows([row])[0] for row in (*LONG, *SHORT, *TARGETS)]
    losses = [mean_nll(model, [row]) for row in rows]
    counts = [len(row.completion_ids) if weight == "token" else 1 for row in rows]
    slow = sum(c * loss for c, loss in zip(counts, losses, strict=True)) / sum(counts)
    assert metrics["distill/loss_first"] == pytest.approx(slow, rel=1e-4)
    other = [1 if weight == "token" else len(row.completion_ids) for row in rows]
    assert slow != pytest.approx(sum(c * loss for c, loss in zip(other, losses, strict=True)) / sum(other), rel=1e-3)


def test_the_held_out_rows_are_judged_by_the_weights_of_the_loss(bench: models.Bench) -> None:
    bench.memory.keep("refine1", Outputs({}, {"targets": [*LONG, *SHORT]}))
    model = trainable(bench.context(Config(), {}), bench.memory.files["critic0", "adapter"])
    alike = weighed(target_rows([*LONG, *SHORT]), "row")
    one_by_one = [mean_nll(model, [row]) for row in alike]
    assert mean_nll(model, alike) == pytest.approx(sum(one_by_one) / 10, rel=1e-5)
    assert mean_nll(model, alike, pass_tokens=200) == pytest.approx(sum(one_by_one) / 10, rel=1e-5)
