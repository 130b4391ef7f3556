r"""Chains of thought about generated arithmetic: one step a paragraph, the answer in a box. Ours.

    7 + 5 = 12

    12 * 3 = 36

    \boxed{36}

A third of the chains have one wrong step and go on correctly from there. So a base model is sometimes wrong and can
improve. Only problems of the training split: the expression itself decides its split, so this holds for any
`problem_seed`.
"""

from __future__ import annotations

import functools
import random

from stages import envs
from stages.corpora import Example, by_share
from stages.envs import arithmetic
from stages.envs.arithmetic import Problem
from stages.frame.types import Message, Scenario
from stages.llm.roles import Roles

LEVELS = {1: 0.25, 2: 0.75}  # the four steps of level 3, with numbers up to 9,999, are beyond a model of this size
PROBLEMS, SEED = 6000, 1  # many more than the 600 a level of the shipped set, and other ones
OPTIONS = {"problems": PROBLEMS, "problem_seed": SEED, "levels": list(LEVELS)}
WRONG = 1 / 3
_SLIPS = (-10, -2, -1, 1, 2, 10)


def example(rng: random.Random, roles: Roles) -> Example:
    """A problem and a chain, which the environment could read."""
    level = by_share(rng, LEVELS)
    scenario, problem = rng.choice(_train()[level])
    env = envs.make_env("math", OPTIONS)()
    messages: list[Message] = [{"role": "system", "content": env.system}, *env.reset(scenario)]
    reply = chain(problem, rng, wrong=rng.random() < WRONG)
    assert env.step({"role": "assistant", "content": reply}).info["found"]
    return Example("math", tuple(roles.policy(messages)), reply)


def chain(problem: Problem, rng: random.Random, *, wrong: bool) -> str:
    """The steps of a problem; wrong: one of them, at random, has another result, and no number falls below 0."""
    while True:
        slip = rng.randrange(len(problem.steps)) if wrong else None
        value, told = problem.start, []
        for i, (op, number) in enumerate(problem.steps):
            after = arithmetic.apply(value, op, number) + (rng.choice(_SLIPS) if i == slip else 0)
            told.append((after, f"{value} {op} {number} = {after}"))
            value = after
        if min(after for after, _ in told) >= 0:
            return "\n\n".join([*(text for _, text in told), rf"\boxed{{{value}}}"])


@functools.lru_cache(maxsize=1)
def _train() -> dict[int, list[tuple[Scenario, Problem]]]:
    """Scenarios of the training split with their problems, by level."""
    made = [p for level in LEVELS for p in arithmetic.problems(level, PROBLEMS, SEED)]
    of_text = {p.text(form): p for p in made for form in ("digits", "words")}
    found: dict[int, list[tuple[Scenario, Problem]]] = {level: [] for level in LEVELS}
    for scenario in envs.scenarios("math", OPTIONS, "train", None, 0):
        found[scenario.data["level"]].append((scenario, of_text[scenario.data["problem"]]))
    return found
