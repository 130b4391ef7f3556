"""Fused LoRA against peft's own path, in values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import models
import pytest
import shadows
import torch
from torch import Tensor, nn

from stages.frame.types import UsageError
from stages.learn.adapter import acting_as, add_adapter, as_base, new_adapter, open_adapter, save_adapter
from stages.learn.episode_row import pack
from stages.learn.fused_lora import FusedLora, fused_lora
from stages.learn.tree_attention import body_pass, tree_attention

IDS = torch.tensor([[5, 9, 3, 8, 1, 4, 17, 30], [2, 2, 7, 11, 0, 39, 6, 1]])
# Sums in another order; a gradient runs through two layers of them.
EXACT, ROUNDED = 1e-6, 2.0


@pytest.fixture(params=["Llama", "Qwen2"])
def model(request: pytest.FixtureRequest) -> Any:
    """Qwen2 has biases below its adapters."""
    return shadows.with_adapter(request.param).train()


def off(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted|, in fp64."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def run(model: Any, *, fused: bool, loss: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """The loss and the gradient of every parameter that has one."""
    model.zero_grad(set_to_none=True)
    with fused_lora(model, strict=True) if fused else nullcontext():
        value = loss(model)
        value.backward()  # type: ignore[no-untyped-call]
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": value.detach(), **grads}


def assert_same(model: Any, loss: Callable[[Any], Tensor], allowed: float = EXACT) -> None:
    fused, twin = (run(model, fused=on, loss=loss) for on in (True, False))
    assert fused.keys() == twin.keys() and len(twin) > 10
    assert all(float(grad.abs().max()) > 0 for grad in twin.values())
    for name, wanted in twin.items():
        assert off(fused[name], wanted) < allowed, name


def projected(states: Tensor) -> Tensor:
    signs = 2 * torch.randint(2, states.shape, generator=torch.Generator().manual_seed(1)) - 1
    return (states.float() * signs).sum() if states.dtype != torch.float64 else (states * signs).sum()


def plain(model: Any) -> Tensor:
    return projected(model(input_ids=IDS).logits)


def layer_of(dtype: torch.dtype) -> Any:
    """A LoRA layer over a linear one with bias, 24 -> 40. Over 16 bits, too, A and B are fp32."""
    torch.manual_seed(0)
    base = nn.ModuleDict({"one": nn.Linear(24, 40)}).to(dtype)
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=12.0, target_modules=["one"]), base)
    for parameter in base.parameters():
        if parameter.requires_grad and dtype == torch.bfloat16:
            parameter.data = parameter.data.float()
    return models.shake(base)


def through(net: Any, *, fused: bool, dtype: torch.dtype, autocast: bool, x_learns: bool = True) -> list[Tensor]:
    """y, and the gradients of A, B and, if it learns, x (4, 50, 24)."""
    x = torch.randn(4, 50, 24, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_(x_learns)
    net.zero_grad(set_to_none=True)
    with fused_lora(net, strict=True) if fused else nullcontext(), torch.autocast("cpu", torch.bfloat16, autocast):
        y = net["one"](x)
    projected(y).backward()  # type: ignore[no-untyped-call]
    grads = [p.grad for p in net.parameters() if p.requires_grad] + ([x.grad] if x_learns else [])
    return [y.detach(), *(g for g in grads if g is not None)]


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("x_learns", [True, False])
def test_a_layer_has_pefts_values_and_gradients(dtype: torch.dtype, allowed: float, x_learns: bool) -> None:
    net = layer_of(dtype)
    fused, twin = (through(net, fused=on, dtype=dtype, autocast=False, x_learns=x_learns) for on in (True, False))
    assert len(fused) == len(twin) == 3 + x_learns
    for found, wanted in zip(fused, twin, strict=True):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape and off(found, wanted) < allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_a_layer_is_at_most_twice_as_far_from_the_truth_as_pefts(dtype: torch.dtype) -> None:
    """The truth: peft's path in fp64 at the same weights. A and B, and their gradients, are fp32 throughout."""
    net, exact = layer_of(dtype), layer_of(dtype).double()
    fused, twin = (through(net, fused=on, dtype=dtype, autocast=True) for on in (True, False))
    x = torch.randn(4, 50, 24, generator=torch.Generator().manual_seed(3)).to(dtype).double().requires_grad_()
    y = exact["one"](x)
    projected(y).backward()  # type: ignore[no-untyped-call]
    truth = [y.detach(), *(p.grad for p in exact.parameters() if p.grad is not None), x.grad]
    assert [t.dtype for t in fused] == [t.dtype for t in twin]
    assert fused[1].dtype == fused[2].dtype == torch.float32 and fused[0].dtype == torch.bfloat16
    for found, own, wanted in zip(fused, twin, truth, strict=True):
        assert wanted is not None and 0 < off(found, wanted) < ROUNDED * off(own, wanted)


@pytest.mark.parametrize("autocast", [True, False])
def test_a_model_in_16_bits_is_at_most_twice_as_far_from_the_truth_as_pefts(autocast: bool) -> None:
    """Without autocast, peft works A and B out in fp32, and what they read and add to is rounded to 16 bits. Fused, all
    is rounded. States and each gradient, of a base in bf16 and an adapter in fp32.
    """
    model = models.shake(new_adapter(shadows.tiny("Llama").bfloat16(), rank=2, alpha=4.0, seed=0), spread=0.2).train()

    def loss(model: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, autocast):
            states = model.get_base_model().model(input_ids=IDS).last_hidden_state
        return projected(states)

    fused, own = (run(model, fused=on, loss=loss) for on in (True, False))
    assert {g.dtype for g in fused.values()} == {torch.float32}
    truth = run(model.double(), fused=False, loss=loss)
    far, twin_far = (
        torch.tensor([off(found[name], wanted) for name, wanted in truth.items() if name != "loss"])
        for found in (fused, own)
    )
    assert 0 < float(far.mean()) < ROUNDED * float(twin_far.mean())


def test_autocast_leaves_fp64_alone() -> None:
    net = layer_of(torch.float64)
    fused, twin = (through(net, fused=on, dtype=torch.float64, autocast=True) for on in (True, False))
    assert all(x.dtype == torch.float64 and off(x, y) < 1e-14 for x, y in zip(fused, twin, strict=True))


def test_a_model_has_pefts_loss_and_gradients(model: Any) -> None:
    assert_same(model, plain)


def test_a_packed_row_has_pefts_loss_and_gradients(model: Any) -> None:
    row = pack([shadows.make_episode(n, n) for n in (5, 2, 1)], shadows.CRITIC, max_positions=None)
    assert_same(model, lambda model: projected(body_pass(model, row.tree)))


def test_gradient_checkpointing_changes_nothing(model: Any) -> None:
    row = pack([shadows.make_episode(n, n) for n in (5, 2, 1)], shadows.CRITIC, max_positions=None)

    def loss(model: Any) -> Tensor:
        return projected(body_pass(model, row.tree))

    wanted = run(model, fused=True, loss=loss)
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    with tree_attention(model):
        found = run(model, fused=True, loss=loss)
        assert_same(model, loss)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_disabled_adapter_and_a_merged_one_are_pefts(model: Any) -> None:
    with torch.no_grad():
        own, adapted = model(input_ids=IDS).logits, None
        with as_base(model):
            base = model(input_ids=IDS).logits
        with fused_lora(model):
            adapted = model(input_ids=IDS).logits
            with as_base(model):
                assert torch.equal(model(input_ids=IDS).logits, base)
            model.merge_adapter()
            merged = model(input_ids=IDS).logits
            model.unmerge_adapter()
    assert off(adapted, own) < EXACT and off(merged, own) < 1e-5
    assert off(base, own) > 0.1


def test_each_of_two_adapters_acts_alone_and_has_its_own_gradient(model: Any) -> None:
    add_adapter(model, "critic", None, rank=3, alpha=6.0, seed=1)
    models.shake(model, 5, 0.2)

    def both(model: Any) -> Tensor:
        first = plain(model)
        with acting_as(model, "critic"):
            second = plain(model)
        return first.tanh() + 2 * second.tanh() + (first * second) / 100

    assert_same(model, both)
    names = run(model, fused=True, loss=both)
    assert {part for name in names for part in ("default", "critic") if f".{part}." in name} == {"default", "critic"}


def test_two_active_adapters_are_pefts(model: Any) -> None:
    add_adapter(model, "critic", None, rank=3, alpha=6.0, seed=1)
    models.shake(model, 5, 0.2)
    model.base_model.set_adapter(["default", "critic"])
    with torch.no_grad():
        own = model(input_ids=IDS).logits
        with fused_lora(model):
            assert torch.equal(model(input_ids=IDS).logits, own)


def test_the_layers_are_put_back_and_the_adapter_is_saved_as_before(model: Any, tmp_path: Path) -> None:
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with fused_lora(model):
        with fused_lora(model):
            pass
        assert plain(model).grad_fn is not None
        save_adapter(model, tmp_path / "fused", "hash")
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    save_adapter(model, tmp_path / "plain", "hash")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "fused" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    kind = type(model.get_base_model()).__name__.removesuffix("ForCausalLM")
    again = open_adapter(shadows.tiny(kind), tmp_path / "fused")
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_dropout_and_variants_stay_pefts_and_are_refused_where_fused_is_asked_for() -> None:
    from peft import LoraConfig, get_peft_model

    for options, reason in (({"lora_dropout": 0.5}, "has dropout"), ({"use_dora": True}, "is a variant")):
        config: Any = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", **options)
        model = models.shake(get_peft_model(shadows.tiny("Llama"), config)).train()
        found = []
        for context in (nullcontext(), fused_lora(model)):
            torch.manual_seed(0)
            with context:
                found.append(model(input_ids=IDS).logits)
        assert torch.equal(*found)
        with (
            pytest.raises(UsageError, match=f"^model.kernels: fused does not run this model, since .*{reason}; set it"),
            fused_lora(model, strict=True),
        ):
            pass
    with pytest.raises(UsageError, match="has no LoRA layer"), fused_lora(shadows.tiny("Llama"), strict=True):
        pass


def test_a_trained_base_keeps_its_gradient(model: Any) -> None:
    weight = model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.requires_grad_()
    with fused_lora(model):
        plain(model).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None and float(weight.grad.abs().max()) > 0


def test_the_fused_function_is_what_runs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All seven linear layers of both blocks, and no backward twice over the base weights."""
    calls = []
    real = FusedLora.apply
    monkeypatch.setattr(FusedLora, "apply", lambda *args: calls.append(args[0].shape) or real(*args))  # type: ignore[func-returns-value,no-untyped-call]
    with fused_lora(model):
        plain(model)
    assert len(calls) == 14
    plain(model)
    assert len(calls) == 14


def test_a_fresh_adapter_on_frozen_embeddings_learns() -> None:
    """The first layer's input needs no gradient, and B = 0 leaves A without one."""
    model = new_adapter(shadows.tiny("Llama"), rank=2, alpha=4.0, seed=0).train()
    found, twin = (run(model, fused=on, loss=plain) for on in (True, False))
    for name, wanted in twin.items():
        assert torch.equal(found[name], wanted) if not wanted.abs().max() else off(found[name], wanted) < EXACT
