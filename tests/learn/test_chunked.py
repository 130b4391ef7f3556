"""Log-probs and entropies by chunks against the direct way: log-softmax of all logits at once, written out.

Tolerance: the same fp32 numbers go through matrix products of other sizes, so values differ by about 1e-7 and
gradients, sums of 23 terms, by about 1e-6. The counts of what passes through the head show that memory is that of a
chunk.
"""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from torch import Tensor

from stages.learn import losses
from stages.learn.losses import chunked_kl, chunked_log_probs, completion_log_probs, pad_rows

K, D, V = 23, 8, 50
CHUNKS = [1, 7, K, K + 1, 1000]


def make(bias: bool = False) -> tuple[Tensor, torch.nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(D, V, bias=bias)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return (
        torch.randn(K, D, generator=generator).requires_grad_(True),
        head,
        torch.randint(V, (K,), generator=generator),
    )


def direct(states: Tensor, head: torch.nn.Linear, ids: Tensor) -> tuple[Tensor, Tensor]:
    """By the definition, one token at a time."""
    log_probs, entropies = [], []
    for i in range(K):
        logits = states[i] @ head.weight.T + (head.bias if head.bias is not None else 0.0)
        probs = torch.exp(logits) / torch.exp(logits).sum()
        log_probs.append(torch.log(probs[ids[i]]))
        entropies.append(-(probs * torch.log(probs)).sum())
    return torch.stack(log_probs), torch.stack(entropies)


def gradients(value: Tensor, states: Tensor, head: torch.nn.Linear) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, [states, *head.parameters()], retain_graph=True)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("bias", [False, True])
def test_chunks_equal_the_direct_way_in_values_and_gradients(chunk: int, bias: bool) -> None:
    states, head, ids = make(bias)
    weights = torch.linspace(-1, 2, K)  # a plain sum would hide tokens that were swapped
    found, entropies = chunked_log_probs(states, head, ids, chunk=chunk, entropy=True)
    expected, expected_entropies = direct(states, head, ids)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(entropies, expected_entropies, atol=1e-5)
    assert torch.equal(chunked_log_probs(states, head, ids, chunk=chunk), found)
    assert not entropies.requires_grad
    for fast, slow in (((weights * found).sum(), (weights * expected).sum()),):
        for one, other in zip(gradients(fast, states, head), gradients(slow, states, head), strict=True):
            assert float(other.abs().max()) > 0.1
            assert torch.allclose(one, other, atol=1e-5 * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_no_more_than_a_chunk_goes_through_the_head_at_once_and_the_direct_way_goes_once(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, head, ids = make()
    seen: list[int] = []
    head.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    if chunk >= K:
        monkeypatch.setattr(losses, "checkpoint", None)  # not to be called
    chunked_log_probs(states, head, ids, chunk=chunk).sum().backward()  # type: ignore[no-untyped-call]
    assert max(seen) == min(chunk, K)
    assert sum(seen) == (K if chunk >= K else 2 * K)  # each chunk once more in the backward pass


def test_between_the_passes_no_logits_are_held() -> None:
    """Floats that autograd keeps: (K, V) and more directly, none of a vocabulary's width by chunks."""
    states, head, ids = make()
    kept: list[tuple[int, ...]] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(tuple(x.shape))
        return x

    for chunk, expected in ((7, 0), (K, 1)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            chunked_log_probs(states, head, ids, chunk=chunk)
        assert sum(shape[-1:] == (V,) for shape in kept) >= expected
        assert expected or not any(shape[-1:] == (V,) for shape in kept)


def test_a_frozen_head_and_frozen_states_are_fine() -> None:
    states, head, ids = make()
    expected = gradients(chunked_log_probs(states, head, ids).sum(), states, head)
    head.requires_grad_(False)
    (found,) = torch.autograd.grad(chunked_log_probs(states, head, ids, chunk=5).sum(), states)
    assert torch.allclose(found, expected[0], atol=1e-5)
    head.requires_grad_(True)
    (found,) = torch.autograd.grad(chunked_log_probs(states.detach(), head, ids, chunk=5).sum(), head.weight)
    assert torch.allclose(found, expected[1], atol=1e-5)
    with torch.no_grad():
        assert not chunked_log_probs(states, head, ids, chunk=5).requires_grad


def test_bf16_states_get_fp32_log_probs() -> None:
    """The projection is rounded, the softmax is not: sums of probabilities over the vocabulary are 1 to fp32."""
    states, head, _ = make()
    one = states[:1].bfloat16().expand(V, D)
    found = chunked_log_probs(one, head.bfloat16(), torch.arange(V), chunk=9)
    assert found.dtype == torch.float32
    assert float(found.exp().sum().detach()) == pytest.approx(1.0, abs=1e-5)


def test_a_token_that_is_ruled_out_leaves_the_entropy_finite() -> None:
    def head(states: Tensor) -> Tensor:
        return torch.cat([states, torch.full_like(states[:, :1], -torch.inf)], 1)

    states = torch.zeros(3, 4, requires_grad=True)
    log_probs, entropies = chunked_log_probs(states, head, torch.tensor([0, 1, 2]), entropy=True)
    assert torch.allclose(entropies, torch.full((3,), 4.0).log())
    assert torch.allclose(log_probs, -torch.full((3,), 4.0).log())


@pytest.mark.parametrize("make_model", [models.tiny_llama, models.tiny_qwen2])
def test_completion_log_probs_are_the_same_by_chunks(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """1200 completion tokens, so more than one chunk, against one chunk for all."""
    model = make_model().requires_grad_(True)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(40, (24, 60), generator=generator).tolist()
    batch = pad_rows([row[:10] for row in rows], [row[10:] for row in rows], pad_id=0)
    parameters, weights = list(model.parameters()), torch.linspace(-1, 2, 1200) / 1200

    def by_chunks() -> tuple[Tensor, tuple[Tensor, ...]]:
        found, rows = completion_log_probs(model, batch)
        assert rows.tolist() == [i for i in range(24) for _ in range(50)]
        return found.detach(), torch.autograd.grad((weights * found).sum(), parameters)

    fast, fast_gradients = by_chunks()
    monkeypatch.setattr(losses, "chunked_log_probs", lambda *args: chunked_log_probs(*args, chunk=1200))
    slow, slow_gradients = by_chunks()
    assert torch.allclose(fast, slow, atol=1e-5)
    largest = max(float(g.abs().max()) for g in slow_gradients)
    assert largest > 1e-3
    for one, other in zip(fast_gradients, slow_gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-4 * largest)


def test_wrong_arguments_are_refused() -> None:
    states, head, ids = make()
    for args, chunk in (((states, head, ids[:-1]), 7), ((states[0], head, ids[:D]), 7), ((states, head, ids), 0)):
        with pytest.raises(ValueError, match="states"):
            chunked_log_probs(*args, chunk=chunk)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunked_kl_equals_a_loop_over_tokens_in_values_and_gradients(chunk: int) -> None:
    states, head, _ = make(bias=True)
    base_states = torch.randn(K, D, generator=torch.Generator().manual_seed(1))
    weights = torch.linspace(-1, 2, K)
    found = chunked_kl(states, base_states, head, chunk=chunk)
    expected = []
    for i in range(K):
        base, policy = (torch.softmax(head(x[i]), 0) for x in (base_states, states))
        expected.append((base.detach() * (torch.log(base.detach()) - torch.log(policy))).sum())
    assert torch.allclose(found, torch.stack(expected), atol=1e-5)
    for one, other in zip(
        gradients((weights * found).sum(), states, head),
        gradients((weights * torch.stack(expected)).sum(), states, head),
        strict=True,
    ):
        assert torch.allclose(one, other, atol=1e-4)


def test_chunked_kl_has_the_mean_gradient_of_the_sampled_estimate() -> None:
    """GRPO's k = exp(d) - 1 - d of one drawn token, d = log pi_base - log pi: weighted by how often each token is
    drawn, no sampling error is left.
    """
    logits, base = (torch.randn(1, 7, generator=torch.Generator().manual_seed(seed)).double() for seed in (0, 1))
    logits.requires_grad_(True)
    log_probs, difference = logits.log_softmax(1), base.log_softmax(1) - logits.log_softmax(1)
    estimate = (log_probs.detach().exp() * (difference.exp() - 1 - difference)).sum()
    found = chunked_kl(logits, base, lambda states: states).sum()
    wanted = torch.autograd.grad(estimate, logits)[0]
    assert torch.allclose(torch.autograd.grad(found, logits)[0], wanted, atol=1e-6)  # logits are taken to fp32


def test_chunked_kl_of_the_base_itself_is_zero_and_a_token_that_it_rules_out_is_no_nan() -> None:
    base = torch.tensor([[0.0, 1.0, -torch.inf], [2.0, 0.5, 0.1]])
    logits = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.5, 0.1]], requires_grad=True)
    found = chunked_kl(logits, base, lambda states: states)
    assert float(found[0].detach()) > 0 and float(found[1].detach()) == pytest.approx(0, abs=1e-6)
    assert bool(torch.isfinite(torch.autograd.grad(found.sum(), logits)[0]).all())
