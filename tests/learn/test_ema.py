"""EMA arithmetic: by hand, in closed form, for numpy and torch, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from stages.learn.ema import ema_update


def test_one_step_by_hand() -> None:
    new = ema_update({"a": np.array([1.0, 2.0])}, {"a": np.array([3.0, -2.0])}, 0.25)
    assert np.array_equal(new["a"], [1.5, 1.0])


def test_distance_to_a_source_that_stands_still_decays_geometrically() -> None:
    """100 steps at rate 0.02: 0.98^100 = 0.1326 of the distance is left; without the update 1."""
    source = {"a": np.full(3, 5.0)}
    target = {"a": np.zeros(3)}
    for _ in range(100):
        target = ema_update(target, source, 0.02)
    assert np.allclose(5.0 - target["a"], 5.0 * 0.98**100, rtol=1e-12)


def test_rate_1_copies_and_rate_0_keeps() -> None:
    target, source = {"a": np.array([1.0])}, {"a": np.array([7.0])}
    assert ema_update(target, source, 1.0)["a"] == 7.0
    assert ema_update(target, source, 0.0)["a"] == 1.0


def test_neither_argument_changes() -> None:
    target, source = {"a": np.array([1.0])}, {"a": np.array([2.0])}
    new = ema_update(target, source, 0.5)
    new["a"] += 100
    assert target["a"] == 1.0
    assert source["a"] == 2.0


def test_torch_tensors_agree_with_numpy_and_carry_no_gradient() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    old, live = rng.normal(size=(4, 3)), rng.normal(size=(4, 3))
    expected = ema_update({"w": old}, {"w": live}, 0.01)["w"]
    source = torch.tensor(live, requires_grad=True)
    new = ema_update({"w": torch.tensor(old)}, {"w": source}, 0.01)["w"]
    assert not new.requires_grad
    assert np.array_equal(new.numpy(), expected)


def test_the_target_keeps_its_precision_when_the_source_is_half() -> None:
    torch = pytest.importorskip("torch")
    new = ema_update({"w": torch.ones(2)}, {"w": torch.zeros(2, dtype=torch.bfloat16)}, 0.005)["w"]
    assert new.dtype == torch.float32
    assert torch.allclose(new, torch.full((2,), 0.995))


def test_a_half_precision_target_is_refused_because_it_would_stop_early() -> None:
    """In bfloat16, 1 - 0.005 * 0.2 rounds back to 1: the target stands still 20 % away from its source."""
    torch = pytest.importorskip("torch")
    stuck = torch.ones(1, dtype=torch.bfloat16)
    assert stuck + 0.005 * (torch.full_like(stuck, 0.8) - stuck) == 1.0
    with pytest.raises(ValueError, match="float32 or wider"):
        ema_update({"w": stuck}, {"w": stuck}, 0.005)


def test_names_shapes_and_rate_are_checked() -> None:
    a = {"a": np.zeros(2)}
    with pytest.raises(ValueError, match="names"):
        ema_update(a, {"b": np.zeros(2)}, 0.1)
    with pytest.raises(ValueError, match="shape"):
        ema_update(a, {"a": np.zeros(1)}, 0.1)  # would broadcast without a word
    with pytest.raises(ValueError, match="rate"):
        ema_update(a, a, 1.5)
