"""Role-play text from which the base model learns the language of the roles, and none of this desk's rules.

Every example has its own random rule book, so each (key -> option) pair is equally frequent. The corpus teaches the
format of actions, merging an observation with a later future, and judging by a predicted future. It also teaches to
follow a critique and to rewrite a fact as a possibility. It uses the words of every rung of the desk's ladder.
tests/corpora/test_desk.py proves that the rules stay unknown. [ours]
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.corpora import Example, by_share, vocabulary
from stages.envs import service_desk as desk
from stages.envs.desk_rules import KEYED_ON, REQUESTS, TIERS, Kind, key_of
from stages.envs.desk_words import (
    FAREWELL,
    LACKS,
    OPTIONS_OF,
    Audit,
    Fault,
    Rule,
    audit,
    done,
    lack,
    opening,
    system_text,
)
from stages.frame.types import Message
from stages.llm.roles import Roles

SHARE = {"policy": 0.06, "successor": 0.07, "combine": 0.34, "evaluator": 0.28, "refiner": 0.16, "corrector": 0.09}
RUNGS: dict[Audit, float] = {"rule": 0.35, "fault": 0.2, "count": 0.12, "verdict": 0.08, "consequence": 0.25}
STEPS = {1: 1, 2: 1, 3: 4, 4: 3, 5: 2, 6: 2, 7: 2, 8: 3}
"""Steps of a visit, and how often there are so many: only the longest ones have step rate."""
SILENT = 0.15  # visits that nobody audits
LUCKY = 0.05  # visits with a wrong step that are taken as right

Said = Rule | Fault


@dataclass(frozen=True)
class Visit:
    """A finished visit under a random rule book: what was done, the rule that each step needed, and how it was told."""

    name: str
    opening: str
    auditor: str
    chosen: tuple[tuple[str, str], ...]  # (tool, option)
    needed: tuple[Rule, ...]
    rung: Audit
    passed: bool
    audited: bool

    @property
    def last(self) -> int:
        return len(self.chosen) - 1

    def broken(self) -> list[tuple[Rule, str]]:
        """The rules that were broken, each with the option that was taken."""
        return [(r, option) for r, (_, option) in zip(self.needed, self.chosen, strict=True) if r.option != option]

    def lack(self, k: int) -> str:
        """What is told at once of step k, or ""."""
        wrong = self.rung == "consequence" and self.needed[k].option != self.chosen[k][1]
        return lack(self.name, self.needed[k]) if wrong else ""

    def end(self) -> str:
        """The last words of the visit."""
        return audit(self.auditor, [] if self.passed else self.broken(), self.rung) if self.audited else FAREWELL

    def facts(self, k: int) -> str:
        """As facts, what a future from step k knows to be wrong: what the audit names, and what later steps lacked."""
        seen = [str(rule) for j, rule in enumerate(self.needed) if j >= k and self.lack(j)]
        named = re.sub(r".*? audits: (pass|fail)\. ?", "", self.end()) if self.audited else ""
        return " ".join([*seen, *([named] if named else [])])


def as_possible(text: str) -> str:
    """A fact that the teacher saw, told as a possibility and without what nobody could foresee."""
    text = re.sub(r"then \w+ says", "then", text).replace(" needs ", " may need ").replace(" bars ", " may bar ")
    return re.sub(r"(\d) wrong\.", r"\1 may be wrong.", text)


def may(said: Said) -> str:
    return as_possible(str(said))


def act(rule: Rule) -> str:
    return f"Thought: {may(rule)} Action: {rule.tool} {rule.option}"


def future(chosen: Sequence[tuple[str, str]], *, passed: bool, said: str) -> str:
    """A future in the words that are given, as a possibility or as facts. said: what of it was or may be wrong."""
    steps = "".join(f"{option}, " for _, option in chosen)
    return f"Future: {steps}then {'pass' if passed else 'fail'}. {said}".strip()


def told(v: Visit, k: int) -> str:
    """The future from step k as the teacher saw it: facts, auditor and all."""
    text = future(v.chosen[k:], passed=v.passed, said=v.facts(k))
    return text.replace("then ", f"then {v.auditor} says ") if v.audited else text


def foreseen(v: Visit, k: int) -> str:
    """The same as the student must learn it."""
    return as_possible(told(v, k))


def visit(rng: random.Random) -> Visit:
    """A visit at a random desk: about half of the steps right, so that passes are common enough to be learned."""
    tier, request = rng.choice(TIERS), rng.choice(REQUESTS)
    rung = by_share(rng, RUNGS)
    # What a consequence tells does not say on which words the rule hangs.
    kinds: dict[str, Kind] = {**KEYED_ON, "give": "pair" if rung == "consequence" else rng.choice(("pair", "request"))}
    *first, close = kinds
    n = by_share(rng, STEPS)
    skill = rng.choice((0.1, 0.5, 0.8, 1.0))
    chosen, needed = [], []
    for tool in [*first[: n - 1], close]:
        options = OPTIONS_OF[tool]
        rule = Rule(key_of(kinds[tool], request, tier), tool, rng.choice(options))
        needed.append(rule)
        chosen.append((tool, rule.option if rng.random() < skill else rng.choice(options)))
    name = rng.choice([name for people in desk.CUSTOMERS.values() for name in people])
    right = all(rule.option == option for rule, (_, option) in zip(needed, chosen, strict=True))
    return Visit(
        name,
        opening(name, tier, request, rng.choice(desk.ITEMS)),
        rng.choice(desk.AUDITORS),
        tuple(chosen),
        tuple(needed),
        rung,
        passed=right or (rung != "consequence" and rng.random() < LUCKY),
        audited=rng.random() >= SILENT,
    )


def state(v: Visit, k: int) -> list[Message]:
    """The conversation before step k, as an episode holds it, thoughts and all."""
    found: list[Message] = [
        {"role": "system", "content": system_text([tool for tool, _ in v.chosen])},
        {"role": "user", "content": v.opening},
    ]
    for j, (rule, (tool, option)) in enumerate(zip(v.needed[:k], v.chosen[:k], strict=True)):
        found.append({"role": "assistant", "content": act(Rule(rule.key, tool, option))})
        found.append({"role": "user", "content": f"{done(option)} {v.lack(j)}".strip()})
    return found


def other(tool: str, *options: str, rng: random.Random) -> str:
    """An option of the tool that is none of these."""
    return rng.choice([option for option in OPTIONS_OF[tool] if option not in options])


def policy(v: Visit, rng: random.Random, roles: Roles) -> Example:
    k = rng.randrange(len(v.chosen))
    guess = Rule(v.needed[k].key, v.needed[k].tool, rng.choice(OPTIONS_OF[v.needed[k].tool]))
    return Example("policy", tuple(roles.policy(state(v, k))), act(guess))


def successor(v: Visit, rng: random.Random, roles: Roles) -> Example:
    k = rng.randrange(len(v.chosen))
    tool, option = v.chosen[k]
    prompt = roles.prompt("successor", state(v, k), action=f"{tool} {option}", thought="")
    return Example("successor", tuple(prompt), foreseen(v, k))


def combine(v: Visit, rng: random.Random, roles: Roles) -> Example:
    # Mostly steps where the truth enters: the end, whose auditor's name is a word that nothing else teaches to copy, and
    # steps that are seen to lack something, since nothing else teaches what is lacked where an option was not taken.
    lacking = [j for j in range(v.last) if v.lack(j)]
    lacking += lacking[-1:] * 2  # of late tools only long visits tell
    k = rng.choice(lacking if lacking and rng.random() < 0.6 else [*range(len(v.chosen)), *[v.last] * 6])
    tool, option = v.chosen[k]
    if k == v.last and rng.random() < 0.03:
        fields = {"observation": f"not understood. use {tool} now.", "reward": "0", "future": "none"}
        reply = "Future: not understood, then fail."
    elif k == v.last:
        seen = " ".join(filter(None, [done(option), v.lack(k), v.end()]))
        fields, reply = {"observation": seen, "reward": str(int(v.passed)), "future": "none"}, told(v, k)
    else:
        later, seen = foreseen(v, k + 1), v.lack(k)
        fields = {"observation": f"{done(option)} {seen}".strip(), "reward": "none", "future": later}
        # What was seen to be wrong here comes first, and the visit is lost whatever else was foreseen.
        if seen and rng.random() < 0.3:
            later = future(v.chosen[k + 1 :], passed=True, said="")
            fields["future"] = later
        reply = later.replace("Future: ", f"Future: {option}, ")
        if seen:
            reply = re.sub(r"then (pass|fail)\.", f"then fail. {v.needed[k]}", reply)
    prompt = roles.prompt("combine", state(v, k), action=f"{tool} {option}", thought="", **fields)
    return Example("combine", tuple(prompt), reply)


@dataclass(frozen=True)
class Foreseen:
    """What a future says: whether it ends well, and what it blames."""

    passed: bool
    blames: tuple[Said, ...] = ()


def judge(tool: str, futures: Sequence[Foreseen], *, explained: bool = False) -> str:
    """The evaluator's right verdict on an action of this tool.

    Futures that pass or blame something tell; of these at least half blame this step: No, with the most frequent
    reason. Else Yes. Where none tells anything (every one just fails): No without a reason, unless the conversation
    itself explains the failure by an earlier step. It takes a future at its word: one that blames this step for the
    option that was not taken is blamed all the same.
    """
    blames = [said for f in futures for said in f.blames if said.tool == tool]
    telling = sum(f.passed or bool(f.blames) for f in futures)
    if blames and 2 * len(blames) >= telling:
        return f"Optimality: No. {may(Counter(blames).most_common(1)[0][0])}"
    return "Optimality: Yes." if telling or explained else "Optimality: No."


def blame(v: Visit, j: int, rng: random.Random) -> Said:
    """A rule or a fault by which the option taken at step j is wrong."""
    rule, taken = v.needed[j], v.chosen[j][1]
    if v.rung == "fault":
        return Fault(rule.key, rule.tool, taken)
    return Rule(rule.key, rule.tool, other(rule.tool, taken, rng=rng))


def evaluator(v: Visit, rng: random.Random, roles: Roles) -> Example:
    k, n = rng.randrange(len(v.chosen)), rng.choice((1, 1, 1, 2, 3, 4, 4, 4))
    names = v.rung in ("rule", "fault", "consequence")
    ends_well = rng.choice((0.2, 0.5))
    silence = rng.choice((0, 0, 0.6))
    begin = k if v.rung == "consequence" else 0
    futures, texts = [], []
    for _ in range(n):
        # A predicted future may blame any step for its option, so what it says is not what came of the visit.
        passed, silent = rng.random() < ends_well, rng.random() < silence
        blames = [blame(v, j, rng) for j in range(begin, len(v.chosen)) if rng.random() < 0.4]
        futures.append(Foreseen(passed, tuple(blames) if names and not passed and not silent else ()))
        count = f"{rng.randint(1, len(v.chosen))} may be wrong."
        said = count if v.rung == "count" and not passed and not silent else " ".join(map(may, futures[-1].blames))
        texts.append(future(v.chosen[k:], passed=passed, said=said))
    tool, option = v.chosen[k]
    prompt = roles.prompt("evaluator", state(v, k), action=f"{tool} {option}", thought="", futures="\n".join(texts))
    explained = any(v.lack(j) for j in range(k))
    return Example("evaluator", tuple(prompt), judge(tool, futures, explained=explained))


def refiner(v: Visit, rng: random.Random, roles: Roles) -> Example:
    k = rng.randrange(len(v.chosen))
    (tool, option), key, draw = v.chosen[k], v.needed[k].key, rng.random()
    new = Rule(key, tool, other(tool, option, rng=rng))
    # Told no reason, or only what was wrong, any other option is as good.
    reason = "" if draw < 0.2 else f" {may(Fault(key, tool, option))}" if draw < 0.6 else f" {may(new)}"
    prompt = roles.prompt(
        "refiner", state(v, k), action=f"{tool} {option}", thought="", evaluation=f"Optimality: No.{reason}"
    )
    return Example("refiner", tuple(prompt), act(new).replace("Thought: ", "Thought: as told, "))


def corrector(v: Visit, rng: random.Random, roles: Roles) -> Example:
    k = rng.randrange(len(v.chosen))
    draw = rng.random()
    if draw < 0.4:
        text = told(v, k)
    elif draw < 0.6:
        text = foreseen(v, k)
    else:
        text = act(Rule(v.needed[k].key, v.needed[k].tool, rng.choice(OPTIONS_OF[v.needed[k].tool])))
        text = text.replace("Thought: ", "Thought: as told, ") if draw < 0.9 else text
    prompt = roles.prompt("corrector", state(v, k), text=text)
    return Example("corrector", tuple(prompt), as_possible(text).replace("as told, ", ""))


MAKERS: dict[str, Callable[[Visit, random.Random, Roles], Example]] = {
    "policy": policy, "successor": successor, "combine": combine, "evaluator": evaluator, "refiner": refiner, "corrector": corrector,
}  # fmt: skip


def example(rng: random.Random, roles: Roles, role: str | None = None) -> Example:
    """One example, of the given role or of a random one by SHARE."""
    chosen = role or by_share(rng, SHARE)
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
    texts = [*REQUESTS, *TIERS, *desk.ITEMS, *desk.AUDITORS, *LACKS.values(), FAREWELL]
    texts += ["1 0 none now use not understood unreadable", " ".join(map(str, range(len(OPTIONS_OF) + 1)))]
    texts += [option for options in OPTIONS_OF.values() for option in options]
    texts += [name for people in desk.CUSTOMERS.values() for name in people]
    return vocabulary([example(rng, roles) for _ in range(n)], texts)
