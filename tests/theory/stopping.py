"""An MDP so small that every episode can be written down, in which the agent decides when to stop.

Three states, the first is state 0, at most three turns. In each turn the agent stops or goes on. Stopping in s ends the
episode and wins 1 with chance WIN[s], which the terminal state does not show; going on moves by MOVE[s] and pays PAY of
the state it arrives in; after the last turn the episode ends where it is. What long episodes are worth is not what
short ones are, and the policy decides which it gets.

Rewards stand on states as stages/learn/returns.py has them: that of turn k on state k + 1. "Go" is two tokens, the
second of them certain; "stop" is one. So actions differ in length, and the sum of an action's log-probs is that of its
choice. All is float64.

Axes: I episodes (all that can happen), P batches of them (all that can be drawn), H turns, M = H + 1, S states of the
MDP, X nodes. A node is what a value depends on: state s after k turns is node k S + s, and "stopped in s" is node M S +
s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stages.learn.losses import Ratio, loss_normaliser, turn_ppo_clip
from stages.learn.returns import AdvantageKind, advantages

Normalisation = Literal["episode", "turn, one episode", "turn, two episodes"]
NORMALISATIONS: tuple[Normalisation, ...] = ("episode", "turn, one episode", "turn, two episodes")
LAM = 0.9
H, S, STOP, GO = 3, 3, 0, 1
MOVE = torch.tensor([[0.2, 0.5, 0.3], [0.3, 0.2, 0.5], [0.6, 0.3, 0.1]], dtype=torch.float64)
WIN = torch.tensor([0.1, 0.4, 0.8], dtype=torch.float64)
PAY = torch.tensor([-0.2, -0.1, 0.1], dtype=torch.float64)
LOGITS = torch.tensor([[-0.3, 0.4], [0.2, -0.1], [0.5, -0.4]], dtype=torch.float64)  # of STOP and GO in each state


@dataclass(frozen=True)
class Episodes:
    """states, actions (I, H), rewards, nodes (I, M), padded with 0; n_turns (I,); chance (I,): but the policy's."""

    states: Tensor
    actions: Tensor
    rewards: Tensor
    nodes: Tensor
    n_turns: Tensor
    chance: Tensor


@dataclass(frozen=True)
class Path:
    """An episode so far: one more state, reward and node than actions."""

    states: tuple[int, ...] = (0,)
    actions: tuple[int, ...] = ()
    rewards: tuple[float, ...] = (0.0,)
    nodes: tuple[int, ...] = (0,)
    chance: float = 1.0


def every_episode() -> Episodes:
    """Each possible episode once."""
    paths = [*_ends(Path())]
    n_turns = torch.tensor([len(p.actions) for p in paths])
    chance = torch.tensor([p.chance for p in paths], dtype=torch.float64)
    states, actions = _padded([p.states[: len(p.actions)] for p in paths], H), _padded([p.actions for p in paths], H)
    rewards, nodes = _padded([p.rewards for p in paths], H + 1), _padded([p.nodes for p in paths], H + 1)
    return Episodes(states.long(), actions.long(), rewards, nodes.long(), n_turns, chance)


def _padded(rows: Sequence[Sequence[float]], width: int) -> Tensor:
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.float64)


def _ends(path: Path) -> Iterator[Path]:
    k, s = len(path.actions), path.states[-1]
    if k == H:
        yield path
        return
    for won, p in ((1.0, float(WIN[s])), (0.0, 1 - float(WIN[s]))):
        yield _longer(path, STOP, s, won, (H + 1) * S + s, p)
    for after in range(S):
        yield from _ends(_longer(path, GO, after, float(PAY[after]), (k + 1) * S + after, float(MOVE[s, after])))


def _longer(path: Path, action: int, state: int, reward: float, node: int, chance: float) -> Path:
    rows = ((*path.states, state), (*path.actions, action), (*path.rewards, reward), (*path.nodes, node))
    return Path(*rows, path.chance * chance)


def action_log_probs(episodes: Episodes, logits: Tensor) -> Tensor:
    """log pi(a_k | s_k), (I, H), 0 past the end."""
    log_probs = logits.log_softmax(1)[episodes.states, episodes.actions]
    return torch.where(torch.arange(H) < episodes.n_turns[:, None], log_probs, torch.zeros_like(log_probs))


def probabilities(episodes: Episodes, logits: Tensor) -> Tensor:
    """Of every episode, (I,)."""
    return episodes.chance * action_log_probs(episodes, logits).sum(1).exp()


def powers(gamma: float) -> Tensor:
    """gamma^k, (M,)."""
    return gamma ** torch.arange(H + 1, dtype=torch.float64)


def policy_gradient(episodes: Episodes, gamma: float = 1.0) -> Tensor:
    """dJ / dlogits, (S, 2), J = E[sum_k gamma^k r_k]: the derivative of the sum over all episodes."""
    logits = LOGITS.clone().requires_grad_(True)
    discounted = (episodes.rewards * powers(gamma)).sum(1)
    return torch.autograd.grad((probabilities(episodes, logits) * discounted).sum(), logits)[0]


def exact_values(logits: Tensor, gamma: float = 1.0) -> Tensor:
    """V of every node, (X,), the node's own reward included, by going backward from the last turn."""
    policy = logits.softmax(1)
    found = [PAY]
    for k in reversed(range(H)):
        paid = PAY if k else torch.zeros_like(PAY)
        found.insert(0, paid + gamma * (policy[:, STOP] * WIN + policy[:, GO] * (MOVE @ found[0])))
    return torch.cat([*found, WIN])


def wrong_values() -> Tensor:
    """Values that have nothing to do with the MDP, of the size of its rewards, (X,)."""
    return torch.cos(2.0 * torch.arange((H + 2) * S, dtype=torch.float64))


def advantages_of(
    episodes: Episodes,
    rows: Tensor,
    kind: AdvantageKind,
    values_X: Tensor,
    gamma: float,
    groups: Tensor,
    known_end: bool,
) -> Tensor:
    """The project's advantages of some episodes, (rows, M)."""
    truncated = torch.zeros(len(rows), dtype=torch.bool)
    columns = (episodes.rewards[rows], values_X[episodes.nodes[rows]], episodes.n_turns[rows], truncated)
    return advantages(kind, *columns, gamma=gamma, lam=LAM, groups=groups, known_end=known_end)


def expected_gradient(
    episodes: Episodes,
    kind: AdvantageKind,
    values_X: Tensor,
    normalisation: Normalisation = "episode",
    *,
    gamma: float = 1.0,
    ratio: Ratio = "turn",
    known_end: bool = False,
    discount_turns: bool = False,
) -> Tensor:
    """Mean over all batches of the ascent direction -dL/dlogits of `turn_ppo_clip`, old policy = present one, (S, 2).

    A batch is one episode; two where they are a group or are normalised together; a group's episodes are normalised one
    by one with "turn, one episode". discount_turns: the advantage of turn k times gamma^k.
    """
    size = 2 if kind == "group" or normalisation == "turn, two episodes" else 1
    batches_PB = torch.combinations(torch.arange(len(episodes.n_turns)), size, with_replacement=True)
    orders_P = torch.where((batches_PB == batches_PB[:, :1]).all(1), 1.0, math.factorial(size))
    chance_P = probabilities(episodes, LOGITS)[batches_PB].prod(1) * orders_P
    rows, groups = batches_PB.flatten(), torch.arange(len(batches_PB)).repeat_interleave(size)
    found = advantages_of(episodes, rows, kind, values_X, gamma, groups, known_end) * (
        powers(gamma) if discount_turns else 1.0
    )
    logits = LOGITS.clone().requires_grad_(True)
    log_probs = action_log_probs(episodes, logits)
    total = torch.zeros((), dtype=torch.float64)
    for p, batch in enumerate(torch.arange(len(rows)).reshape(-1, size)):
        parts = batch.split(1) if normalisation == "turn, one episode" else (batch,)
        for part in parts:
            total = total + chance_P[p] / len(parts) * _loss(
                episodes, rows[part], log_probs, found[part], normalisation, ratio
            )
    return -torch.autograd.grad(total, logits)[0]


def _loss(
    episodes: Episodes, rows: Tensor, log_probs: Tensor, found: Tensor, normalisation: Normalisation, ratio: Ratio
) -> Tensor:
    """The project's loss of a batch, tokens laid end to end."""
    real = torch.arange(H) < episodes.n_turns[rows][:, None]
    actions = episodes.actions[rows][real]
    n_tokens = 1 + (actions == GO).long()
    turn_of_K = torch.arange(len(actions)).repeat_interleave(n_tokens)
    first = torch.cat([torch.ones(1, dtype=torch.bool), turn_of_K[1:] != turn_of_K[:-1]])
    log_probs_K = torch.where(first, log_probs[rows][real][turn_of_K], torch.zeros((), dtype=torch.float64))
    normaliser = loss_normaliser("episode" if normalisation == "episode" else "turn", episodes.n_turns[rows])
    return turn_ppo_clip(
        log_probs_K, log_probs_K.detach(), turn_of_K, found[:, :H][real], clip=0.2, ratio=ratio, normaliser=normaliser
    )[0]


def episode_gradients(episodes: Episodes, found_IM: Tensor) -> Tensor:
    """g_i = sum_k A_ik dlog pi(a_k | s_k) / dlogits of every episode, (I, S, 2), written out: dlog pi(a | s) /
    dlogit(s, b) = [a = b] - pi(b | s).
    """
    policy, total = LOGITS.softmax(1), torch.zeros(len(found_IM), S, 2, dtype=torch.float64)
    for i, n_turns in enumerate(episodes.n_turns.tolist()):
        for k in range(n_turns):
            s, a = int(episodes.states[i, k]), int(episodes.actions[i, k])
            total[i, s] -= found_IM[i, k] * policy[s]
            total[i, s, a] += found_IM[i, k]
    return total


def turn_normalised_gradient(episodes: Episodes, gradients: Tensor, size: int) -> Tensor:
    """Mean direction of a batch of `size` episodes whose sum over turns is divided by the number of its turns, (S, 2).

        E[ sum_i g_i / sum_i N_i ] = size E[ g_1 / (N_1 + n) ],  n: the turns of the other episodes, by convolution

    since episodes are drawn alike and independently. gradients: g_i, (I, S, 2). No loss function and no pairs."""
    chance = probabilities(episodes, LOGITS)
    lengths = torch.stack([chance[episodes.n_turns == n].sum() for n in range(H + 1)])
    others = torch.ones(1, dtype=torch.float64)  # chance of n = 0, 1, ..
    for _ in range(size - 1):
        others = torch.stack([torch.nn.functional.pad(others * lengths[n], (n, H - n)) for n in range(H + 1)]).sum(0)
    turns_IN = episodes.n_turns[:, None] + torch.arange(len(others))
    weight = size * chance * (others / turns_IN).sum(1)
    return (weight[:, None, None] * gradients).sum(0)


def sampled_group_gradient(episodes: Episodes, size: int, n: int, seed: int) -> Tensor:
    """Mean direction of group advantages over n sampled groups of `size`, by episodes, (S, 2), written out."""
    scores = episode_gradients(episodes, torch.ones(len(episodes.n_turns), H + 1, dtype=torch.float64))
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(probabilities(episodes, LOGITS), n * size, replacement=True, generator=generator).reshape(
        n, size
    )
    returns = episodes.rewards.sum(1)[drawn]
    relative = (returns - returns.mean(1, keepdim=True)) / (returns.std(1, correction=0, keepdim=True) + 1e-6)
    weight = torch.zeros(len(scores), dtype=torch.float64).index_add(0, drawn.flatten(), relative.flatten())
    return (weight[:, None, None] * scores).sum(0) / (n * size)


def spread(episodes: Episodes, gradients: Tensor) -> float:
    """Standard deviation of an episode's gradient g_i around its mean, all directions together. gradients: (I, S, 2)."""
    chance = probabilities(episodes, LOGITS)[:, None, None]
    centred = gradients - (chance * gradients).sum(0)
    return float((chance * centred.square()).sum().sqrt())


def relative_error(found: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact|."""
    return float((found - exact).norm() / exact.norm())


def angle_deg(found: Tensor, exact: Tensor) -> float:
    """Between the two, in degrees: what no learning rate can mend."""
    cosine = torch.nn.functional.cosine_similarity(found.flatten(), exact.flatten(), dim=0)
    return math.degrees(math.acos(min(1.0, float(cosine))))
