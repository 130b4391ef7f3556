"""Losses over token rows and over turns, as pure functions of a model and a batch, or of log-probs and advantages."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from stages.learn.adapter import base_of
from stages.learn.later import Later

Ratio = Literal["turn", "turn_mean", "token"]
Per = Literal["turn", "episode"]


@dataclass(frozen=True)
class Batch:
    """B rows: prompt then completion, padded on the right.

    ids: (B, T). completion: (B, T) bool, True on the tokens that are trained on. n_completion: (B,).
    No attention mask is needed: padding stands to the right, where a causal model's real tokens cannot see it.
    """

    ids: Tensor
    completion: Tensor
    n_completion: Tensor


def pad_rows(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], *, pad_id: int) -> Batch:
    """Raises ValueError on an empty prompt or completion: a row that trains nothing is a bug upstream."""
    if not prompts or any(not p for p in prompts) or any(not c for c in completions):
        raise ValueError("every training row needs a prompt and a completion of at least one token")
    lengths = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    ids = torch.full((len(prompts), max(lengths)), pad_id)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids[i, : len(prompt)], ids[i, len(prompt) : lengths[i]] = as_tensor(prompt), as_tensor(completion)
        mask[i, len(prompt) : lengths[i]] = True
    return Batch(ids, mask, mask.sum(1))


def as_tensor(ids: Sequence[int]) -> Tensor:
    """Ids of an array without a look at each."""
    return torch.frombuffer(ids, dtype=torch.int32) if isinstance(ids, array) else torch.tensor(ids)


def completion_log_probs(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-prob of every completion token of the batch, (K,), and the row that it belongs to, (K,).

        log pi(y_t | x, y_<t)

    Only positions that predict a completion token go through the vocabulary projection, 1024 at a time. So memory is
    that of `chunked_log_probs`, not B x T x V. Gradients flow into the model.
    """
    states_KD, rows, columns = completion_states(model, batch)
    return chunked_log_probs(states_KD, model.get_output_embeddings(), batch.ids[rows, columns]), rows


def completion_states(model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Last hidden states (K, D) that predict the completion tokens, and each one's row and column, (K,)."""
    states_BTD = base_of(model).model(input_ids=batch.ids, use_cache=False).last_hidden_state
    # Token t is predicted by the state at t - 1: the label trap of every causal model.
    rows, columns = batch.completion.nonzero(as_tuple=True)
    return states_BTD[rows, columns - 1], rows, columns


@overload
def chunked_log_probs(
    states_KD: Tensor, head: Callable[[Tensor], Tensor], ids_K: Tensor, *, chunk: int = 1024
) -> Tensor: ...
@overload
def chunked_log_probs(
    states_KD: Tensor, head: Callable[[Tensor], Tensor], ids_K: Tensor, *, chunk: int = 1024, entropy: Literal[True]
) -> tuple[Tensor, Tensor]: ...
def chunked_log_probs(
    states_KD: Tensor, head: Callable[[Tensor], Tensor], ids_K: Tensor, *, chunk: int = 1024, entropy: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-prob of given tokens, and on request the entropy of what they were drawn from, from hidden states.

        l_i = log softmax(head(h_i))[y_i],   H_i = - sum_v p_iv log p_iv

    More than `chunk` tokens go through the head in chunks, and each chunk once more in the backward pass. Memory holds
    chunk x V floats instead of K x V. Up to `chunk` tokens take the direct way. states_KD: (K, D), ids_K: (K,) long,
    head: (., D) -> (., V); softmax in fp32.
    Returns l (K,), with entropy=True (l, H). Gradients flow into the states and the head, through l; H carries none.
    Raises ValueError if the shapes do not fit or chunk < 1. Source: arXiv 1604.06174 (recomputation).
    """
    if states_KD.ndim != 2 or ids_K.shape != states_KD.shape[:1] or chunk < 1:
        shapes = f"{tuple(states_KD.shape)}, {tuple(ids_K.shape)}"
        raise ValueError(f"states (K, D), ids (K,) and chunk >= 1 wanted, found {shapes} and chunk {chunk}")

    def part(states: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        logits = head(states).float()
        log_probs = -cross_entropy(logits, ids, reduction="none")
        return (log_probs, _entropy(logits.detach())) if entropy else (log_probs,)

    found = by_chunks(part, states_KD, ids_K, chunk=chunk)
    return (found[0], found[1]) if entropy else found[0]


def by_chunks(part: Callable[..., tuple[Tensor, ...]], *rows: Tensor, chunk: int) -> tuple[Tensor, ...]:
    """`part` of all rows, at most `chunk` at a time, each chunk computed once more in the backward pass."""
    if len(rows[0]) <= chunk:
        return part(*rows)
    cuts = [slice(start, start + chunk) for start in range(0, len(rows[0]), chunk)]
    parts = [checkpoint(part, *(x[cut] for x in rows), use_reentrant=False) for cut in cuts]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _entropy(logits_KV: Tensor) -> Tensor:
    log_probs = logits_KV.log_softmax(1)
    probs = log_probs.exp()
    # A token that is ruled out has p log p = 0 x -inf, whose limit is 0.
    return -(probs * log_probs.masked_fill(probs == 0, 0.0)).sum(1)


def chunked_kl(
    states_KD: Tensor, base_states_KD: Tensor, head: Callable[[Tensor], Tensor], *, chunk: int = 1024
) -> Tensor:
    """KL from the base policy at every action token, over the whole vocabulary, (K,).

        KL_t = sum_v pi_base(v) [log pi_base(v) - log pi_theta(v)]

    Its gradient in the logits, pi_theta - pi_base, is the mean of that of GRPO's estimate from sampled tokens (arXiv
    2402.03300, eq. 4): it holds on to whatever the base would do. But it has no sampling noise and is bounded, where
    the estimate grows with pi_base / pi_theta of the one token that was drawn. Memory as of `chunked_log_probs`.
    states_KD, base_states_KD: (K, D), of policy and base; gradients flow into the former and the head. Source: ours.
    """

    def part(states: Tensor, base_states: Tensor) -> tuple[Tensor]:
        log_probs = head(states).float().log_softmax(1)
        with torch.no_grad():
            base = head(base_states).float().log_softmax(1)
        terms = base.exp() * (base - log_probs)
        # A token that the base rules out has 0 x -inf, whose limit is 0.
        return (terms.masked_fill(base == -torch.inf, 0.0).sum(1),)

    return by_chunks(part, states_KD, base_states_KD, chunk=chunk)[0]


def completion_nll(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Length-normalised negative log-likelihood of each row's completion.

        nll_i = -(1 / |y_i|) sum_t log pi(y_it | x_i, y_i<t)

    Length-normalised so that long futures do not win the replay's priority. Returns (nll (B,), log-probs (K,)).
    """
    log_probs, rows = completion_log_probs(model, batch)
    total = torch.zeros(len(batch.ids), dtype=log_probs.dtype, device=log_probs.device).index_add(0, rows, log_probs)
    return -total / batch.n_completion, log_probs


def group_advantages(returns_G: Tensor, *, divided: bool = True, eps: float = 1e-6) -> Tensor:
    """Advantage of each episode within its group.

        A_i = (R_i - mean R) / (std R + eps),  or R_i - mean R where it is not `divided`

    std with divisor G; a group of equal returns gives zeros. returns_G: (G,). Returns (G,). Raises ValueError if G < 2.
    Source: GRPO, arXiv 2402.03300, section 4.1; undivided: arXiv 2503.20783."""
    if returns_G.ndim != 1 or len(returns_G) < 2:
        raise ValueError(f"a group needs at least two returns in one dimension, found shape {tuple(returns_G.shape)}")
    if bool((returns_G == returns_G[0]).all()):
        return torch.zeros_like(returns_G)  # 0.1 three times has a rounded mean that is not 0.1
    centred = returns_G - returns_G.mean()
    return centred / (returns_G.std(correction=0) + eps) if divided else centred


def loss_normaliser(per: Per, n_turns_B: Tensor) -> float:
    """What a step's sum over turns is divided by: the number of its turns, or of its episodes.

    "turn" is the slides' mean over turns. It is biased where the policy decides how many turns there are: a turn of a
    long episode counts less.
    "episode" is not [ours], see tests/theory/test_optional_stopping.py. n_turns_B: turns of each episode of the *step*.
    All parts of a step divide by this one number, so their gradients add up to the step's.
    """
    return float(n_turns_B.sum()) if per == "turn" else float(len(n_turns_B))


def turn_ppo_clip(
    log_probs_K: Tensor,
    old_log_probs_K: Tensor,
    turn_of_K: Tensor,
    advantages_J: Tensor,
    *,
    clip: float,
    ratio: Ratio = "turn",
    normaliser: float,
) -> tuple[Tensor, Later]:
    """Clipped policy-gradient loss over turns of several tokens.

        L = -(1 / Z) sum_j min(rho_j A_j, clip(rho_j, 1 - c, 1 + c) A_j),   l_t = log pi_theta - log pi_old of token t
        turn:       rho_j = exp(sum_{t in j} l_t), the ratio of the products of token probabilities
        turn_mean:  rho_j = exp(mean_{t in j} l_t), whose gradient at rho = 1 is 1/|a_j| of the turn's: biased where
            actions differ in length
        token:      rho_t = exp(l_t), the sum running over tokens with A of their turn; at rho = 1 the same gradient as
            `turn`

    At rho = 1 and `turn` the gradient is that of -(1 / Z) sum_j A_j log pi(a_j). Of one-token turns all are one.
    K action tokens of J turns: log-probs (K,), turn_of_K (K,) long in [0, J), every turn with a token; advantages_J
    (J,); Z = normaliser, see `loss_normaliser`. Gradients flow into log_probs_K only.
    Metrics: ratio_mean, ratio_max and clip_frac over the ratios, kl_old = mean_t (exp(l_t) - 1 - l_t), gap_mean and
    gap_max of |l_t|. Before the first step of an iteration the weights are those that sampled. There the gaps are the
    disagreement of engine and trainer. "count/<name>": how many ratios, or tokens, the mean <name> is of. Where a ratio
    overflows and A < 0, the loss is infinite, which `fit` refuses; else it is clipped, the gradient 0.
    Raises ValueError on wrong shapes, Z <= 0 or another ratio; on the CPU also on a turn without tokens, and old
    log-probs that are not finite. On another device the values are not looked at, for that would wait for it: see
    `check_tokens`.
    Source: Self-AC slides, actor loss; PPO, arXiv 1707.06347, eq. 7; `turn_mean`: GSPO, arXiv 2507.18071; `turn` as
    default [ours].
    """
    _check_shapes(log_probs_K, old_log_probs_K, turn_of_K, advantages_J)
    if log_probs_K.device.type == "cpu":
        check_tokens(old_log_probs_K, turn_of_K, len(advantages_J))
    if not normaliser > 0:
        raise ValueError(f"normaliser must be > 0, found {normaliser}")
    token_K = log_probs_K - old_log_probs_K.detach()
    if ratio == "token":
        log_ratio, advantage = token_K, advantages_J.detach()[turn_of_K]
    elif ratio in ("turn", "turn_mean"):
        advantage = advantages_J.detach()
        log_ratio = token_K.new_zeros(len(advantage)).index_add(0, turn_of_K, token_K)
        if ratio == "turn_mean":
            lengths_J = torch.zeros_like(advantage, dtype=torch.long)  # not by bincount, which waits for a GPU
            log_ratio = log_ratio / lengths_J.index_add(0, turn_of_K, torch.ones_like(turn_of_K))
    else:
        raise ValueError(f"ratio must be turn, turn_mean or token, found {ratio!r}")
    # Far above 1 + c a ratio with A >= 0 has the clipped loss and no gradient; left alone, its gradient would be 0 x
    # inf.
    far = math.log1p(clip) + 1
    rho = torch.where(advantage >= 0, log_ratio.clamp(max=far), log_ratio).exp()
    loss = -torch.minimum(rho * advantage, rho.clamp(1 - clip, 1 + clip) * advantage).sum() / normaliser
    seen, token = log_ratio.detach().exp(), token_K.detach()
    gap, n = token.abs(), float(len(seen))
    clipped = (seen != seen.clamp(1 - clip, 1 + clip)).sum()
    counts = dict.fromkeys(("count/ratio_mean", "count/clip_frac"), n)
    counts |= dict.fromkeys(("count/kl_old", "count/gap_mean"), float(len(token)))

    def told(mean: float, largest: float, n_clipped: float, kl: float, gap_mean: float, gap_max: float) -> Any:
        found = {"ratio_mean": mean, "ratio_max": largest, "clip_frac": n_clipped / n, "kl_old": kl}
        return found | {"gap_mean": gap_mean, "gap_max": gap_max} | counts

    numbers = [seen.mean(), seen.max(), clipped, (token.exp() - 1 - token).mean(), gap.mean(), gap.max()]
    return loss, Later(numbers, told)


def _check_shapes(log_probs_K: Tensor, old_log_probs_K: Tensor, turn_of_K: Tensor, advantages_J: Tensor) -> None:
    if (
        not log_probs_K.shape == old_log_probs_K.shape == turn_of_K.shape
        or log_probs_K.ndim != 1
        or advantages_J.ndim != 1
    ):
        shapes = [tuple(x.shape) for x in (log_probs_K, old_log_probs_K, turn_of_K, advantages_J)]
        raise ValueError(
            f"log-probs, old log-probs and turns of shape (K,) and advantages of shape (J,) wanted, found {shapes}"
        )
    if turn_of_K.dtype != torch.long:
        raise ValueError(f"turn_of_K must be long and in [0, {len(advantages_J)}), found {turn_of_K.dtype}")


def check_tokens(old_log_probs_K: Tensor, turn_of_K: Tensor, j: int) -> None:
    """Raises ValueError unless old log-probs are finite, and each of the j turns has a token. To be asked on the CPU,
    before the tensors go to their device.
    """
    if not bool(torch.isfinite(old_log_probs_K).all()):
        raise ValueError(
            "old log-probs must be finite: the engine has to say with what probability it produced each token"
        )
    if bool(((turn_of_K < 0) | (turn_of_K >= j)).any()):
        raise ValueError(f"turn_of_K must be in [0, {j}), found {turn_of_K.tolist()}")
    lengths_J = torch.bincount(turn_of_K, minlength=j)
    if not j or bool((lengths_J == 0).any()):
        raise ValueError(f"every turn needs at least one action token, found lengths {lengths_J.tolist()}")
