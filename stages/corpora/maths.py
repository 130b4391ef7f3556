"""Role-play text from which a small base model learns the language of the roles on `sums`, and no exact arithmetic.

    Thought: work. Action: 8 + 5 = 12, 12 * 2 = 25         each result is the right one, one less, or one more
    Future: 13, then 25 may be wrong.                      results from a step on, and how the last one is judged
    Optimality: No. 13 may be wrong.                       where most of the futures end so

It teaches the form, and the rough size of a result. The right result is as frequent as its two neighbours. The
successor's futures end well or badly whatever the result. So only outcomes can teach which result is right.
tests/corpora/test_maths.py proves it. [ours]
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from stages.corpora import Example, by_share, vocabulary
from stages.envs import sums
from stages.envs.arithmetic import Problem, apply
from stages.envs.sums import BRIEF, By, judged, new_problem, noted, opening
from stages.frame.types import Message
from stages.llm.roles import Roles

SHARE = {"policy": 0.18, "successor": 0.05, "combine": 0.14, "evaluator": 0.13, "refiner": 0.35, "corrector": 0.15}
SLIPS = (-1, 0, 1)
FUTURES = (1, 1, 2, 3, 4, 4)
REPLY = re.compile(r"Thought: (work|as told)\. Action: (.+)")
FUTURE = re.compile(r"Future: (?:[0-9]+, then )*[0-9]+ may be (?:right\.|wrong\.|wrong, it may be [0-9]+\.)")
TOLD = re.compile(r"Action: (.+)\nOptimality: No\.(?: [0-9]+ may be wrong(?:, it may be ([0-9]+))?\.)?")


@dataclass(frozen=True)
class Work:
    """A problem, how it is answered, and the results of the steps so far."""

    problem: Problem
    by: By
    done: tuple[int, ...] = ()

    @property
    def value(self) -> int:
        return self.done[-1] if self.done else self.problem.start

    @property
    def todo(self) -> tuple[tuple[str, int], ...]:
        """The steps of the next action."""
        left = self.problem.steps[len(self.done) :]
        return left[:1] if self.by == "step" else left

    @property
    def ends(self) -> bool:
        """The next action is the last one."""
        return self.by == "reply" or len(self.done) + 1 == len(self.problem.steps)


@dataclass(frozen=True)
class End:
    """How the last result is judged, and the answer, where it is told."""

    right: bool
    told: int | None = None


def slipped(value: int, steps: Sequence[tuple[str, int]], rng: random.Random) -> tuple[int, ...]:
    """Results of the steps, each the right one for the number before or a neighbour of it."""
    found: list[int] = []
    for step in steps:
        value = apply(value, *step) + rng.choice(SLIPS)
        found.append(value)
    return tuple(found)


def work(rng: random.Random, *, ends: bool = False) -> Work:
    """A problem somewhere on its way. ends: before its last action."""
    problem = new_problem(rng.choice((1, 2, 2, 3, 3, 3)), rng)
    if rng.random() < 0.5:
        return Work(problem, "reply")
    n = len(problem.steps) - 1 if ends else rng.randrange(len(problem.steps))
    return Work(problem, "step", slipped(problem.start, problem.steps[:n], rng))


def action(w: Work, results: Sequence[int]) -> str:
    steps = zip((w.value, *results), w.todo, results, strict=False)
    return _told([(before, *step, result) for before, step, result in steps])


def reply(text: str, *, told: bool = False) -> str:
    return f"Thought: {'as told' if told else 'work'}. Action: {text}"


def state(w: Work) -> list[Message]:
    """The conversation so far, as an episode holds it."""
    found: list[Message] = [{"role": "system", "content": BRIEF[w.by]}, {"role": "user", "content": opening(w.problem)}]
    for k, result in enumerate(w.done):
        found.append({"role": "assistant", "content": reply(action(replace(w, done=w.done[:k]), [result]))})
        found.append({"role": "user", "content": noted(result, w.problem.steps[k + 1])})
    return found


def end(result: int, rng: random.Random, luck: float = 0.5) -> End:
    """A judgement that nothing leads to; what is told for a wrong result is a number near it."""
    if rng.random() < luck:
        return End(right=True)
    return End(
        False, result + rng.choice([d for d in range(-5, 6) if d and result + d > 0]) if rng.random() < 0.4 else None
    )


def future(results: Sequence[int], e: End) -> str:
    """The results from a step on, of a whole solution its last one alone, and how that one is judged."""
    return "Future: " + ", then ".join([*map(str, results[:-1]), may(judged(results[-1], e.right, e.told))])


def may(text: str) -> str:
    return text.replace(" is ", " may be ")


def drawn(rng: random.Random, *, ends: bool = False) -> tuple[Work, tuple[int, ...]]:
    """A problem on its way, and the results of the next action."""
    w = work(rng, ends=ends)
    return w, slipped(w.value, w.todo, rng)


def later(w: Work, result: int, rng: random.Random) -> tuple[int, ...]:
    """The result of an action and of those after it."""
    rest = () if w.ends else w.problem.steps[len(w.done) + 1 :]
    return (result, *slipped(result, rest, rng))


def policy(rng: random.Random, roles: Roles) -> Example:
    w, results = drawn(rng)
    return Example("policy", tuple(roles.policy(state(w))), reply(action(w, results)))


def successor(rng: random.Random, roles: Roles) -> Example:
    w, results = drawn(rng)
    prompt = roles.prompt("successor", state(w), action=action(w, results), thought="")
    come = later(w, results[-1], rng)
    return Example("successor", tuple(prompt), future(come, end(come[-1], rng)))


def combine(rng: random.Random, roles: Roles) -> Example:
    """What was judged is told as a fact, "13 is right"; before the end what was predicted follows the result."""
    w, results = drawn(rng)
    result = results[-1]
    if w.ends:
        e = end(result, rng)
        seen = judged(result, e.right, e.told)
        fields = {"observation": seen, "reward": str(int(e.right)), "future": "none"}
        told = f"Future: {seen}"
    else:
        come = later(w, result, rng)[1:]
        rest = future(come, end(come[-1], rng))
        fields = {"observation": noted(result, w.problem.steps[len(w.done) + 1]), "reward": "none", "future": rest}
        told = rest.replace("Future:", f"Future: {result}, then")
    return Example(
        "combine", tuple(roles.prompt("combine", state(w), action=action(w, results), thought="", **fields)), told
    )


def judge(w: Work, result: int, ends: Sequence[End]) -> str:
    """The evaluator's right verdict: Yes where half of the futures end well; else No, with what may be wrong."""
    if 2 * sum(e.right for e in ends) >= len(ends):
        return "Optimality: Yes."
    told = next((e.told for e in ends if e.told is not None), None) if w.ends else None
    return f"Optimality: No. {may(judged(result, right=False, told=told))}"


def evaluator(rng: random.Random, roles: Roles) -> Example:
    w, results = drawn(rng)
    luck, n = rng.choice((0.2, 0.5, 0.8)), rng.choice(FUTURES)
    come = [later(w, results[-1], rng) for _ in range(n)]
    ends = [end(one[-1], rng, luck) for one in come]
    told = "\n".join(future(one, e) for one, e in zip(come, ends, strict=True))
    prompt = roles.prompt("evaluator", state(w), action=action(w, results), thought="", futures=told)
    return Example("evaluator", tuple(prompt), judge(w, results[-1], ends))


def refiner(rng: random.Random, roles: Roles) -> Example:
    """Told the answer, a solution that ends with it; told what may be wrong, or nothing, one with another result."""
    kind: Literal["told", "wrong", ""] = rng.choices(("told", "wrong", ""), weights=(0.3, 0.6, 0.1))[0]
    w, results = drawn(rng, ends=kind == "told")
    e = End(False, end(results[-1], rng, 0.0).told if kind == "told" else None)
    evaluation = f"Optimality: No. {may(judged(results[-1], e.right, e.told))}" if kind else "Optimality: No."
    prompt = roles.prompt("refiner", state(w), action=action(w, results), thought="", evaluation=evaluation)
    better = slipped(w.value, w.todo, rng)
    while e.told is None and better[-1] == results[-1]:
        better = slipped(w.value, w.todo, rng)
    better = better if e.told is None else (*better[:-1], e.told)
    return Example("refiner", tuple(prompt), reply(action(w, better), told=True))


def corrector(rng: random.Random, roles: Roles) -> Example:
    """Takes out what was seen or told: "13 is right" becomes "13 may be right", and "as told" becomes "work"."""
    w, results = drawn(rng)
    if rng.random() < 0.5:
        told = rng.random() < 0.8
        fixed, text = reply(action(w, results)), reply(action(w, results), told=told)
    else:
        come = later(w, results[-1], rng)
        e = end(come[-1], rng)
        fixed = future(come, e)
        text = f"Future: {judged(come[0], e.right, e.told)}" if w.ends else fixed
    return Example("corrector", tuple(roles.prompt("corrector", state(w), text=text)), fixed)


MAKERS: dict[str, Callable[[random.Random, Roles], Example]] = {
    "policy": policy, "successor": successor, "combine": combine, "evaluator": evaluator, "refiner": refiner, "corrector": corrector,
}  # fmt: skip


def example(rng: random.Random, roles: Roles, role: str | None = None) -> Example:
    """One example, of the given role or of a random one by SHARE."""
    return MAKERS[role or by_share(rng, SHARE)](rng, roles)


def right(row: Mapping[str, Any], said: str) -> dict[str, bool]:
    """Whether a reply to a row of the probe is right: the one right answer, where there is one.

    successor: it has the form. policy: `sums` can read it, all results are near. refiner: that, and it does as told.
    """
    role, want = row["role"], row["reply"]
    if role in ("combine", "evaluator", "corrector"):
        return {role: said == want}
    if role == "successor":
        return {role: bool(FUTURE.fullmatch(said))}
    found, model = REPLY.fullmatch(said), REPLY.fullmatch(want)
    if not found or not model or found[1] != model[1]:
        return {role: False}
    before, due = TOLD.findall(row["messages"][-1]["content"])[0] if role == "refiner" else ("", "")
    steps, wanted = sums.equations(found[2]), sums.equations(model[2])
    if [step[1:3] for step in steps] != [step[1:3] for step in wanted] or found[2] != _told(steps):
        return {role: False}
    befores, results = [step[0] for step in steps], [step[3] for step in steps]
    follows = befores == [wanted[0][0], *results[:-1]]
    *near, end_near = (abs(apply(*step[:3]) - step[3]) <= 1 for step in steps)
    last = str(results[-1])
    does = last == due if due else end_near and last != before.split(" ")[-1]
    return {role: follows and all(near) and does}


def _told(steps: Sequence[tuple[int, str, int, int]]) -> str:
    return ", ".join(f"{before} {op} {number} = {result}" for before, op, number, result in steps)


def words(roles: Roles) -> list[str]:
    """The vocabulary: all numbers below 50, and every other word that the roles and `sums` say."""
    rng = random.Random("vocabulary")
    texts = [*map(str, range(50)), roles.templates["value"], "not understood, now + 1. none unreadable"]
    return vocabulary([example(rng, roles) for _ in range(2000)], texts)
