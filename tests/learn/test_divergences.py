"""Divergences of two distributions over the next token, against loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from stages.learn.divergences import bucketed, chunked_divergence, divergence

KINDS: list[Any] = ["reverse", "forward", "jensen_shannon"]


def two(k: int = 6, v: int = 9, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a student, which wants a gradient, and of a teacher."""
    generator = torch.Generator().manual_seed(0)
    p, q = (2 * torch.randn(k, v, generator=generator, dtype=dtype) for _ in range(2))
    return p.requires_grad_(), q


def slow(kind: str, p: list[float], q: list[float], w: float = 0.5) -> float:
    """The sums of the module's text, over probabilities."""

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    if kind == "jensen_shannon":
        m = [(1 - w) * x + w * y for x, y in zip(p, q, strict=True)]
        return (1 - w) * kl(p, m) + w * kl(q, m)
    return kl(p, q) if kind == "reverse" else kl(q, p)


def merged(p: list[float], q: list[float], k: int) -> tuple[list[float], list[float]]:
    """The student's k most probable tokens, and the rest as one."""
    top = sorted(range(len(p)), key=lambda v: -p[v])[:k]
    one, other = ([*(x[v] for v in top), sum(x[v] for v in range(len(x)) if v not in top)] for x in (p, q))
    return one, other


@pytest.mark.parametrize("w", [0.5, 0.2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_divergence_equals_a_loop_over_the_vocabulary(kind: Any, w: float) -> None:
    p, q = two()
    found = divergence(p.log_softmax(1), q.log_softmax(1), kind, mix=w)
    wanted = [slow(kind, *pair, w) for pair in zip(p.softmax(1).tolist(), q.softmax(1).tolist(), strict=True)]
    assert found.tolist() == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_its_gradient_is_that_of_finite_differences(kind: Any) -> None:
    p, q = two(2, 5)
    log_q = q.log_softmax(1)
    assert torch.autograd.gradcheck(lambda x: divergence(x.log_softmax(1), log_q, kind, mix=0.3), (p,))
    assert torch.autograd.gradcheck(lambda x: divergence(*bucketed(x.log_softmax(1), log_q, 2), kind, mix=0.3), (p,))


@pytest.mark.parametrize("kind", KINDS)
def test_the_k_most_probable_tokens_and_one_bucket_equal_a_loop_and_are_never_further_apart(kind: Any) -> None:
    p, q = two()
    log_p, log_q = p.log_softmax(1), q.log_softmax(1)
    whole = divergence(log_p, log_q, kind)
    for k in range(1, 9):
        found = divergence(*bucketed(log_p, log_q, k), kind)
        pairs = zip(p.softmax(1).tolist(), q.softmax(1).tolist(), strict=True)
        assert found.tolist() == pytest.approx([slow(kind, *merged(*pair, k)) for pair in pairs], rel=1e-10)
        assert bool((found <= whole + 1e-12).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [0, 9, 40])
def test_as_many_tokens_as_the_vocabulary_has_are_the_whole_of_it(kind: Any, k: int) -> None:
    p, q = two()
    log_p, log_q = p.log_softmax(1), q.log_softmax(1)
    assert torch.equal(divergence(*bucketed(log_p, log_q, k), kind), divergence(log_p, log_q, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_distributions_are_at_0_without_a_gradient(kind: Any) -> None:
    p, _ = two()
    found = divergence(p.log_softmax(1), p.detach().log_softmax(1), kind)
    (gradient,) = torch.autograd.grad(found.sum(), p)
    assert float(found.detach().abs().max()) < 1e-12 and float(gradient.abs().max()) < 1e-12


def test_of_a_teacher_that_is_sure_the_forward_one_is_the_cross_entropy() -> None:
    """So it comes to the loss of hindsight distillation, where the teacher's reply is learned."""
    p, _ = two()
    ids = torch.tensor([0, 3, 8, 1, 1, 5])
    sure = torch.full((6, 9), -torch.inf, dtype=p.dtype).scatter(1, ids[:, None], 0.0)
    found, wanted = divergence(p.log_softmax(1), sure, "forward"), cross_entropy(p, ids, reduction="none")
    assert torch.allclose(found, wanted, atol=1e-12)
    one, other = (torch.autograd.grad(x.sum(), p, retain_graph=True)[0] for x in (found, wanted))
    assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_both_rule_out_counts_nothing(kind: Any) -> None:
    p, q = two()
    masked = torch.zeros(6, 9, dtype=torch.bool)
    masked[:, 4] = True
    rest = [v for v in range(9) if v != 4]
    log_p, log_q = (x.masked_fill(masked, -torch.inf).log_softmax(1) for x in (p, q))
    found = divergence(log_p, log_q, kind)
    (gradient,) = torch.autograd.grad(found.sum(), p)
    assert torch.allclose(found, divergence(p[:, rest].log_softmax(1), q[:, rest].log_softmax(1), kind))
    assert bool(torch.isfinite(gradient).all()) and float(gradient[:, 4].abs().max()) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [0, 3])
def test_chunks_are_the_whole_and_the_teacher_gets_no_gradient(kind: Any, top_k: int) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 9)
    mine, theirs = (torch.randn(7, 4, requires_grad=True) for _ in range(2))
    ids = torch.randint(9, (7,))

    def step(chunk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        mine.grad = head.weight.grad = None
        found, taken = chunked_divergence(mine, theirs, head, ids, kind=kind, top_k=top_k, chunk=chunk)
        found.sum().backward()  # type: ignore[no-untyped-call]
        assert mine.grad is not None
        return found.detach(), taken, mine.grad.clone(), head.weight.grad

    one, many = step(100), step(3)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one[:3], many[:3], strict=True))
    assert theirs.grad is None and not one[1].requires_grad
    log_p, log_q = (head(x).log_softmax(1) for x in (mine, theirs))
    gaps = (log_q - log_p).detach()
    assert one[1].tolist() == pytest.approx([float(gaps[k, i]) for k, i in enumerate(ids)], abs=1e-5)
    # The head's gradient, too, is the student's alone.
    loss = divergence(*bucketed(log_p, log_q.detach(), top_k), kind).sum()
    (wanted,) = torch.autograd.grad(loss, head.weight)
    assert one[3] is not None and torch.allclose(one[3], wanted, atol=1e-5)


def test_what_is_no_divergence_is_refused() -> None:
    p, q = two()
    for wrong in ({"kind": "sideways"}, {"kind": "jensen_shannon", "mix": 0.0}, {"kind": "jensen_shannon", "mix": 1.0}):
        with pytest.raises(ValueError, match="wanted reverse, forward, or jensen_shannon"):
            divergence(p, q, **wrong)
    with pytest.raises(ValueError, match="one shape"):
        divergence(p, q[:3], "reverse")
