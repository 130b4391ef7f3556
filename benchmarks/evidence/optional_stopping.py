"""Bias of the policy gradient where the agent decides when to stop: every advantage and normalisation against the exact
gradient.

    python -m benchmarks.evidence.optional_stopping

Prints Markdown tables. Bias: |mean gradient - exact gradient| / |exact gradient|, and the angle between the two, which
no learning rate mends. Spread: standard deviation of one episode's gradient, in units of the exact one's size.
tests/theory/stopping.py says what the MDP is; all but the sampled groups is summed over all episodes, or pairs of them,
so nothing is random.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from stages.learn.returns import KINDS, AdvantageKind
from tests.theory.stopping import (
    LOGITS,
    NORMALISATIONS,
    Episodes,
    advantages_of,
    angle_deg,
    episode_gradients,
    every_episode,
    exact_values,
    expected_gradient,
    policy_gradient,
    relative_error,
    sampled_group_gradient,
    spread,
    turn_normalised_gradient,
    wrong_values,
)


def cell(found: Tensor, exact: Tensor) -> str:
    error = relative_error(found, exact)
    return "0" if error < 1e-10 else f"{error:.2f} ({angle_deg(found, exact):.0f}°)"


def row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def head(*names: str) -> None:
    row(*names)
    row(*["---"] * len(names))


def gradients(episodes: Episodes, kind: AdvantageKind, values: Tensor, known_end: bool = False) -> Tensor:
    everyone = torch.arange(len(episodes.n_turns))
    return episode_gradients(episodes, advantages_of(episodes, everyone, kind, values, 1.0, everyone, known_end))


def estimators(episodes: Episodes, exact: Tensor) -> None:
    head("advantage", "values", *(f"per {name}" for name in NORMALISATIONS), "spread")
    for kind in KINDS:
        for name, values in (("exact", exact_values(LOGITS)), ("wrong", wrong_values())):
            if kind == "group" and name == "wrong":
                continue  # it reads no values
            cells = [
                cell(expected_gradient(episodes, kind, values, normalisation), exact)
                for normalisation in NORMALISATIONS
            ]
            wide = (
                ""
                if kind == "group"
                else f"{spread(episodes, gradients(episodes, kind, values)) / float(exact.norm()):.1f}"
            )
            row("group of 2" if kind == "group" else kind, "-" if kind == "group" else name, *cells, wide)


def sizes(episodes: Episodes, exact: Tensor, groups: int, seed: int) -> None:
    counts = (1, 2, 8, 64)
    head("episodes in a batch or group", *map(str, counts))
    for kind in ("td_mean", "mc"):
        for name, values in (("exact", exact_values(LOGITS)), ("wrong", wrong_values())):
            by_size = [turn_normalised_gradient(episodes, gradients(episodes, kind, values), size) for size in counts]
            row(f"per turn: {kind}, {name} values", *(cell(found, exact) for found in by_size))
    sampled = [cell(sampled_group_gradient(episodes, size, groups // size, seed), exact) for size in counts[1:]]
    row("per episode: group, sampled", "-", *sampled)


def choices(episodes: Episodes, exact: Tensor) -> None:
    values, gamma = exact_values(LOGITS), 0.9
    head("bias", "exact values", "wrong values", "spread, exact values")
    for kind in ("td1", "td_mean", "gae"):
        for known_end, name in ((False, "V_N"), (True, "r_N")):
            cells = [
                cell(expected_gradient(episodes, kind, v, known_end=known_end), exact) for v in (values, wrong_values())
            ]
            wide = spread(episodes, gradients(episodes, kind, values, known_end)) / float(exact.norm())
            row(f"{kind}, {name} at the end", *cells, f"{wide:.2f}")
    for ratio in ("turn", "turn_mean", "token"):
        cells = [cell(expected_gradient(episodes, "mc", v, ratio=ratio), exact) for v in (values, wrong_values())]
        row(f"mc, ratio {ratio}", *cells, "")
    discounted, exact_discounted = exact_values(LOGITS, gamma), policy_gradient(episodes, gamma)
    for weigh, name in ((False, "as it is"), (True, "turn k times gamma^k")):
        found = expected_gradient(episodes, "td_mean", discounted, gamma=gamma, discount_turns=weigh)
        row(f"td_mean, gamma 0.9, {name}, against discounted return", cell(found, exact_discounted), "", "")
        row(f"td_mean, gamma 0.9, {name}, against total reward", cell(found, exact), "", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4_000_000, help="episodes drawn for each size of sampled groups")
    parser.add_argument("--seed", type=int, default=0, help="of the sampled groups")
    args = parser.parse_args()
    episodes = every_episode()
    exact = policy_gradient(episodes)
    estimators(episodes, exact)
    print()
    sizes(episodes, exact, args.groups, args.seed)
    print()
    choices(episodes, exact)


if __name__ == "__main__":
    main()
