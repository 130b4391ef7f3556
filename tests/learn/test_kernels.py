"""Which kernels a model in training has, by config, device and autocast; and Liger's, by a stand-in for its package."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import MethodType, ModuleType
from typing import Any

import pytest
import shadows
import torch

from stages.frame.types import UsageError
from stages.learn import kernels
from stages.learn.kernels import liger, no_liger, training_kernels

IDS = torch.tensor([[5, 9, 3, 8, 1, 4]])


def fused(model: Any) -> bool:
    return any("forward" in vars(module) for name, module in model.named_modules() if name.endswith("q_proj"))


@pytest.mark.parametrize(
    ("asked", "autocast", "wanted"),
    [("auto", False, False), ("auto", True, True), ("torch", False, False), ("torch", True, False), ("fused", False, True)],
)  # fmt: skip
def test_auto_is_fused_under_autocast_and_plain_in_fp32_on_a_cpu(asked: Any, autocast: bool, wanted: bool) -> None:
    model = shadows.with_adapter()
    with training_kernels(model, asked, autocast=autocast):
        assert fused(model) == wanted
    assert not fused(model)


def test_auto_in_fp32_on_a_cpu_keeps_every_bit() -> None:
    model = shadows.with_adapter()
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
        with training_kernels(model, "auto", autocast=False):
            assert torch.equal(model(input_ids=IDS).logits, wanted)


def test_auto_is_fused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shadows.with_adapter()
    monkeypatch.setattr(type(model.get_base_model()), "device", torch.device("cuda"))
    with training_kernels(model, "auto", autocast=False):
        assert fused(model)


def test_why_there_is_no_liger_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shadows.with_adapter()
    with pytest.raises(UsageError, match=r"^Liger's kernels want a CUDA device, found cpu; leave them out there\.$"):
        liger(model).__enter__()
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    monkeypatch.setattr(type(model.get_base_model()), "device", torch.device("cuda"))
    with pytest.raises(UsageError, match=r"package liger-kernel, which is not installed; install the extra liger\.$"):
        liger(model).__enter__()
    monkeypatch.setattr(kernels, "find_spec", lambda name: ModuleSpec(name, None))
    assert no_liger("cuda:0") == ""


def stand_in(calls: list[dict[str, Any]]) -> ModuleType:
    """Does as Liger does: binds methods to modules of the instance, and replaces names of the architecture's module."""

    def apply(model: Any, **options: Any) -> None:
        calls.append(options)
        norm, architecture = model.model.norm, sys.modules[type(model).__module__]
        norm.offset = 0.0
        norm.variance_epsilon = norm.variance_epsilon
        norm.forward = MethodType(lambda self, x: type(self).forward(self, x) * 2, norm)
        rotary = architecture.apply_rotary_pos_emb
        architecture.apply_rotary_pos_emb = lambda *args, **more: rotary(*args, **more)  # type: ignore[attr-defined]

    found = ModuleType("liger_kernel.transformers")
    found._apply_liger_kernel_to_instance = apply  # type: ignore[attr-defined]
    return found


def test_liger_goes_into_a_loaded_model_on_a_gpu_and_out_of_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = shadows.with_adapter(), list[dict[str, Any]]()
    base = model.get_base_model()
    architecture = sys.modules[type(base).__module__]
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stand_in(calls))
    monkeypatch.setattr(kernels, "no_liger", lambda device: "")
    before, named = {name: dict(vars(m)) for name, m in model.named_modules()}, dict(vars(architecture))
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
        with training_kernels(model, "fused", autocast=False):
            assert fused(model) and vars(architecture)["apply_rotary_pos_emb"] is not named["apply_rotary_pos_emb"]
            assert torch.allclose(model(input_ids=IDS).logits, 2 * wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(model(input_ids=IDS).logits, wanted)
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before and dict(vars(architecture)) == named
    off = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    assert calls == [{"rope": True, "rms_norm": True, "swiglu": True, **off}]
