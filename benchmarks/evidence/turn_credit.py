"""How many episodes a gradient needs, by the number of turns: one advantage for a whole episode against one for each
turn.

    python -m benchmarks.evidence.turn_credit

A chain of N turns; each has one right action of two, chosen with a probability of its own. "all": reward 1 at the end
if every turn was right, as on the service desk, won in 1 of 4 episodes at any N. "each": reward 1 / N for every right
turn, paid at once, each right in 1 of 2. Every one of the 2^N episodes is counted with its probability, so nothing is
random. A cell: variance of one episode's gradient over the square of the mean gradient, which is the number of episodes
whose mean is as much signal as noise. group: return minus the exact mean return, GRPO's advantage in the limit of a
large group.
exact: V as it is. flat: V is the mean return everywhere, as before anything is learned; "-" where such an advantage has
the wrong mean.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from benchmarks.passes import table_head, table_row
from stages.learn.returns import AdvantageKind, advantages

WON, RIGHT = 0.25, 0.5


def episodes(n: int) -> Tensor:
    """All of them, (2^n, n) of 0 and 1 = right, in float64."""
    return (torch.arange(2**n)[:, None] >> torch.arange(n) & 1).double()


def chain(n: int, reward: str) -> tuple[Tensor, Tensor, Tensor, float]:
    """(actions (E, n), rewards (E, n + 1), exact values (E, n + 1), probability of a right action). The last turn's
    reward is the terminal state's.
    """
    actions = episodes(n)
    if reward == "all":
        p = WON ** (1 / n)
        alive = torch.cat([torch.ones(len(actions), 1), actions.cumprod(1)], 1)
        rewards = torch.cat([torch.zeros(len(actions), n), alive[:, -1:]], 1)
        return actions, rewards, alive * p ** torch.arange(n, -1, -1), p
    paid = actions / n
    rewards = torch.cat([paid[:, :-1], torch.zeros(len(actions), 1), paid[:, -1:]], 1)
    to_come = (n - torch.arange(n)) / n * RIGHT
    return actions, rewards, torch.cat([to_come.expand(len(actions), n), paid[:, -1:]], 1), RIGHT


def episodes_needed(weight_E1: Tensor, score_EN: Tensor, advantages_EN: Tensor, exact_N: Tensor) -> float | None:
    """None where the mean gradient is not the exact one. weight_E1: probability of each episode; score_EN: d log pi / d
    logit of each turn.
    """
    gradient = advantages_EN * score_EN
    mean = (weight_E1 * gradient).sum(0)
    if not torch.allclose(mean, exact_N, rtol=1e-9):
        return None
    return float((weight_E1 * (gradient - mean).square()).sum() / mean.square().sum())


def measure(n: int, reward: str, kinds: tuple[AdvantageKind, ...]) -> list[str]:
    actions, rewards, exact, p = chain(n, reward)
    total, score = rewards.sum(1, keepdim=True), actions - p
    weight = (p**actions * (1 - p) ** (1 - actions)).prod(1, keepdim=True)
    mean_return = float((weight * total).sum())
    exact_N = (weight * total * score).sum(0)
    found = [episodes_needed(weight, score, (total - mean_return).expand_as(actions), exact_N)]
    n_turns, truncated = torch.full((len(actions),), n), torch.zeros(len(actions), dtype=torch.bool)
    flat = torch.cat([torch.full_like(exact[:, :-1], mean_return), exact[:, -1:]], 1)
    for values in (exact, flat):
        for kind in kinds:
            found.append(
                episodes_needed(
                    weight, score, advantages(kind, rewards, values, n_turns, truncated, gamma=1.0)[:, :n], exact_N
                )
            )
    return ["-" if one is None else f"{one:.1f}" for one in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 2, 3, 4, 8, 16])
    args = parser.parse_args()
    kinds: tuple[AdvantageKind, ...] = ("td1", "td_mean", "gae", "mc")
    table_head("reward", "turns", "group", *(f"{kind}, {values}" for values in ("exact", "flat") for kind in kinds))
    for reward in ("all", "each"):
        for n in args.turns:
            table_row(reward, n, *measure(n, reward, kinds))


if __name__ == "__main__":
    main()
