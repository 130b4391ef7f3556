"""Rows to batches and back, steps in their passes, and the mixed loss."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import models
import pytest
import torch

from stages.learn.adapter import new_adapter
from stages.learn.tree import n_unique
from stages.train.history import of_step
from stages.train.passes import Pass, make_pass, mean_nll, mixed_batches, mixed_nll, step_passes, together
from stages.train.rows import TrainRow


def train_row(seed: int, weight: float = 1.0) -> TrainRow:
    rng = random.Random(seed)
    prompt, completion = ([rng.randrange(40) for _ in range(rng.randint(1, 9))] for _ in range(2))
    return TrainRow(tuple(prompt), tuple(completion), weight, (f"e{seed}", 0))


ROWS = [train_row(i, weight=0.5 + i % 3) for i in range(11)]


def slow_nll(model: Any, row: TrainRow) -> torch.Tensor:
    """-log p of the whole completion, one token after the other through the whole model."""
    total = torch.zeros(())
    for t, token in enumerate(row.completion_ids):
        logits = model(input_ids=torch.tensor([[*row.prompt_ids, *row.completion_ids[:t]]])).logits[0, -1]
        total = total - (logits[token] - torch.log(torch.exp(logits).sum()))
    return total


def one_pass(rows: list[TrainRow]) -> Pass:
    return make_pass([("a", row) for row in rows], sum(r.weight * len(r.completion_ids) for r in rows), {})


def test_a_pass_gives_back_the_ids_that_went_in() -> None:
    found = make_pass([("a", row) for row in ROWS], 1.0, {})
    assert models.rows_of(found) == [(tuple(r.prompt_ids), tuple(r.completion_ids)) for r in ROWS]
    assert torch.bincount(found.row_K).tolist() == [len(r.completion_ids) for r in ROWS]


def test_mixed_nll_and_its_gradient_equal_a_loop() -> None:
    """L = sum_i w_i |y_i| nll_i / sum_i w_i |y_i| over the rows of all kinds; |y_i| nll_i is what the loop adds up."""
    model = models.shake(new_adapter(models.tiny_llama(), rank=2, alpha=4.0, seed=0))
    labelled = [("successor" if i < 6 else "policy", row) for i, row in enumerate(ROWS)]
    loss, metrics, nll_R = mixed_nll(
        model, make_pass(labelled, sum(r.weight * len(r.completion_ids) for r in ROWS), {})
    )
    totals = [slow_nll(model, row) for row in ROWS]
    weights = [row.weight for row in ROWS]
    tokens = sum(w * len(row.completion_ids) for w, row in zip(weights, ROWS, strict=True))
    slow = torch.stack([w * t for w, t in zip(weights, totals, strict=True)]).sum() / tokens
    assert float(loss.detach()) == pytest.approx(float(slow.detach()), abs=1e-5)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for fast, loop in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(slow, parameters), strict=True):
        assert torch.allclose(fast, loop, atol=1e-4 * max(1.0, float(loop.abs().max())))
    for kind, rows in (("successor", range(6)), ("policy", range(6, 11))):
        share = sum(weights[i] * len(ROWS[i].completion_ids) for i in rows)
        assert metrics[f"nll/{kind}"] == pytest.approx(
            sum(weights[i] * float(totals[i].detach()) for i in rows) / share, abs=1e-5
        )
        expected = [float(totals[i].detach()) / len(ROWS[i].completion_ids) for i in rows]
        assert nll_R[list(rows)].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_row_of_weight_0_is_as_good_as_absent() -> None:
    model = models.tiny_llama()
    with_it, _, _ = mixed_nll(model, one_pass([*ROWS[:3], train_row(99, weight=0.0)]))
    without, _, _ = mixed_nll(model, one_pass(ROWS[:3]))
    assert float(with_it.detach()) == pytest.approx(float(without.detach()), abs=1e-6)


def test_mean_nll_equals_a_loop_whatever_the_batch_and_leaves_the_mode() -> None:
    model = models.tiny_llama().train()
    slow = sum(row.weight * float(slow_nll(model, row).detach()) for row in ROWS) / sum(
        row.weight * len(row.completion_ids) for row in ROWS
    )
    assert mean_nll(model, ROWS) == pytest.approx(slow, abs=1e-5)
    assert mean_nll(model, ROWS, pass_tokens=20) == pytest.approx(slow, abs=1e-5)
    assert model.training


@pytest.mark.parametrize("pass_tokens", [1, 20, 40])
def test_a_step_in_many_passes_has_the_loss_the_gradient_and_the_metrics_of_one(pass_tokens: int) -> None:
    model = models.shake(new_adapter(models.tiny_llama(), rank=2, alpha=4.0, seed=0))
    parameters = [p for p in model.parameters() if p.requires_grad]
    chosen = {"successor": ROWS[:6], "policy": ROWS[6:]}

    def step(pass_tokens: int) -> tuple[float, list[torch.Tensor], dict[str, float]]:
        losses, metrics = [], []
        model.zero_grad()
        for each in step_passes(chosen, pass_tokens, "cpu"):
            loss, found, _ = mixed_nll(model, each)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
            metrics.append(found)
        return sum(losses), [p.grad.clone() for p in parameters if p.grad is not None], of_step(metrics)

    loss, gradients, metrics = step(0)
    many_loss, many_gradients, many_metrics = step(pass_tokens)
    assert many_loss == pytest.approx(loss, rel=1e-5)
    assert many_metrics.pop("count/tokens") >= metrics.pop("count/tokens")  # less is shared
    assert many_metrics == pytest.approx(metrics, rel=1e-5)
    assert {name for name in metrics if not name.startswith("count/")} == {"nll/successor", "nll/policy"}
    for one, many in zip(gradients, many_gradients, strict=True):
        assert torch.allclose(one, many, atol=1e-5 * max(1.0, float(one.abs().max())))


@pytest.mark.parametrize("pass_tokens", [1, 20, 40, 10**6])
def test_passes_hold_every_row_once_and_no_more_tokens_than_allowed(pass_tokens: int) -> None:
    groups = together(ROWS, pass_tokens)
    assert sorted(i for group in groups for i in group) == list(range(len(ROWS)))
    for group in groups:
        assert len(group) == 1 or n_unique([ids_of(ROWS[i]) for i in group]) <= pass_tokens
    assert together([], pass_tokens) == []


def ids_of(row: TrainRow) -> tuple[int, ...]:
    return (*row.prompt_ids, *row.completion_ids)


def test_rows_that_begin_alike_meet_in_a_pass_and_pay_for_what_they_share_once() -> None:
    rng = random.Random(0)
    states = [tuple(rng.randrange(40) for _ in range(50)) for _ in range(4)]
    rows = [TrainRow(state[: 30 + 5 * k], (k, 7), key=(e, k)) for k in range(4) for e, state in enumerate(states)]
    groups = together(rows, 60)
    assert sorted(len({rows[i].key[0] for i in group}) for group in groups) == [1] * 4
    (found,) = step_passes({"a": rows}, 0, "cpu")
    assert len(found.tree.ids) == n_unique([ids_of(row) for row in rows]) < sum(len(ids_of(row)) for row in rows) / 2


def test_rows_of_unlike_length_are_passes_of_their_own() -> None:
    rows = [TrainRow(tuple(range(n)), (1,)) for n in (300, 150, 20, 12, 3)]
    assert together(rows, 0) == [[0, 1], [2, 3], [4]]


def batches_of(
    kinds: dict[str, tuple[list[TrainRow], int]], epochs: int = 1, seed: int = 0
) -> list[dict[str, list[TrainRow]]]:
    found = mixed_batches(kinds, main="main", epochs=epochs, rng=random.Random(seed), device="cpu")
    batches: list[dict[str, list[TrainRow]]] = []
    for passes in found:
        batches.append(defaultdict(list))
        for each in passes:
            for kind, row in zip(each.kinds, each.rows, strict=True):
                batches[-1][kind].append(row)
    return [dict(batch) for batch in batches]


def test_every_main_row_comes_once_an_epoch_in_another_order() -> None:
    found = batches_of({"main": (ROWS, 4)}, epochs=3)
    assert [len(b["main"]) for b in found] == [4, 4, 3] * 3
    epochs = [[row.key for b in found[3 * e : 3 * e + 3] for row in b["main"]] for e in range(3)]
    assert all(sorted(keys) == sorted(row.key for row in ROWS) for keys in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_by_the_episode_an_episode_s_rows_follow_each_other_and_steps_are_as_many() -> None:
    rows = [TrainRow((1, e, k), (k,), key=(f"e{e}", k)) for k in range(5) for e in range(6)]
    others = [TrainRow((2, e, k), (k,), key=(f"o{e}", k)) for k in range(3) for e in range(4)]
    kinds = {"main": (rows, 8), "other": (others, 3)}
    found = mixed_batches(kinds, main="main", epochs=1, rng=random.Random(0), device="cpu", draw="episode")
    steps = [
        [(kind, row.key) for each in passes for kind, row in zip(each.kinds, each.rows, strict=True)]
        for passes in found
    ]
    assert len(steps) == len(batches_of(kinds)) == 4
    keys = [key for step in steps for kind, key in sorted(step, key=lambda one: one[0] != "main") if kind == "main"]
    assert sorted(keys) == sorted(row.key for row in rows)
    for step in steps:
        assert len({key[0] for kind, key in step if kind == "main"}) <= 3  # 8 rows of episodes of 5
        mine = [key for kind, key in step if kind == "other"]
        assert len(set(mine)) == 3 and len({key[0] for key in mine}) <= 2


def test_every_step_holds_rows_of_every_kind_without_repeats() -> None:
    others = [train_row(100 + i) for i in range(5)]
    found = batches_of(
        {"main": (ROWS, 4), "other": (others, 3), "few": (others[:2], 3), "none": ([], 3), "off": (others, 0)},
        epochs=20,
    )
    seen: Counter[Any] = Counter()
    for batch in found:
        assert set(batch) == {"main", "other", "few"}
        assert len({row.key for row in batch["other"]}) == 3
        assert len(batch["few"]) == 2
        seen.update(row.key for row in batch["other"])
    assert len(seen) == 5


def test_batches_depend_on_the_seed_alone() -> None:
    assert batches_of({"main": (ROWS, 4)}, seed=1) == batches_of({"main": (ROWS, 4)}, seed=1)
    assert batches_of({"main": (ROWS, 4)}, seed=1) != batches_of({"main": (ROWS, 4)}, seed=2)
    assert batches_of({"main": ([], 4), "other": (ROWS, 4)}) == []
