"""Losses against slow loops that share no code with them, in values and in gradients.

The loops take one token at a time through the whole language model, one row at a time, and write log-softmax out.
Tolerances: fp32 sums of a few dozen terms in another order differ by about 1e-6; 1e-5 is asked of values, 1e-4 of the
largest gradient for gradients that run through two layers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import Tensor

from stages.learn.adapter import new_adapter
from stages.learn.losses import completion_log_probs, completion_nll, group_advantages, pad_rows
from stages.train.passes import Pass, pass_kl, step_passes
from stages.train.rows import TrainRow

PROMPTS = [[5, 9, 3], [7], [11, 12, 13, 14, 2, 6], [4, 4]]
# a 0, which is also the padding id, is a token like any other
COMPLETIONS = [[8, 1], [21, 22, 23, 24, 1], [30], [0, 39, 0]]
MAKERS = [models.tiny_llama, models.tiny_qwen2]


def batch(prompts: list[list[int]] = PROMPTS, completions: list[list[int]] = COMPLETIONS, pad_id: int = 0) -> Any:
    return pad_rows(prompts, completions, pad_id=pad_id)


def adapted(make: Callable[[], Any]) -> Any:
    return models.shake(new_adapter(make(), rank=2, alpha=4.0, seed=0))


def everything(make: Callable[[], Any]) -> Any:
    return make().requires_grad_(True)


CASES = [
    pytest.param(kind, make, id=f"{kind.__name__}-{make.__name__}") for kind in (everything, adapted) for make in MAKERS
]


def slow_log_probs(model: Any, prompt: list[int], completion: list[int]) -> list[Tensor]:
    """log p of each completion token, one forward pass a token over everything before it."""
    found = []
    for t, token in enumerate(completion):
        logits = model(input_ids=torch.tensor([prompt + completion[:t]])).logits[0, -1]
        found.append(logits[token] - torch.log(torch.exp(logits).sum()))
    return found


def gradients(model: Any, value: Tensor) -> dict[str, Tensor]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(value, [p for _, p in named], allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(named, found, strict=True)}


def assert_same_gradients(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    largest = max(float(g.abs().max()) for g in one.values())
    assert largest > 1e-3  # a comparison of zeros would show nothing
    for name in one:
        assert torch.allclose(one[name], other[name], atol=1e-4 * largest), name


@pytest.mark.parametrize(("kind", "make"), CASES)
def test_completion_log_probs_equal_a_loop_over_tokens(kind: Any, make: Any) -> None:
    model = kind(make)
    fast, rows = completion_log_probs(model, batch())
    slow = [lp for p, c in zip(PROMPTS, COMPLETIONS, strict=True) for lp in slow_log_probs(model, p, c)]
    assert rows.tolist() == [0] * 2 + [1] * 5 + [2] + [3] * 3
    assert torch.allclose(fast, torch.stack(slow), atol=1e-5)


@pytest.mark.parametrize(("kind", "make"), CASES)
def test_completion_nll_and_its_gradient_equal_a_loop_over_tokens(kind: Any, make: Any) -> None:
    model = kind(make)
    fast, _ = completion_nll(model, batch())
    slow = torch.stack(
        [-torch.stack(slow_log_probs(model, p, c)).sum() / len(c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    )
    assert torch.allclose(fast, slow, atol=1e-5)
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0])  # a plain mean would hide rows that were swapped
    assert_same_gradients(gradients(model, (weights * fast).sum()), gradients(model, (weights * slow).sum()))


@pytest.mark.parametrize("make", MAKERS)
def test_a_token_is_predicted_by_what_stands_before_it(make: Any) -> None:
    """The label trap: another token at place t changes the log-probs at t and after it, and none before."""
    model = make()
    before, _ = completion_log_probs(model, batch([[5, 9, 3]], [[8, 21, 22, 1]]))
    after, _ = completion_log_probs(model, batch([[5, 9, 3]], [[8, 21, 30, 1]]))
    assert torch.allclose(before[:2], after[:2], atol=1e-6)
    assert all(abs(a - b) > 1e-3 for a, b in zip(before[2:].tolist(), after[2:].tolist(), strict=True))


def test_gradient_reaches_nothing_but_the_adapter() -> None:
    model = adapted(models.tiny_llama)
    completion_nll(model, batch())[0].sum().backward()  # type: ignore[no-untyped-call]
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient
    assert all("lora_" in name for name in with_gradient)


@pytest.mark.parametrize("make", MAKERS)
def test_padding_and_row_order_change_nothing(make: Any) -> None:
    model = make()
    together, _ = completion_nll(model, batch())
    for i in range(len(PROMPTS)):
        alone, _ = completion_nll(model, batch(PROMPTS[i : i + 1], COMPLETIONS[i : i + 1]))
        assert torch.allclose(together[i], alone[0], atol=1e-5)
    order = [2, 0, 3, 1]
    shuffled, _ = completion_nll(model, batch([PROMPTS[i] for i in order], [COMPLETIONS[i] for i in order]))
    assert torch.allclose(together[order], shuffled, atol=1e-5)
    padded_otherwise, _ = completion_nll(model, batch(pad_id=17))
    assert torch.allclose(together, padded_otherwise, atol=1e-6)
    wider, _ = completion_nll(model, batch([*PROMPTS, [3] * 40], [*COMPLETIONS, [3]]))
    assert torch.allclose(together, wider[:-1], atol=1e-5)


def test_rows_without_prompt_or_completion_are_refused() -> None:
    for prompts, completions in (([[]], [[1]]), ([[1]], [[]]), ([], [])):
        with pytest.raises(ValueError, match="prompt and a completion"):
            pad_rows(prompts, completions, pad_id=0)


def a_pass() -> Pass:
    rows = [TrainRow(tuple(p), tuple(c)) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    (found,) = step_passes({"policy": rows}, 0, "cpu")
    return found


@pytest.mark.parametrize("make", MAKERS)
def test_kl_to_the_base_and_its_gradient_equal_a_loop_over_the_vocabulary(make: Any) -> None:
    model = adapted(make)
    base = make()
    fast = pass_kl(model, a_pass(), "policy")
    terms: list[Tensor] = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        for t in range(len(completion)):
            ids = torch.tensor([prompt + completion[:t]])
            p = torch.softmax(model(input_ids=ids).logits[0, -1], 0)
            q = torch.softmax(base(input_ids=ids).logits[0, -1], 0).detach()
            terms.append(torch.stack([p[v] * torch.log(p[v] / q[v]) for v in range(len(p))]).sum())
    slow = torch.stack(terms).mean()
    assert float(slow.detach()) > 0.05
    assert torch.allclose(fast, slow, atol=1e-5)
    assert_same_gradients(gradients(model, fast), gradients(model, slow))


def test_kl_to_the_base_is_zero_at_a_fresh_adapter_and_leaves_the_adapter_on() -> None:
    model = new_adapter(models.tiny_llama(), rank=2, alpha=4.0, seed=0)
    assert abs(float(pass_kl(model, a_pass(), "policy").detach())) < 1e-6
    models.shake(model)
    before = completion_nll(model, batch())[0].detach()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    pass_kl(model, a_pass(), "policy")
    assert torch.equal(completion_nll(model, batch())[0].detach(), before)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trained


def test_group_advantages_equal_a_loop_and_have_mean_0_and_deviation_1() -> None:
    returns = [1.0, 0.0, 0.25, 0.0, 1.0]
    mean = sum(returns) / 5
    deviation = math.sqrt(sum((r - mean) ** 2 for r in returns) / 5)
    found = group_advantages(torch.tensor(returns), eps=0.01).tolist()
    assert found == pytest.approx([(r - mean) / (deviation + 0.01) for r in returns], abs=1e-6)
    exact = group_advantages(torch.tensor(returns))
    assert float(exact.mean()) == pytest.approx(0, abs=1e-6)
    assert float(exact.std(correction=0)) == pytest.approx(1, abs=1e-4)


def test_undivided_group_advantages_are_returns_minus_their_mean() -> None:
    returns = torch.tensor([1.0, 0.0, 0.25, 0.0, 1.0])
    assert group_advantages(returns, divided=False).tolist() == pytest.approx([0.55, -0.45, -0.2, -0.45, 0.55])
    assert group_advantages(torch.full((3,), 0.1), divided=False).tolist() == [0.0] * 3


def test_group_advantages_of_equal_returns_are_zero_and_of_one_return_refused() -> None:
    for value, n in ((1.0, 8), (0.3, 4), (0.1, 3), (0.7, 7)):
        assert group_advantages(torch.full((n,), value)).tolist() == [0.0] * n
    for wrong in (torch.ones(1), torch.ones(2, 2)):
        with pytest.raises(ValueError, match="at least two returns"):
            group_advantages(wrong)


RATIOS = [0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 2.0]


def test_losses_do_not_change_the_model() -> None:
    model = adapted(models.tiny_llama)
    before = copy.deepcopy(model.state_dict())
    completion_nll(model, batch())
    pass_kl(model, a_pass(), "policy")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
