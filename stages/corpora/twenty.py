"""Role-play text that teaches a small base model the roles' language in 20 Questions, and no way to play well.

    Thought: knife. Action: ask metal        an object that fits all answers so far, and the next question
    Future: metal yes, sharp no, lost.       answers to this question and to those after it, and how the game ends

It teaches the table of every split, as a large model knows it: which objects fit the answers. It does not teach which
question or guess is good. Actions are drawn at random, and the successor's futures have random answers. So only games
can teach what follows a question. The evaluator knows the principle in the large models' prompt
(stages/llm/prompts/twenty_questions): a question with a known answer is no use, nor is a wrong guess.
tests/corpora/test_twenty.py proves it. [ours]
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from stages.corpora import Example, by_share, vocabulary
from stages.envs.objects import cut_table, own_table
from stages.envs.twenty_questions import BRIEF, brief_answer
from stages.frame.types import Message
from stages.llm.roles import Roles

SIZE, ATTRIBUTES, QUESTIONS = 40, 12, 6
SHARE = {"policy": 0.1, "successor": 0.06, "combine": 0.15, "evaluator": 0.33, "refiner": 0.23, "corrector": 0.13}
FOLLOWS = 0.25  # share of the guesses that are what the thought says; a policy that never did would not learn to from its wins
LUCK = 0.25  # share of the guesses that are right in a made-up future


@dataclass(frozen=True)
class Action:
    """A question: "ask" with an attribute, or "guess" with an object."""

    verb: str
    word: str

    def __str__(self) -> str:
        return f"{self.verb} {self.word}"


@dataclass(frozen=True)
class Turn:
    """A question that was asked, and its answer: "yes" or "no"."""

    thought: str
    action: Action
    answer: str


@dataclass(frozen=True)
class Game:
    """The turns of a game so far, none of which won; `target` is what the other player thinks of."""

    target: str
    turns: tuple[Turn, ...]

    @property
    def left(self) -> int:
        return QUESTIONS - len(self.turns)


@dataclass(frozen=True)
class Future:
    """Words asked with their answers, and whether the last one wins."""

    items: tuple[tuple[str, str], ...]
    won: bool

    def __str__(self) -> str:
        return " ".join(
            ["Future:", *(f"{word} {answer}," for word, answer in self.items), "won." if self.won else "lost."]
        )


@functools.lru_cache(maxsize=1)
def table() -> Mapping[str, frozenset[str]]:
    """The attributes of every object that is spoken of."""
    return {name: item.attributes for name, item in cut_table(own_table(), SIZE).items.items()}


@functools.lru_cache(maxsize=1)
def attributes() -> tuple[str, ...]:
    """What can be asked: the attributes that are asked for by their names and divide the objects most evenly."""
    named = [name for name, attribute in own_table().attributes.items() if name in attribute.yes]
    share = {name: sum(name in held for held in table().values()) / SIZE for name in named}
    return tuple(sorted(sorted(named, key=lambda name: abs(share[name] - 0.5))[:ATTRIBUTES]))


def answer_to(action: Action, target: str) -> str:
    return "yes" if action.word == target or action.word in table()[target] else "no"


def fitting(turns: Sequence[Turn]) -> list[str]:
    """The objects that all answers fit."""
    return [name for name in table() if all(answer_to(t.action, name) == t.answer for t in turns)]


def new_action(thought: str, rng: random.Random, asks: float = 0.5) -> Action:
    """A random question: of any attribute, asked before or not, or a guess of any object, now and then the thought's."""
    if rng.random() < asks:
        return Action("ask", rng.choice(attributes()))
    return Action("guess", thought if rng.random() < FOLLOWS else rng.choice(list(table())))


def game(rng: random.Random, n: int | None = None) -> Game:
    """n turns, any number by default, of somebody who asks and guesses at random; some ask more than others."""
    n = rng.randrange(QUESTIONS) if n is None else n
    asks = rng.choice((0.15, 0.5, 0.85))
    made = Game(rng.choice(list(table())), ())
    while len(made.turns) < n:
        thought = rng.choice(fitting(made.turns))
        action = new_action(thought, rng, asks)
        if action.word != made.target:
            made = replace(made, turns=(*made.turns, Turn(thought, action, answer_to(action, made.target))))
    return made


def reply(thought: str, action: Action, *, told: bool = False) -> str:
    return f"Thought: {'as told, ' if told else ''}{thought}. Action: {action}"


def state(g: Game) -> list[Message]:
    """The conversation so far, as an episode holds it."""
    found: list[Message] = [{"role": "system", "content": BRIEF}, {"role": "user", "content": f"{QUESTIONS} left."}]
    for asked, turn in enumerate(g.turns, 1):
        found.append({"role": "assistant", "content": reply(turn.thought, turn.action)})
        found.append({"role": "user", "content": brief_answer(str(turn.action), turn.answer, QUESTIONS - asked)})
    return found


def rest(action: Action, left: int, rng: random.Random) -> Future:
    """A made-up future: random questions with random answers, until a guess is right or none is left."""
    items: list[tuple[str, str]] = []
    while True:
        yes = rng.random() < (0.5 if action.verb == "ask" else LUCK)
        items.append((action.word, "yes" if yes else "no"))
        if (won := yes and action.verb == "guess") or len(items) == left:
            return Future(tuple(items), won)
        action = new_action(rng.choice(list(table())), rng)


def drawn(rng: random.Random, n: int | None = None) -> tuple[Game, Action]:
    """A game and the next question in it."""
    g = game(rng, n)
    return g, new_action(rng.choice(fitting(g.turns)), rng)


def policy(rng: random.Random, roles: Roles) -> Example:
    g = game(rng)
    thought = rng.choice(fitting(g.turns))
    return Example("policy", tuple(roles.policy(state(g))), reply(thought, new_action(thought, rng)))


def successor(rng: random.Random, roles: Roles) -> Example:
    g, action = drawn(rng)
    prompt = roles.prompt("successor", state(g), action=str(action), thought="")
    return Example("successor", tuple(prompt), str(rest(action, g.left, rng)))


def combine(rng: random.Random, roles: Roles) -> Example:
    """What was seen is told as a fact, "metal is yes"; what was predicted follows as it is."""
    g, action = drawn(rng, QUESTIONS - 1 if rng.random() < 0.2 else None)
    if rng.random() < 0.15:
        action = Action("guess", g.target)
    answer = answer_to(action, g.target)
    won, last = action.word == g.target, g.left == 1
    later = None if won or last else rest(new_action(g.target, rng), g.left - 1, rng)
    seen = brief_answer(str(action), answer, 0 if won else g.left - 1)
    end = "won." if won else "lost."
    fields = {
        "observation": seen if later else f"{seen} {end}",
        "reward": "none" if later else str(int(won)),
        "future": str(later or "none"),
    }
    rest_told = str(later).removeprefix("Future: ") if later else end
    prompt = roles.prompt("combine", state(g), action=str(action), thought="", **fields)
    return Example("combine", tuple(prompt), f"Future: {action.word} is {answer}, {rest_told}")


def judge(action: Action, left: int, futures: Sequence[Future]) -> str:
    """The evaluator's right verdict, by the futures.

    A guess is right if at least half of them say so. A question is right if another one is to come and several futures
    do not all foresee the same answer. If they do, and at least half end in a right guess of the same object, that
    guess is due.
    """
    answers = [f.items[0][1] for f in futures]
    if action.verb == "guess":
        if 2 * answers.count("yes") >= len(answers):
            return "Optimality: Yes."
        return f"Optimality: No. {action.word} may be wrong, {'guess' if left == 1 else 'ask'}."
    if left == 1:
        return "Optimality: No. too late, guess."
    if len(answers) < 2 or len(set(answers)) > 1:
        return "Optimality: Yes."
    found = Counter(f.items[-1][0] for f in futures if f.won).most_common(1)
    due = f"guess {found[0][0]}" if found and 2 * found[0][1] >= len(futures) else "ask"
    return f"Optimality: No. {action.word} may be known, {due}."


def predicted(action: Action, left: int, n: int, rng: random.Random) -> list[Future]:
    """n made-up futures of a question; often they foresee the same answer, or the same object found."""
    futures = [rest(action, left, rng) for _ in range(n)]
    if action.verb == "guess":
        right = rng.choice((0.1, 0.5, 0.9))
        return [Future(((action.word, "yes"),), True) if rng.random() < right else missed(f) for f in futures]
    if rng.random() < 0.6:
        same = rng.choice(("yes", "no"))
        futures = [replace(f, items=((action.word, same), *f.items[1:])) for f in futures]
    if left > 1 and rng.random() < 0.6:
        found, often = rng.choice(list(table())), rng.choice((0.3, 0.6, 1.0))
        futures = [ending_with(f, found, left, rng) if rng.random() < often else f for f in futures]
    return futures


def missed(f: Future) -> Future:
    """The same where the first guess is wrong."""
    return Future(((f.items[0][0], "no"), *f.items[1:]), f.won and len(f.items) > 1)


def ending_with(f: Future, found: str, left: int, rng: random.Random) -> Future:
    """The same up to some question, and then a right guess."""
    before = f.items[: -1 if f.won or len(f.items) == left else None] or f.items[:1]
    return Future((*before[: rng.randint(1, len(before))], (found, "yes")), True)


def evaluator(rng: random.Random, roles: Roles) -> Example:
    g, action = drawn(rng)
    futures = predicted(action, g.left, rng.choice((1, 2, 3, 4, 4, 4, 4)), rng)
    told = "\n".join(map(str, futures))
    prompt = roles.prompt("evaluator", state(g), action=str(action), thought="", futures=told)
    return Example("evaluator", tuple(prompt), judge(action, g.left, futures))


def refiner(rng: random.Random, roles: Roles) -> Example:
    """Told to ask, a question that was not asked yet; told to guess, an object that fits; told nothing, one or the other."""
    draw = rng.random()
    g, action = drawn(rng, QUESTIONS - 1 if draw < 0.3 else None)
    fits, asks = fitting(g.turns), action.verb == "ask"
    named = rng.choice(fits if rng.random() < 0.8 else list(table()))
    due = "guess" if draw < 0.3 else f"guess {named}" if draw < 0.6 and asks else "ask" if draw < 0.9 else ""
    wrong = "too late" if asks and due == "guess" else f"{action.word} may be {'known' if asks else 'wrong'}"
    evaluation = f"Optimality: No. {wrong}, {due}." if due else "Optimality: No."
    prompt = roles.prompt("refiner", state(g), action=str(action), thought="", evaluation=evaluation)
    if due == "ask" or (not due and g.left > 1):
        used = {action.word, *(t.action.word for t in g.turns)}
        better = Action("ask", rng.choice([name for name in attributes() if name not in used]))
        return Example("refiner", tuple(prompt), reply(rng.choice(fits), better, told=True))
    best = named if due.startswith("guess ") else rng.choice([name for name in fits if name != action.word] or fits)
    return Example("refiner", tuple(prompt), reply(best, Action("guess", best), told=True))


def corrector(rng: random.Random, roles: Roles) -> Example:
    """Takes out what was seen or told: "metal is yes" becomes "metal yes", and "as told" is left out."""
    g, action = drawn(rng)
    draw = rng.random()
    if draw < 0.6:
        fixed = str(rest(action, g.left, rng))
        fact = f"Future: {action.word} is " if draw < 0.45 else f"Future: {action.word} "
        text = fact + fixed.removeprefix(f"Future: {action.word} ")
    else:
        thought = rng.choice(fitting(g.turns))
        fixed, text = (reply(thought, action, told=told) for told in (False, draw < 0.9))
    return Example("corrector", tuple(roles.prompt("corrector", state(g), text=text)), fixed)


MAKERS: dict[str, Callable[[random.Random, Roles], Example]] = {
    "policy": policy, "successor": successor, "combine": combine, "evaluator": evaluator, "refiner": refiner, "corrector": corrector,
}  # fmt: skip


def example(rng: random.Random, roles: Roles, role: str | None = None) -> Example:
    """One example, of the given role or of a random one by SHARE."""
    return MAKERS[role or by_share(rng, SHARE)](rng, roles)


def words(roles: Roles, n: int = 4000) -> list[str]:
    """The vocabulary: every word that n random examples hold, and every name of the table."""
    rng = random.Random("vocabulary")
    texts = [*table(), *attributes(), roles.templates["value"], "unclear unreadable none 1 0"]
    return vocabulary([example(rng, roles) for _ in range(n)], texts)
