"""The training loop by hand: AdamW with clipping, what stops it, and the learning rate of an iteration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stages.frame.types import Diverged
from stages.learn.fit import adamw, fit, lr_factor
from stages.learn.later import Later, named


class Dot(nn.Module):
    """w . x with w = (0.5, -1.0), and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, -1.0]))
        self.fixed = nn.Parameter(torch.tensor([3.0]), requires_grad=False)


def dot(model: Any, x: Tensor) -> tuple[Tensor, dict[str, float]]:
    value = (model.w * x).sum()
    return value, {"seen": float(x[0])}


def adamw_by_hand(w: list[float], gradients: list[list[float]], lr: float, clip: float, decay: float) -> list[float]:
    m, v, w = [0.0, 0.0], [0.0, 0.0], list(w)
    for t, gradient in enumerate(gradients, 1):
        norm = math.sqrt(sum(g * g for g in gradient))
        scale = min(1.0, clip / (norm + 1e-6))
        for i, g in enumerate(gradient):
            g *= scale
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.95 * v[i] + 0.05 * g * g
            step = (m[i] / (1 - 0.9**t)) / (math.sqrt(v[i] / (1 - 0.95**t)) + 1e-8)
            w[i] = w[i] * (1 - lr * decay) - lr * step
    return w


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_equal_adamw_by_hand_with_clipping(decay: float) -> None:
    """The gradient of w . x is x: (3, 4) has norm 5 and is clipped to 1, (0.1, -0.2) is not."""
    model, gradients = Dot(), [[3.0, 4.0], [0.1, -0.2], [0.0, 2.0]]
    one = Dot()
    fit(one, [torch.tensor(gradients[0])], dot, adamw(one, lr=0.01, weight_decay=decay), clip=1.0)
    assert one.w.tolist() == pytest.approx(adamw_by_hand([0.5, -1.0], gradients[:1], 0.01, 1.0, decay), abs=1e-6)
    history = fit(model, [torch.tensor(g) for g in gradients], dot, adamw(model, lr=0.01, weight_decay=decay), clip=1.0)
    assert model.w.tolist() == pytest.approx(adamw_by_hand([0.5, -1.0], gradients, 0.01, 1.0, decay), abs=1e-6)
    assert model.fixed.tolist() == [3.0]
    assert [h["grad_norm"] for h in history] == pytest.approx([5.0, math.sqrt(0.05), 2.0])
    assert history[0]["loss"] == pytest.approx(0.5 * 3 - 4)
    assert [h["seen"] for h in history] == pytest.approx([3.0, 0.1, 0.0])


def test_a_batch_in_parts_is_the_step_of_the_whole_batch() -> None:
    """The gradients of (3, 4) and (0.1, -0.2) add up before they are clipped; the metric is their mean."""
    whole, parted = Dot(), Dot()
    rows = [torch.tensor([3.0, 4.0]), torch.tensor([0.1, -0.2])]
    (one,) = fit(whole, [rows[0] + rows[1]], dot, adamw(whole, lr=0.01))
    (two,) = fit(parted, [rows], dot, adamw(parted, lr=0.01))
    assert torch.equal(whole.w, parted.w)
    assert two["loss"] == pytest.approx(one["loss"])
    assert two["grad_norm"] == pytest.approx(one["grad_norm"])
    assert two["seen"] == pytest.approx(3.1 / 2)


def test_metrics_of_parts_are_merged_as_told() -> None:
    rows = [torch.tensor([3.0, 4.0]), torch.tensor([0.1, -0.2])]
    model = Dot()
    (history,) = fit(
        model, [rows], dot, adamw(model, lr=0.01), merge=lambda parts: {"seen": max(part["seen"] for part in parts)}
    )
    assert history["seen"] == 3.0


def test_after_step_sees_the_weights_that_have_moved() -> None:
    model, seen = Dot(), []
    fit(
        model,
        [torch.ones(2)] * 3,
        dot,
        adamw(model, lr=0.1),
        after_step=lambda done: seen.append((len(done), float(model.w.detach()[0]))),
    )
    assert [n for n, _ in seen] == [1, 2, 3]
    assert 0.5 > seen[0][1] > seen[1][1] > seen[2][1] == float(model.w.detach()[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_raises_before_the_weights_move(bad: float) -> None:
    model = Dot()
    fit(model, [torch.ones(2)], dot, adamw(model, lr=0.1))
    before = model.w.detach().clone()

    def batches() -> Iterator[Tensor]:
        yield torch.tensor([bad, 0.0])
        raise AssertionError("a second batch was asked for")

    with pytest.raises(Diverged, match="the loss of step 0 is"):
        fit(model, batches(), dot, adamw(model, lr=0.1))
    assert torch.equal(model.w.detach(), before)


def test_a_part_s_loss_that_is_not_finite_moves_neither_weights_nor_moments() -> None:
    """The first part's loss is finite, and so is the gradient of both together but for the second one's."""
    model = Dot()
    optimiser = adamw(model, lr=0.1)
    fit(model, [torch.ones(2)], dot, optimiser)
    before = [model.w.detach().clone(), *(x.clone() for x in optimiser.state[model.w].values())]
    with pytest.raises(Diverged, match="the loss of step 0 is nan"):
        fit(model, [[torch.ones(2), torch.tensor([math.nan, 0.0])]], dot, optimiser)
    after = [model.w.detach(), *optimiser.state[model.w].values()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_what_telling_a_metric_raises_comes_before_the_weights_move() -> None:
    model = Dot()

    def refused(model: Any, x: Tensor) -> tuple[Tensor, Later]:
        def told(found: float) -> dict[str, float]:
            raise LookupError(f"found {found:g}")

        value = (model.w * x).sum()
        return value, Later([value], told)

    with pytest.raises(LookupError, match=r"found -0\.5"):
        fit(model, [torch.ones(2)], refused, adamw(model, lr=0.1))
    assert model.w.tolist() == [0.5, -1.0]


def test_the_next_batch_is_made_before_a_step_s_numbers_are_read_and_its_error_comes_after_the_step() -> None:
    model, order = Dot(), list[str]()

    def batches() -> Iterator[Tensor]:
        for n in range(2):
            order.append(f"batch {n}")
            yield torch.ones(2)
        raise LookupError("no third batch")

    def loss(model: Any, x: Tensor) -> tuple[Tensor, Later]:
        def told(found: float) -> dict[str, float]:
            order.append("read")
            return {"seen": found}

        value = (model.w * x).sum()
        return value, Later([value], told)

    with pytest.raises(LookupError, match="no third batch"):
        fit(model, batches(), loss, adamw(model, lr=0.1), after_step=lambda done: order.append(f"step {len(done)}"))
    assert order == ["batch 0", "batch 1", "read", "step 1", "read", "step 2"]


def test_metrics_that_are_read_later_are_those_that_were_read_at_once() -> None:
    rows = [[torch.tensor([3.0, 4.0]), torch.tensor([0.1, -0.2])], [torch.tensor([0.5, 0.25])]]

    def later(model: Any, x: Tensor) -> tuple[Tensor, Later]:
        return (model.w * x).sum(), named({"seen": x[0]})

    one, other = Dot(), Dot()
    assert fit(one, rows, dot, adamw(one, lr=0.1)) == fit(other, rows, later, adamw(other, lr=0.1))
    assert torch.equal(one.w, other.w)


def test_a_gradient_that_is_not_finite_raises_before_the_weights_move() -> None:
    """sqrt(0) is 0, its slope is infinite: the loss alone does not show it."""
    model = Dot()

    def root(model: Any, x: Tensor) -> tuple[Tensor, dict[str, float]]:
        return (model.w * x).sum().abs().sqrt(), {}

    with pytest.raises(Diverged, match="gradient of step 0"):
        fit(model, [torch.zeros(2)], root, adamw(model, lr=0.1))
    assert model.w.tolist() == [0.5, -1.0]


@pytest.mark.parametrize(
    ("lr", "said"),
    [
        (math.inf, "after step 0, the last one, the weights are not finite"),
        (1e39, "step 0 is too long for a number of the weights' type"),  # torch refuses it
        (
            1e20,
            "after step 0, the last one, the weights are not finite",
        ),  # each is a number, but a product of two of them is none
    ],
)
def test_weights_that_the_last_step_spoilt_are_refused(lr: float, said: str) -> None:
    """Each loss and each gradient was finite."""
    model = Dot()
    with pytest.raises(Diverged, match=f"{said}. Lower the stage's learning rate"):
        fit(model, [torch.ones(2)], dot, adamw(model, lr=lr))


def test_no_batches_are_no_steps() -> None:
    model = Dot()
    assert fit(model, [], dot, adamw(model, lr=0.1)) == []
    assert model.w.tolist() == [0.5, -1.0]


def test_lr_factor_is_flat_then_linear_then_flat() -> None:
    found = [lr_factor(i, start=4, end=8, final=0.2) for i in (0, 4, 5, 6, 7, 8, 9, 100)]
    assert found == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_lr_factor_without_a_ramp_is_a_step() -> None:
    assert [lr_factor(i, start=3, end=3, final=0.5) for i in (2, 3, 4)] == [1.0, 1.0, 0.5]
    assert [lr_factor(i, start=3, end=0, final=0.5) for i in (0, 3, 4)] == [1.0, 1.0, 0.5]
    assert lr_factor(500, start=1000, end=1000, final=1.0) == 1.0
