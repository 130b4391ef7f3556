"""Targets of values, advantages of turns, and the value loss of Self-AC: pure functions over rows of episodes.

Source: Self-AC slides, episode layout, critic loss and actor loss; departures are marked [ours].

An episode is a row of states k = 0..N, N turns: turn k leads from state k to state k + 1. Reward r_k stands on the
state it came with:

    R_k = r_k + gamma R_{k+1},  R_N = r_N

so the reward of the final turn stands on state N, and V_k estimates R_k, the state's own reward included. Axes: B rows,
M states, M >= N + 1; what a row holds right of its state N is padding and is never read.

Terminated: nothing comes after state N. Truncated: it went on unseen, so V_N stands for all from there on [ours].

[ours] In a terminated row earlier states bootstrap from V_N, an estimate of the known r_N, as the slides' V << n does.
`known_end` puts r_N in its place. With exact values both are unbiased. V_N has the smaller variance if the state does
not show its reward (a verdict outside the text). With wrong values r_N cuts the bias. On the MDP of
tests/theory/test_optional_stopping.py td_mean's bias falls from 0.97 to 0.36 of the gradient. The price is 10 % more
spread of the gradient with exact values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from stages.learn.later import Later
from stages.learn.losses import group_advantages

AdvantageKind = Literal["td_mean", "td1", "gae", "mc", "group"]
KINDS: tuple[AdvantageKind, ...] = get_args(AdvantageKind)


def turn_mask(n_turns: Tensor, m: int) -> Tensor:
    """True on the turns k = 0..N-1 of each row. n_turns: (B,). Returns (B, m) bool."""
    return torch.arange(m, device=n_turns.device) < n_turns[:, None]


def state_mask(n_turns: Tensor, truncated: Tensor, m: int) -> Tensor:
    """True on the states that have a target: k = 0..N, and 0..N-1 where truncated.

    State N of a truncated row is bootstrapped from, and has none. n_turns, truncated: (B,). Returns (B, m) bool.
    """
    return turn_mask(n_turns + (~truncated).long(), m)


def td_targets(rewards: Tensor, values: Tensor, n_turns: Tensor, truncated: Tensor, *, n: int, gamma: float) -> Tensor:
    """n-step bootstrapped target of every state.

        target_n(k) = r_k + gamma r_{k+1} + ... + gamma^(n-1) r_{k+n-1} + gamma^n V_{k+n},  terms past state N are 0
        truncated, n > N - k:  r_k + ... + gamma^(N-k-1) r_{N-1} + gamma^(N-k) V_N

    n = 1 is one-step TD; n > N - k is the Monte-Carlo return. No gradient flows: stop_grad is [ours].
    rewards, values: (B, M); n_turns: (B,) long, N in [1, M-1]; truncated: (B,) bool; gamma: per turn, in [0, 1].
    Returns (B, M), 0 where `state_mask` is False. Raises ValueError for n < 1, other shapes or types, N or gamma out of
    range, or a reward that is not finite. Raises it for r_N != 0 in a truncated row, too: there V_N stands for it.
    Source: Self-AC slides, critic loss.
    """
    _check(rewards, values, n_turns, truncated, gamma, n)
    # More than M steps reach no further than M.
    return [*_targets(rewards, values, n_turns, truncated, gamma, min(n, rewards.shape[1]))][-1]


def td_mean_targets(
    rewards: Tensor, values: Tensor, n_turns: Tensor, truncated: Tensor, *, gamma: float, n_max: int = 5
) -> Tensor:
    """Mean of the n-step targets, n = 1..n_max.

        (1 / n_max) sum_n target_n(k)

    n_max = 1 is one-step TD. No gradient flows. Shapes, errors as of `td_targets`. Source: Self-AC slides, critic loss.
    """
    _check(rewards, values, n_turns, truncated, gamma, n_max)
    return torch.stack([*_targets(rewards, values, n_turns, truncated, gamma, n_max)]).mean(0)


def monte_carlo(rewards: Tensor, values: Tensor, n_turns: Tensor, truncated: Tensor, *, gamma: float) -> Tensor:
    """Return of every state: `td_targets` with n > N.

        R_k = r_k + gamma R_{k+1},  R_N = r_N, or V_N where truncated

    `values` are read in truncated rows only, at state N. No gradient flows. Shapes and errors as of `td_targets`."""
    return td_targets(rewards, values, n_turns, truncated, n=rewards.shape[-1], gamma=gamma)


def gae(rewards: Tensor, values: Tensor, n_turns: Tensor, truncated: Tensor, *, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimate of every turn.

        A_k = sum_{l=0}^{N-k} (gamma lam)^l delta_{k+l},  delta_k = r_k + gamma V_{k+1} - V_k,  delta_N = r_N - V_N, or
            0 where truncated

    lam = 0 is the one-step TD error; lam = 1 is the return minus the value. The sum includes the terminal state's own
    error delta_N [ours: the reward is on the state, so the usual sum over turns would never see r_N]. No gradient
    flows.
    lam: in [0, 1]. Shapes and errors as of `td_targets`; returns (B, M), 0 outside turns. Source: arXiv 1506.02438, eq.
    16.
    """
    if not 0 <= lam <= 1:
        raise ValueError(f"lam must be in [0, 1], found {lam}")
    target = td_targets(rewards, values, n_turns, truncated, n=1, gamma=gamma)
    m = rewards.shape[1]
    delta = _only(state_mask(n_turns, truncated, m), target - values.detach())
    columns = [torch.zeros_like(delta[:, 0])]
    for k in reversed(range(m)):
        columns.append(delta[:, k] + gamma * lam * columns[-1])
    return _only(turn_mask(n_turns, m), torch.stack(columns[:0:-1], 1))


def group_turn_advantages(
    rewards: Tensor, n_turns: Tensor, truncated: Tensor, groups: Tensor, *, gamma: float
) -> Tensor:
    """GRPO's advantage: the episode's discounted reward relative to its group, one number for all its turns.

        G_i = sum_k gamma^k r_ik,  A_ik = (G_i - mean G) / (std G + eps)  over the rows of one group

    gamma = 1 is the total reward. Truncated rows are not bootstrapped [ours]: GRPO has no values. No gradient flows.
    groups: (B,) long, one id a group. Shapes and errors as of `td_targets`, and ValueError for a group of one row;
    returns (B, M), 0 outside turns. Source: arXiv 2402.03300, section 4.1.
    """
    _check(rewards, rewards, n_turns, truncated, gamma)
    if groups.shape != n_turns.shape:
        raise ValueError(f"one group id a row wanted, found shape {tuple(groups.shape)} for {len(n_turns)} rows")
    m = rewards.shape[1]
    discount = gamma ** torch.arange(m, device=rewards.device, dtype=rewards.dtype)
    returns = (_only(turn_mask(n_turns + 1, m), rewards) * discount).sum(1).detach()
    found = torch.empty_like(returns)
    for group in torch.unique(groups):
        found[groups == group] = group_advantages(returns[groups == group])
    return _only(turn_mask(n_turns, m), found[:, None].expand(-1, m))


def advantages(
    kind: AdvantageKind,
    rewards: Tensor,
    values: Tensor,
    n_turns: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    n_max: int = 5,
    lam: float = 0.95,
    groups: Tensor | None = None,
    known_end: bool = False,
) -> Tensor:
    """Advantage of every turn, by one of five estimators.

        td_mean: mean_{n=1..n_max} target_n(k) - V_k    td1: target_1(k) - V_k    mc: R_k - V_k    gae: see `gae`
            group: see `group_turn_advantages`

    Unbiased at gamma = 1: mc for any values; td_mean, td1 and gae for exact values. group is biased: it divides by a
    deviation that includes the episode. gamma < 1: turn k of a policy gradient of the discounted return would weigh
    gamma^k, and no turn is weighed.
    n_max is read by td_mean only, lam by gae only, groups (B,) by group only. known_end: r_N in place of V_N in
    terminated rows, see the module; it changes td_mean, td1 and gae. No gradient flows.
    Shapes and errors as of `td_targets`; returns (B, M), 0 outside turns. Source: Self-AC slides, actor loss (td_mean),
    the others [ours].
    """
    _check(rewards, values, n_turns, truncated, gamma, n_max)
    rows = (rewards, _known_end(rewards, values, n_turns, truncated) if known_end else values, n_turns, truncated)
    if kind == "gae":
        return gae(*rows, gamma=gamma, lam=lam)
    if kind == "group":
        if groups is None:
            raise ValueError("advantage `group` needs the group id of every row")
        return group_turn_advantages(rewards, n_turns, truncated, groups, gamma=gamma)
    if kind not in KINDS:
        raise ValueError(f"advantage must be one of {', '.join(KINDS)}, found {kind!r}")
    n_max = 1 if kind == "td1" else n_max
    targets = monte_carlo(*rows, gamma=gamma) if kind == "mc" else td_mean_targets(*rows, gamma=gamma, n_max=n_max)
    return _only(turn_mask(n_turns, rewards.shape[1]), targets - values.detach())


def batch_deviation(advantages_J: Tensor) -> float:
    """What the advantages of a batch are divided by, so that those of all estimators have one scale.

        sqrt(mean_j (A_j - mean A)^2) over all turns of the batch,  1 where they are all alike

    Nothing is subtracted: that would be another baseline. advantages_J: (J,), J >= 1. No gradient flows. [ours]
    """
    found = float(advantages_J.detach().double().std(correction=0))
    return found if found > 1e-6 else 1.0


def value_loss(
    values: Tensor,
    rewards: Tensor,
    n_turns: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    n_max: int = 5,
    normaliser: float | None = None,
    known_end: bool = False,
) -> tuple[Tensor, Later]:
    """Squared error of the values to their n-step targets, mean over n = 1..n_max and the states with a target.

        L = (1 / n_max) sum_n (1 / Z) sum_{i, k} (V_ik - stop_grad(target_n(i, k)))^2

    Z: number of states with a target in these rows, or `normaliser`, the number in the whole step. With `normaliser`
    the losses of a step's parts add up to the loss of all its rows. known_end: r_N in place of V_N in the targets of
    earlier states of terminated rows, see the module; V_N is still trained towards r_N. Gradients flow into V_ik only,
    not into the targets.
    Metrics: `value_loss/n1`.. by n. Shapes and errors as of `td_targets`.
    Source: Self-AC slides, critic loss; mean for the slides' norm [ours].
    """
    _check(rewards, values, n_turns, truncated, gamma, n_max)
    if normaliser is not None and not normaliser > 0:
        raise ValueError(f"normaliser must be > 0, found {normaliser}")
    mask = state_mask(n_turns, truncated, rewards.shape[1])
    seen = _only(mask, values)
    ahead = _known_end(rewards, values, n_turns, truncated) if known_end else values
    targets = _targets(rewards, ahead, n_turns, truncated, gamma, n_max)
    losses = torch.stack([(seen - target).square().sum() for target in targets]) / (normaliser or mask.sum())
    metrics = Later([losses], lambda found: {f"value_loss/n{n}": loss for n, loss in enumerate(found, 1)})
    return losses.mean(), metrics


def _targets(
    rewards: Tensor, values: Tensor, n_turns: Tensor, truncated: Tensor, gamma: float, n_max: int
) -> Iterator[Tensor]:
    """target_1 .. target_{n_max}."""
    m = rewards.shape[1]
    real, with_target = turn_mask(n_turns + 1, m), state_mask(n_turns, truncated, m)
    v = _only(real, values.detach())
    # With V_N as a truncated row's reward of state N and nothing after it, a sum that runs past N has just the wanted
    # bootstrap.
    r = torch.where(with_target, rewards.detach(), v)
    # What stands n states later is then a cut of the same rows, with zeros past the end.
    past_end = r.new_zeros(len(r), n_max)
    r_on, v_on = torch.cat([r, past_end], 1), torch.cat([v, past_end], 1)
    total = torch.zeros_like(r)
    for n in range(n_max):
        total = total + gamma**n * r_on[:, n : n + m]
        yield _only(with_target, total + gamma ** (n + 1) * v_on[:, n + 1 : n + 1 + m])


def _known_end(rewards: Tensor, values: Tensor, n_turns: Tensor, truncated: Tensor) -> Tensor:
    """Values with r_N in place of V_N in terminated rows."""
    m = rewards.shape[1]
    last = turn_mask(n_turns + 1, m) & ~turn_mask(n_turns, m)
    return torch.where(last & ~truncated[:, None], rewards, values)


def _only(mask: Tensor, x: Tensor) -> Tensor:
    """x where the mask is True, else 0: not by a product, which would let a NaN of the padding through."""
    return torch.where(mask, x, 0.0)


def _check(rewards: Tensor, values: Tensor, n_turns: Tensor, truncated: Tensor, gamma: float, n: int = 1) -> None:
    if rewards.ndim != 2 or rewards.shape != values.shape or not n_turns.shape == truncated.shape == rewards.shape[:1]:
        shapes = [tuple(x.shape) for x in (rewards, values, n_turns, truncated)]
        raise ValueError(
            f"rewards and values of shape (B, M), n_turns and truncated of shape (B,) wanted, found {shapes}"
        )
    if n_turns.dtype != torch.long or truncated.dtype != torch.bool:
        raise ValueError(f"n_turns must be long and truncated bool, found {n_turns.dtype} and {truncated.dtype}")
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be in [0, 1], found {gamma}")
    if n < 1:
        raise ValueError(f"n must be >= 1, found {n}")
    if rewards.device.type == "cpu":
        check_rows(rewards, n_turns, truncated)


def check_rows(rewards: Tensor, n_turns: Tensor, truncated: Tensor) -> None:
    """Raises ValueError for what no row of episodes holds, see `td_targets`. To be asked on the CPU, before the tensors
    go to their device: there, nothing looks at their values, for that would wait for it.
    """
    m = rewards.shape[1]
    if not bool(((n_turns >= 1) & (n_turns < m)).all()):
        raise ValueError(f"an episode in {m} columns has 1 to {m - 1} turns, found {n_turns.tolist()}")
    real, last = turn_mask(n_turns + 1, m), n_turns[:, None]
    if not bool(torch.isfinite(rewards[real]).all()):
        raise ValueError(f"rewards must be finite, found {rewards[real & ~torch.isfinite(rewards)].tolist()}")
    if bool((truncated & (rewards.gather(1, last)[:, 0] != 0)).any()):
        raise ValueError(
            "state N of a truncated row must have reward 0: its value stands for what would have come; found another"
        )
