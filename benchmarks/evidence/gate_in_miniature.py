"""The outcome gate in random MDPs: how far from the optimum refinement ends, by critic and by rollouts of the gate.

    python -m benchmarks.evidence.gate_in_miniature

Prints a Markdown table of V* - V_pi after 30 rounds: mean over 300 worlds (median) a family; tests/theory/test_gate.py
says what the families, critics and gates are.
"""

from __future__ import annotations

import numpy as np

from tests.theory.test_gate import (
    FAMILIES,
    Reads,
    exact_critic,
    fresh_error,
    lasting_error,
    no_critic,
    run,
    sampled_futures,
)
from tests.theory.worlds import random_worlds

CRITICS: dict[str, Reads] = {
    "exact": exact_critic,
    "error of sd 1, fresh": fresh_error,
    "error of sd 1, lasting": lasting_error,
    "exact successor, k = 1": sampled_futures(1),
    "exact successor, k = 16": sampled_futures(16),
    "no critic, random proposals": no_critic,
}
GATES = (0, 8, 64)


def main() -> None:
    print(
        "| critic | "
        + " | ".join(f"{family}, {f'gate {gate}' if gate else 'no gate'}" for family in FAMILIES for gate in GATES)
        + " |"
    )
    print("|---" * (1 + len(FAMILIES) * len(GATES)) + "|")
    for name, reads in CRITICS.items():
        cells = []
        for family in FAMILIES:
            worlds = random_worlds(100, 300, family)
            for gate in GATES:
                gap = run(110, worlds, reads, gate).gap
                cells.append(f"{gap.mean():z.2f} ({np.median(gap):z.2f})")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
