"""How often the 95 % interval of a mean over few seeds covers the truth: a study's bootstrap, and Student's.

    python -m benchmarks.checks.coverage

Each is asked of many samples whose mean is known. Two kinds of samples: errors that are normal, and win rates of a method
that either gets off the ground or does not: .95 or .25, each with probability 1/2, with the error of 96 episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.passes import table_head, table_row
from flows.evidence.study.figures import Mean, stratified_mean, students_mean

SEEDS = (3, 5, 10)
SAMPLES = 2000
EPISODES = 96
Draw = Callable[[np.random.Generator, int], np.ndarray]


def normal(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.normal(size=n)


def takes_off_or_not(rng: np.random.Generator, n: int) -> np.ndarray:
    """Win rates less their mean of .6."""
    return rng.binomial(EPISODES, rng.choice([0.95, 0.25], size=n)) / EPISODES - 0.6


def covered(draw: Draw, n: int, interval: Callable[[Sequence[Sequence[float]]], Mean]) -> float:
    """Share of samples of n whose interval has 0, their mean, within it."""
    rng = np.random.default_rng(0)
    means = (interval([draw(rng, n).tolist()]) for _ in range(SAMPLES))
    return sum(mean.low <= 0 <= mean.high for mean in means) / SAMPLES


def main() -> None:
    table_head("samples", "seeds", "bootstrap", "Student's")
    for name, draw in (("normal", normal), ("takes off or not", takes_off_or_not)):
        for n in SEEDS:
            table_row(name, n, *(f"{covered(draw, n, mean):.2f}" for mean in (stratified_mean, students_mean)))


if __name__ == "__main__":
    main()
