"""What a wrong V adds to the gradient of every turn, by estimator, on a chain so small that all episodes are counted.

All estimators are A_k = sum_l c_l delta_{k+l} (`tests/learn/test_returns.py`). With V off by e,

    bias of turn k = E[ dlog pi(a_k | s_k) sum_{l >= 1} (c_{l-1} - c_l) e_{k+l} ],   e past the last state = 0

which is 0 for any V where c does not fall, as in Monte-Carlo, and else the larger the faster it falls.

Three turns of two actions; a state is all that was done before it, so V may be any function, and the policy has a
parameter for each state. Every turn pays. Gradients are those of the project's own advantages, all 8 episodes weighed
by their chance; the exact one is the derivative of the mean return. [ours]
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from stages.learn.returns import AdvantageKind, advantages

State = tuple[int, ...]

N, LAM = 3, 0.9
EPISODES = [*product((0, 1), repeat=N)]
STATES = [past for k in range(N + 1) for past in product((0, 1), repeat=k)]
LOGITS = {state: math.sin(3.0 * i + 1) for i, state in enumerate(STATES) if len(state) < N}
PAY = {state: math.cos(5.0 * i) for i, state in enumerate(STATES) if state}  # of the action that led to the state
ERROR = {state: math.sin(7.0 * i) for i, state in enumerate(STATES)}
COEFFICIENTS: dict[AdvantageKind, list[float]] = {
    "td1": [1, 0, 0, 0],
    "td_mean": [1, 0.8, 0.6, 0.4],
    "gae": [LAM**n for n in range(N + 1)],
    "mc": [1, 1, 1, 1],
}


def chance(state: State, action: int, logits: dict[State, Tensor]) -> Tensor:
    return torch.sigmoid(logits[state] if action else -logits[state])


def likelihood(episode: State, logits: dict[State, Tensor]) -> Tensor:
    return torch.stack([chance(episode[:k], episode[k], logits) for k in range(N)]).prod()


def parameters() -> dict[State, Tensor]:
    return {s: torch.tensor(x, dtype=torch.float64, requires_grad=True) for s, x in LOGITS.items()}


def exact_values() -> dict[State, float]:
    """Backward. The last action's pay is the terminal state's reward, every other one's is of the state it acted in."""
    logits = parameters()
    found = {state: PAY[state] for state in STATES if len(state) == N}
    for state in sorted((s for s in STATES if len(s) < N), key=len, reverse=True):
        after = [(float(chance(state, a, logits).detach()), (*state, a)) for a in (0, 1)]
        found[state] = sum(p * ((PAY[s] if len(s) < N else 0.0) + found[s]) for p, s in after)
    return found


def exact_gradient() -> dict[State, float]:
    logits = parameters()
    mean = torch.stack([likelihood(e, logits) * sum(PAY[e[: k + 1]] for k in range(N)) for e in EPISODES]).sum()
    return {s: float(g) for s, g in zip(logits, torch.autograd.grad(mean, [*logits.values()]), strict=True)}


def expected_gradient(kind: AdvantageKind, values: dict[State, float], *, known_end: bool) -> dict[State, float]:
    """Of sum_k A_k log pi(a_k | s_k), with the project's advantages."""
    paid = [[*(PAY[e[: k + 1]] for k in range(N - 1)), 0.0, PAY[e]] for e in EPISODES]
    rewards = torch.tensor(paid, dtype=torch.float64)
    v = torch.tensor([[values[e[:k]] for k in range(N + 1)] for e in EPISODES], dtype=torch.float64)
    rows = (rewards, v, torch.full((8,), N), torch.zeros(8, dtype=torch.bool))
    found = advantages(kind, *rows, gamma=1.0, lam=LAM, known_end=known_end)
    logits = parameters()
    mean = torch.stack(
        [
            likelihood(e, logits).detach() * found[i, k] * chance(e[:k], e[k], logits).log()
            for i, e in enumerate(EPISODES)
            for k in range(N)
        ]
    ).sum()
    return {s: float(g) for s, g in zip(logits, torch.autograd.grad(mean, [*logits.values()]), strict=True)}


def predicted_bias(kind: AdvantageKind, *, known_end: bool) -> dict[State, float]:
    """The formula, by loops. d log pi / d logit = a - pi(1)."""
    c, logits, total = COEFFICIENTS[kind], parameters(), dict.fromkeys(LOGITS, 0.0)
    for episode in EPISODES:
        p = float(likelihood(episode, logits).detach())
        error = [ERROR[episode[:k]] for k in range(N + 1)]
        error[N] = 0.0 if known_end else error[N]
        for k in range(N):
            score = episode[k] - float(chance(episode[:k], 1, logits).detach())
            total[episode[:k]] += p * score * sum((c[n - 1] - c[n]) * error[k + n] for n in range(1, N - k + 1))
    return total


@pytest.mark.parametrize("known_end", [False, True])
@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_with_an_exact_v_every_estimator_has_the_exact_gradient_in_every_state(
    kind: AdvantageKind, known_end: bool
) -> None:
    assert expected_gradient(kind, exact_values(), known_end=known_end) == pytest.approx(exact_gradient(), abs=1e-12)


@pytest.mark.parametrize("known_end", [False, True])
@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_a_wrong_v_adds_its_error_ahead_by_how_the_coefficients_fall(kind: AdvantageKind, known_end: bool) -> None:
    wrong = {state: value + ERROR[state] for state, value in exact_values().items()}
    found, exact = expected_gradient(kind, wrong, known_end=known_end), exact_gradient()
    bias = predicted_bias(kind, known_end=known_end)
    assert {s: found[s] - exact[s] for s in exact} == pytest.approx(bias, abs=1e-12)
    assert (max(abs(x) for x in bias.values()) < 1e-12) == (kind == "mc")


@pytest.mark.parametrize("known_end", [False, True])
@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_an_error_that_is_alike_in_all_states_biases_nothing(kind: AdvantageKind, known_end: bool) -> None:
    """Episodes are of one length here. So what a V that lags costs is what it does not tell apart yet."""
    shifted = {state: value + 5.0 for state, value in exact_values().items()}
    assert expected_gradient(kind, shifted, known_end=known_end) == pytest.approx(exact_gradient(), abs=1e-12)
