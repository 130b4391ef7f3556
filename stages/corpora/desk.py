"""Role-play text from which the base model learns the language of the roles, and none of this desk's rules.

Every example has a rule book of its own, drawn at random, so each (key -> option) pair is as frequent as any other: the
corpus teaches how to act in the format, to merge an observation with a later future, to judge by a predicted future,
to follow a critique and to rewrite a fact as a possibility. tests/corpora/test_desk.py proves the ignorance. [ours]
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.corpora import Example
from stages.envs import service_desk as desk
from stages.frame.types import Message
from stages.llm.roles import Roles

SHARE = {"policy": 0.08, "successor": 0.16, "combine": 0.24, "evaluator": 0.26, "refiner": 0.14, "corrector": 0.12}


@dataclass(frozen=True)
class Visit:
    """A finished visit under a random rule book: what was done, and the rule that each step needed."""

    opening: str
    auditor: str
    chosen: tuple[tuple[str, str], ...]  # (tool, option)
    needed: tuple[desk.Rule, ...]
    choices: tuple[tuple[str, ...], ...]

    def broken(self) -> list[desk.Rule]:
        return [rule for rule, (_, option) in zip(self.needed, self.chosen, strict=True) if rule.option != option]


def may(rule: desk.Rule) -> str:
    return f"{rule.key} may need {rule.tool} {rule.option}."


def act(rule: desk.Rule) -> str:
    return f"Thought: {may(rule)} Action: {rule.tool} {rule.option}"


def future(chosen: Sequence[tuple[str, str]], broken: Sequence[desk.Rule]) -> str:
    """A future told as a possibility, as the student must learn it."""
    options = "".join(f"{option}, " for _, option in chosen)
    return f"Future: {options}then {'fail' if broken else 'pass'}. {' '.join(may(rule) for rule in broken)}".strip()


def told(chosen: Sequence[tuple[str, str]], broken: Sequence[desk.Rule], auditor: str) -> str:
    """The same future told as the fact that the teacher saw, auditor and all."""
    options = "".join(f"{option}, " for _, option in chosen)
    return f"Future: {options}then {auditor} says {'fail' if broken else 'pass'}. {' '.join(str(rule) for rule in broken)}".strip()


def visit(rng: random.Random) -> Visit:
    """A visit at a random desk: about half of the steps right, so that passes are common enough to be learned."""
    tier, request = rng.choice(desk.TIERS), rng.choice(desk.REQUESTS)
    kinds: dict[str, desk.Kind] = {
        "check": "request",
        "give": rng.choice(("pair", "request")),
        "log": "request",
        "close": "tier",
    }
    tools = [tool for tool in kinds if tool != "log" or rng.random() < 0.5]
    skill = rng.choice((0.1, 0.5, 0.8, 1.0))
    chosen, needed, choices = [], [], []
    for tool in tools:
        options = desk.OPTIONS_OF[tool]
        rule = desk.Rule(desk.key_of(kinds[tool], request, tier), tool, rng.choice(options))
        needed.append(rule)
        choices.append(options)
        chosen.append((tool, rule.option if rng.random() < skill else rng.choice(options)))
    names = [name for people in desk.CUSTOMERS.values() for name in people]
    opening = desk.opening(rng.choice(names), tier, request, rng.choice(desk.ITEMS))
    return Visit(opening, rng.choice(desk.AUDITORS), tuple(chosen), tuple(needed), tuple(choices))


def state(v: Visit, k: int) -> list[Message]:
    """The conversation before step k, as an episode holds it, thoughts and all."""
    found: list[Message] = [
        {"role": "system", "content": desk.system_text([tool for tool, _ in v.chosen])},
        {"role": "user", "content": v.opening},
    ]
    for rule, (tool, option) in zip(v.needed[:k], v.chosen[:k], strict=True):
        found.append({"role": "assistant", "content": act(desk.Rule(rule.key, tool, option))})
        found.append({"role": "user", "content": desk.done(option)})
    return found


def guess(v: Visit, k: int, rng: random.Random) -> desk.Rule:
    """Some rule for step k: its key, with any option."""
    return desk.Rule(v.needed[k].key, v.needed[k].tool, rng.choice(v.choices[k]))


def policy(v: Visit, rng: random.Random, roles: Roles) -> Example:
    k = rng.randrange(len(v.chosen))
    return Example("policy", tuple(roles.policy(state(v, k))), act(guess(v, k, rng)))


def successor(v: Visit, rng: random.Random, roles: Roles) -> Example:
    k = rng.randrange(len(v.chosen))
    tool, option = v.chosen[k]
    prompt = roles.prompt("successor", state(v, k), action=f"{tool} {option}", thought="")
    return Example("successor", tuple(prompt), future(v.chosen[k:], v.broken()))


def combine(v: Visit, rng: random.Random, roles: Roles) -> Example:
    # Mostly terminal steps: there the truth enters, and the auditor's name is a word that nothing else teaches to copy.
    k = rng.choice([*range(len(v.chosen)), *[len(v.chosen) - 1] * 5])
    tool, option = v.chosen[k]
    last = k == len(v.chosen) - 1
    if last and rng.random() < 0.03:
        fields = {"observation": f"not understood. use {tool} now.", "reward": "0", "future": "none"}
        reply = "Future: not understood, then fail."
    elif last:
        fields = {
            "observation": f"{desk.done(option)} {desk.audit(v.auditor, v.broken())}",
            "reward": str(int(not v.broken())),
            "future": "none",
        }
        reply = told(v.chosen[k:], v.broken(), v.auditor)
    else:
        later = v.chosen[k + 1 :]
        fields = {"observation": desk.done(option), "reward": "none", "future": future(later, v.broken())}
        reply = future(v.chosen[k:], v.broken())
    prompt = roles.prompt("combine", state(v, k), action=f"{tool} {option}", thought="", **fields)
    return Example("combine", tuple(prompt), reply)


def judge(tool: str, futures: Sequence[Sequence[desk.Rule]]) -> str:
    """The evaluator's right verdict: No if at least half of the futures name a broken rule of this step.

    It takes a future at its word: as no audit names a rule that was kept, a future that blames this step for the option
    that was taken is not to be expected, and is blamed all the same.
    """
    blames = [rule for rules in futures for rule in rules if rule.tool == tool]
    if 2 * len(blames) < len(futures) or not blames:
        return "Optimality: Yes."
    return f"Optimality: No. {may(Counter(blames).most_common(1)[0][0])}"


def evaluator(v: Visit, rng: random.Random, roles: Roles) -> Example:
    k, n = rng.randrange(len(v.chosen)), rng.choice((1, 1, 1, 1, 1, 1, 2, 3))
    # A predicted future may name any rule of any step as broken, so its rules are not those of the visit.
    futures = [
        [rule for j in range(len(v.chosen)) for rule in [blame(v, j, rng)] if rng.random() < 0.5] for _ in range(n)
    ]
    texts = [future(v.chosen[k:], rules) for rules in futures]
    tool, option = v.chosen[k]
    prompt = roles.prompt("evaluator", state(v, k), action=f"{tool} {option}", thought="", futures="\n".join(texts))
    return Example("evaluator", tuple(prompt), judge(tool, futures))


def blame(v: Visit, k: int, rng: random.Random) -> desk.Rule:
    """A rule that the option taken at step k breaks."""
    return desk.Rule(
        v.needed[k].key, v.needed[k].tool, rng.choice([option for option in v.choices[k] if option != v.chosen[k][1]])
    )


def refiner(v: Visit, rng: random.Random, roles: Roles) -> Example:
    k = rng.randrange(len(v.chosen))
    tool, option = v.chosen[k]
    others = [choice for choice in v.choices[k] if choice != option]
    rule = desk.Rule(v.needed[k].key, tool, rng.choice(others))
    # Without a reason ("Optimality: No.") any other option is as good: the ablation "refine without critique" asks
    # that.
    evaluation = "Optimality: No." if rng.random() < 0.15 else f"Optimality: No. {may(rule)}"
    prompt = roles.prompt(
        "refiner",
        state(v, k),
        action=f"{tool} {option}",
        thought="",
        evaluation=evaluation,
    )
    return Example("refiner", tuple(prompt), act(rule).replace("Thought: ", "Thought: as told, "))


def corrector(v: Visit, rng: random.Random, roles: Roles) -> Example:
    k = rng.randrange(len(v.chosen))
    draw = rng.random()
    if draw < 0.35:
        text, reply = told(v.chosen[k:], v.broken(), v.auditor), future(v.chosen[k:], v.broken())
    elif draw < 0.6:
        text = reply = future(v.chosen[k:], v.broken())
    else:
        reply = act(guess(v, k, rng))
        text = reply.replace("Thought: ", "Thought: as told, ") if draw < 0.9 else reply
    return Example("corrector", tuple(roles.prompt("corrector", state(v, k), text=text)), reply)


MAKERS: dict[str, Callable[[Visit, random.Random, Roles], Example]] = {
    "policy": policy, "successor": successor, "combine": combine, "evaluator": evaluator, "refiner": refiner, "corrector": corrector,
}  # fmt: skip


def example(rng: random.Random, roles: Roles, role: str | None = None) -> Example:
    """One example, of the given role or of a random one by SHARE."""
    chosen = role or rng.choices(list(SHARE), weights=list(SHARE.values()))[0]
    return MAKERS[chosen](visit(rng), rng, roles)


def right(row: Mapping[str, Any], said: str) -> dict[str, bool]:
    """Whether a reply to a row of the probe is right: the one right answer, of the evaluator also the verdict alone.

    policy and successor have many right answers, so theirs is whether the reply can be read.
    """
    role, want = row["role"], row["reply"]
    if role == "policy":
        return {role: said.startswith("Thought:") and said.split()[-2:-1] == want.split()[-2:-1]}
    if role == "successor":
        return {role: said.startswith("Future:") and " then " in said}
    verdict = {"evaluator_verdict": said.split()[:2] == want.split()[:2]} if role == "evaluator" else {}
    return {role: said == want} | verdict


def words(roles: Roles, n: int = 4000) -> list[str]:
    """The vocabulary: every word that n random examples hold, and every name the desk can speak of."""
    rng = random.Random("vocabulary")
    texts = [
        message["content"]
        for _ in range(n)
        for e in [example(rng, roles)]
        for message in [*e.messages, {"content": e.reply}]
    ]
    texts += [*desk.REQUESTS, *desk.TIERS, *desk.ITEMS, *desk.AUDITORS, "1 0 none now use not understood unreadable"]
    texts += [option for options in desk.OPTIONS_OF.values() for option in options]
    texts += [name for people in desk.CUSTOMERS.values() for name in people]
    return sorted({word for text in texts for word in text.replace(".", " . ").replace(",", " , ").split()})
