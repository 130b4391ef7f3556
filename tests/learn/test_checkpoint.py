"""A training that is broken off and gone on with is the same training, bit by bit; and a bad file is told in one
sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stages.frame.types import TurnwiseError
from stages.learn.checkpoint import load_checkpoint, save_checkpoint
from stages.learn.fit import adamw, fit

ROWS = [torch.randn(5, 3, generator=torch.Generator().manual_seed(i)) for i in range(6)]


def network(width: int = 4) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
    model[0].bias.requires_grad_(False)  # frozen, as a base model is
    return model


def squares(model: Any, x: Tensor) -> tuple[Tensor, dict[str, float]]:
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    return loss, {"seen": float(loss.detach())}


def optimiser_of(model: Any) -> torch.optim.AdamW:
    """Two rates, as of a body and its head."""
    return adamw(model, lr=0.01, rates=[(model[2], 0.05)])


@pytest.mark.parametrize("kill", [1, 3, 5])
def test_a_training_that_goes_on_is_the_one_that_was_not_broken_off(tmp_path: Path, kill: int) -> None:
    whole = network()
    history = fit(whole, ROWS, squares, optimiser_of(whole))
    first, path = network(), tmp_path / "checkpoint.safetensors"
    optimiser = optimiser_of(first)
    fit(first, ROWS[:kill], squares, optimiser, after_step=lambda done: save_checkpoint(path, first, optimiser, done))
    second = network()
    optimiser = optimiser_of(second)
    done = load_checkpoint(path, second, optimiser)
    assert len(done) == kill
    assert fit(second, ROWS, squares, optimiser, history=done) == history
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


def test_moments_alone_leave_the_weights_and_are_what_makes_the_next_step_equal(tmp_path: Path) -> None:
    whole = network()
    optimiser = optimiser_of(whole)
    fit(whole, ROWS[:3], squares, optimiser)
    save_checkpoint(tmp_path / "moments", whole, optimiser, weights=False)
    again, blind = network(), network()
    for other in (again, blind):
        other.load_state_dict(whole.state_dict())
    kept = optimiser_of(again)
    assert load_checkpoint(tmp_path / "moments", again, kept) == []
    assert torch.equal(again[0].weight, whole[0].weight)
    for model, its in ((whole, optimiser), (again, kept), (blind, optimiser_of(blind))):
        fit(model, ROWS[3:], squares, its)
    assert torch.equal(again[0].weight, whole[0].weight)
    assert not torch.equal(blind[0].weight, whole[0].weight)


def test_a_module_has_its_own_rate() -> None:
    model = network()
    assert sorted((group["lr"], len(group["params"])) for group in optimiser_of(model).param_groups) == [
        (0.01, 1),
        (0.05, 2),
    ]


def test_a_broken_file_and_one_of_another_model_say_what_to_do(tmp_path: Path) -> None:
    model, path = network(), tmp_path / "checkpoint.safetensors"
    optimiser = optimiser_of(model)
    fit(model, ROWS[:1], squares, optimiser)
    save_checkpoint(path, model, optimiser)
    wide = network(5)
    with pytest.raises(TurnwiseError, match=r"is of another model: 0\.weight does not fit; delete"):
        load_checkpoint(path, wide, optimiser_of(wide))
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(TurnwiseError, match=r"cannot be read .*; delete .* and run again"):
        load_checkpoint(path, model, optimiser)


def test_a_kill_while_writing_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = network(), tmp_path / "checkpoint.safetensors"
    optimiser = optimiser_of(model)
    save_checkpoint(path, model, optimiser, [{"loss": 1.0}])

    def half(tensors: Any, file: Path, metadata: Any) -> None:
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("stages.learn.checkpoint.save_file", half)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, model, optimiser, [{"loss": 2.0}])
    assert load_checkpoint(path, model, optimiser) == [{"loss": 1.0}]
