"""Losses over token rows, as pure functions of a model and a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from stages.learn.batches import Batch


def completion_log_probs(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-prob of every completion token, (K,), and the row it belongs to, (K,), K = all completion tokens of the batch.

        log pi(y_t | x, y_<t)

    Only the positions that predict a completion token go through the vocabulary projection, so memory is K x V,
    not B x T x V. Gradients flow into the model.
    """
    logits_KV, rows, columns = completion_logits(model, batch)
    return -cross_entropy(logits_KV, batch.ids[rows, columns], reduction="none"), rows


def completion_logits(model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 logits (K, V) that predict the completion tokens, and each one's row and column, (K,)."""
    body = model.get_base_model().model if hasattr(model, "get_base_model") else model.model
    states_BTD = body(input_ids=batch.ids, use_cache=False).last_hidden_state
    # Token t is predicted by the state at t - 1: the label trap of every causal model.
    rows, columns = batch.completion.nonzero(as_tuple=True)
    logits_KV: Tensor = model.get_output_embeddings()(states_BTD[rows, columns - 1]).float()
    return logits_KV, rows, columns


def kl_to_base(model: Any, batch: Batch) -> Tensor:
    """Mean KL(pi_theta || pi_base) over the completion tokens, the base being the same model with its adapter switched off.

        KL_t = sum_v pi_theta(v | x, y_<t) [log pi_theta(v | ..) - log pi_base(v | ..)]

    Gradients flow into pi_theta only. Scalar. Source: ours, option `distill.kl_coef`.
    """
    logits_KV, _, _ = completion_logits(model, batch)
    with torch.no_grad(), model.disable_adapter():
        base_KV = completion_logits(model, batch)[0].log_softmax(1)
    log_probs_KV = logits_KV.log_softmax(1)
    return (log_probs_KV.exp() * (log_probs_KV - base_KV)).sum(1).mean()


def completion_nll(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Length-normalised negative log-likelihood of each row's completion.

        nll_i = -(1 / |y_i|) sum_t log pi(y_it | x_i, y_i<t)

    Used for L1 (successor) and L2 (policy) of NLAC, where y is a sample of the target (arXiv 2512.04601, eqs. for L1, L2).
    Length-normalised so that long futures do not win the replay's priority. Returns (nll (B,), log-probs (K,)).
    """
    log_probs, rows = completion_log_probs(model, batch)
    total = torch.zeros(len(batch.ids), dtype=log_probs.dtype, device=log_probs.device).index_add(0, rows, log_probs)
    return -total / batch.n_completion, log_probs


def group_advantages(returns_G: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Advantage of each episode within its group.

        A_i = (R_i - mean R) / (std R + eps)

    std with divisor G; a group of equal returns gives zeros. returns_G: (G,). Returns (G,). Raises ValueError if G < 2.
    Source: GRPO, arXiv 2402.03300, section 4.1."""
    if returns_G.ndim != 1 or len(returns_G) < 2:
        raise ValueError(f"a group needs at least two returns in one dimension, found shape {tuple(returns_G.shape)}")
    if bool((returns_G == returns_G[0]).all()):
        return torch.zeros_like(returns_G)  # 0.1 three times has a rounded mean that is not 0.1
    centred = returns_G - returns_G.mean()
    return centred / (returns_G.std(correction=0) + eps)


def ppo_clip(log_probs_K: Tensor, old_log_probs_K: Tensor, advantages_K: Tensor, *, clip: float) -> tuple[Tensor, dict[str, float]]:
    """Clipped policy-gradient loss, mean over tokens.

        rho_t = exp(log pi_theta - log pi_rollout),   L = -mean_t min(rho_t A_t, clip(rho_t, 1 - c, 1 + c) A_t)

    At rho = 1 its gradient is that of -A log pi. All arguments (K,), one a token. Gradients flow into log_probs_K only.
    Raises ValueError if the shapes differ. Source: PPO, arXiv 1707.06347, eq. 7."""
    if not log_probs_K.shape == old_log_probs_K.shape == advantages_K.shape:
        shapes = [tuple(x.shape) for x in (log_probs_K, old_log_probs_K, advantages_K)]
        raise ValueError(f"log-probs, old log-probs and advantages must have one shape, found {shapes}")
    log_ratio = log_probs_K - old_log_probs_K.detach()
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    loss = -torch.minimum(ratio * advantages_K, clipped * advantages_K).mean()
    metrics = {"clip_frac": float((ratio != clipped).float().mean()), "kl_old": float((ratio - 1 - log_ratio).detach().mean())}
    return loss, metrics
