"""The base model's weights stay in memory: a model over them is a fresh load in all but the reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch

from stages import rft
from stages.frame.contract import Config, Outputs
from stages.frame.types import Outcome, Request
from stages.learn.adapter import WEIGHTS
from stages.llm import hf, shared
from stages.llm.hf import HfEngine, load_base, shared_base
from stages.play.transitions import episode_rows
from stages.rft import RftConfig
from stages.train.model import trainable


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    shared.forget()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders, each time that one is read."""
    found: list[str] = []
    real = hf.read_base

    def counted(path: str, dtype: str) -> Any:
        found.append(path)
        return real(path, dtype)

    monkeypatch.setattr(hf, "read_base", counted)
    return found


def state_of(model: Any) -> dict[str, Any]:
    """All that a stage could leave in a model."""
    return {
        "flags": [(name, p.requires_grad, p.grad, p.dtype) for name, p in model.named_parameters()],
        "modules": [(name, type(m), m.training, *(len(getattr(m, h)) for h in HOOKS)) for name, m in model.named_modules()],
        "checkpointing": model.is_gradient_checkpointing,
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict(),
        "names": sorted(vars(model)),
    }  # fmt: skip


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def same(one: Any, other: Any) -> bool:
    pairs = zip(
        [*one.named_parameters(), *one.named_buffers()],
        [*other.named_parameters(), *other.named_buffers()],
        strict=True,
    )
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_a_lent_model_is_a_fresh_load_whatever_was_done_to_the_one_before(base: Path, tmp_path: Path) -> None:
    bench = models.Bench(base, tmp_path, checkpointing=True)
    for _ in range(2):
        used = trainable(bench.context(Config(), {}), None)
        loss = used(input_ids=torch.arange(1, 9)[None]).logits.square().mean()
        loss.backward()
        used.get_base_model().register_forward_hook(lambda *_: None)
        used.get_base_model().config.use_cache = False
    fresh, lent = load_base(str(base), "float32")[0], shared_base(str(base), "float32")
    assert state_of(lent) == state_of(fresh)
    assert same(lent, fresh)


def test_stages_of_a_process_read_the_base_once_and_its_memory_is_the_same(base: Path, reads: list[str]) -> None:
    one, other = shared_base(str(base), "float32"), shared_base(str(base), "float32")
    engine = HfEngine(str(base))
    assert reads == [str(base)]
    places = [[p.data_ptr() for p in model.parameters()] for model in (one, other, engine._base)]
    assert places[0] == places[1] == places[2]
    assert not any(p is q for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_other_weights_are_read_and_the_old_ones_let_go(base: Path, tmp_path: Path, reads: list[str]) -> None:
    folder = models.save_base(tmp_path / "base", seed=1)
    first = shared_base(str(base), "float32")
    shared_base(str(base), "bfloat16")
    shared_base(str(folder), "float32")
    assert len(reads) == 3 and len(shared._kept) == 1
    models.save_base(folder, seed=2)  # the same name, other weights
    second = shared_base(str(folder), "float32")
    assert len(reads) == 4
    assert not same(first, second) and same(second, load_base(str(folder), "float32")[0])


def test_weights_that_somebody_wrote_to_are_read_again(base: Path, reads: list[str]) -> None:
    careless = shared_base(str(base), "float32")
    with torch.no_grad():
        next(careless.parameters()).add_(1.0)
    assert same(shared_base(str(base), "float32"), load_base(str(base), "float32")[0])
    assert len(reads) == 3  # the second one shared, the third for comparison


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_over_kept_weights_gives_the_same_bits(
    base: Path, tmp_path: Path, checkpointing: bool, reads: list[str]
) -> None:
    """After a stage of the other kind, and after generation with its adapter in an engine over the same weights."""

    def adapter(checkpointing: bool) -> bytes:
        bench = models.Bench(base, tmp_path, checkpointing=checkpointing)
        won = [("Action: check photo", "photo done."), ("Action: close phone", "phone done. pass.")]
        episode = models.make_episode(bench.engine, "Ana", won, Outcome.SCORED, reward=1.0)
        bench.memory.keep("collect0", Outputs({}, episode_rows([episode], 0)))
        outputs = bench.run(rft.STAGE, RftConfig(lr=0.01, epochs=3, batch=1), {"collect": ["collect0"]})
        return (outputs.files["adapter"] / WEIGHTS).read_bytes()

    shared.forget()
    fresh = adapter(checkpointing)
    shared.forget()
    other = adapter(not checkpointing)
    engine = HfEngine(str(base))
    (tmp_path / "rft0" / "adapter" / "base.json").unlink()  # which names the scripted engine's model
    engine.load_adapter("a", tmp_path / "rft0" / "adapter")
    engine.generate([Request((5, 6, 7), 4, 1.0, 3, "a")])
    n = len(reads)
    assert adapter(checkpointing) == fresh
    assert len(reads) == n and other
