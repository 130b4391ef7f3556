"""Divergences between two distributions over the next token, of a student and of a teacher without a gradient.

    reverse         KL(p || q) = sum_v p_v (log p_v - log q_v)              p: the student, q: the teacher
    forward         KL(q || p)
    jensen_shannon  (1 - w) KL(p || m) + w KL(q || m),   m = (1 - w) p + w q

The loss of SDPO (arXiv 2601.20802) is written as the reverse one. These names, w and the bucket of the rest are those
of its authors' code, where alpha = 1 is reverse, 0 forward, and w in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from stages.learn.losses import by_chunks

Divergence = Literal["reverse", "forward", "jensen_shannon"]


def divergence(log_p_KV: Tensor, log_q_KV: Tensor, kind: Divergence, *, mix: float = 0.5) -> Tensor:
    """Divergence of each row, (K,), in nats. mix: w of Jensen-Shannon, in (0, 1).

    log_p_KV, log_q_KV: log-probs of student and teacher, (K, V). Gradients flow into both. A token that one rules out
    counts 0 where its factor is 0. Raises ValueError on shapes that differ, another kind, or a mix outside (0, 1)."""
    if log_p_KV.shape != log_q_KV.shape or log_p_KV.ndim != 2:
        raise ValueError(
            f"log-probs of one shape (K, V) wanted, found {tuple(log_p_KV.shape)} and {tuple(log_q_KV.shape)}"
        )
    if kind == "reverse":
        return _kl(log_p_KV, log_q_KV)
    if kind == "forward":
        return _kl(log_q_KV, log_p_KV)
    if kind != "jensen_shannon" or not 0 < mix < 1:
        raise ValueError(f"wanted reverse, forward, or jensen_shannon with a mix in (0, 1), found {kind!r} and {mix}")
    # Where both rule a token out, its log-prob is -inf, and the gradient of the sum would be none.
    neither = (log_p_KV == -torch.inf) & (log_q_KV == -torch.inf)
    log_m_KV = torch.logaddexp(
        log_p_KV.masked_fill(neither, 0.0) + math.log1p(-mix), log_q_KV.masked_fill(neither, 0.0) + math.log(mix)
    )
    return (1 - mix) * _kl(log_p_KV, log_m_KV) + mix * _kl(log_q_KV, log_m_KV)


def _kl(log_a_KV: Tensor, log_b_KV: Tensor) -> Tensor:
    """sum_v a_v (log a_v - log b_v). A term with a_v = 0 is 0, its limit, and so is its gradient."""
    probs = log_a_KV.exp()
    nothing = probs == 0
    return (probs * (log_a_KV.masked_fill(nothing, 0.0) - log_b_KV.masked_fill(nothing, 0.0))).sum(1)


def bucketed(log_p_KV: Tensor, log_q_KV: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Both distributions over the student's `top_k` most probable tokens and one bucket of all others, (K, top_k + 1).

    Both as they are for top_k = 0, or where no token would be left for the bucket. Merging tokens never raises a
    divergence. Gradients flow into the log-probs, and none into the choice."""
    if not 0 < top_k < log_p_KV.shape[1]:
        return log_p_KV, log_q_KV
    chosen = log_p_KV.detach().topk(top_k, dim=1).indices

    def merged(log_probs: Tensor) -> Tensor:
        rest = log_probs.scatter(1, chosen, -torch.inf).logsumexp(1, keepdim=True)
        return torch.cat([log_probs.gather(1, chosen), rest], 1)

    return merged(log_p_KV), merged(log_q_KV)


def chunked_divergence(
    student_KD: Tensor, teacher_KD: Tensor, head: Callable[[Tensor], Tensor], ids_K: Tensor, *, kind: Divergence,
    mix: float = 0.5, top_k: int = 0, chunk: int = 1024,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Divergence at every token, (K,), and log q - log p of the token that was taken, (K,), without a gradient.

    Hidden states of student and teacher, (K, D); memory as of `losses.chunked_log_probs`. Softmax in fp32. Gradients
    flow into the student's states, and through them into the head; none into the teacher's."""

    def part(student: Tensor, teacher: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        log_p_KV = head(student).float().log_softmax(1)
        with torch.no_grad():
            log_q_KV = head(teacher).float().log_softmax(1)
        taken = (log_q_KV - log_p_KV.detach()).gather(1, ids[:, None])[:, 0]
        return divergence(*bucketed(log_p_KV, log_q_KV, top_k), kind, mix=mix), taken

    found, taken = by_chunks(part, student_KD, teacher_KD, ids_K, chunk=chunk)
    return found, taken
