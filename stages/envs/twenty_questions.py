"""20 Questions: find the object by yes/no questions; reward 1 at the win, else 0; the game ends after the last
question.

Source: NLAC, arXiv 2512.04601 (reward, 20 questions, win = the object is named) and LMRL-Gym (oracle's prompt).
Departures: the default objects and their attributes are our own (stages/envs/data), so that a rule can answer offline,
all of them or `size` of them;
names are matched on word boundaries; running out of questions is the rule of the game, hence terminated, not truncated;
a reply with several questions asks only the first. With `ask`, an LLM answers instead of the rule. An unreadable reply
uses up no question.
LMRL-Gym's own game is reward = "question" with its 158 objects (docs/tasks.md).
"""
# That page is docs/reference/environments.md now. The text above stays: it is in the fingerprints of stored runs.

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from stages.envs.objects import Names, Table, cut_table, object_table, own_table, words
from stages.envs.oracle import Oracle, llm_oracle, rule_oracle
from stages.envs.splits import SPLITS, check_split, deal, draw, place
from stages.frame.contract import Config, DataPath
from stages.frame.react import parse_react
from stages.frame.types import Ask, Env, Episode, Malformed, Message, Scenario, Step, UsageError

BRIEF = "Find the object."
_SYSTEM = """You play 20 Questions. The other player thinks of an object; find out which, by asking yes/no questions, at most {questions}.
Ask one question a turn. You win as soon as you name the object in a question, such as "Is it a lamp?".
Reply in this form:
Thought: what you know so far and what is worth asking
Action: one yes/no question"""


class Options(Config):
    """Options of 20 Questions."""

    questions: int = Field(20, ge=1, description="Questions in a game. [paper]")
    win: Literal["named", "guess"] = Field(
        "named",
        description="What wins: any question that names the object [paper], or only one that guesses it alone, so that a list does not win [ours].",
    )
    reward: Literal["win", "question"] = Field(
        "win",
        description="win: 1 for the winning question, else 0 [paper]. question: -1 for each question but the winning one, as in LMRL-Gym; the return tells "
        "then how soon the object was found, and the win rate, which counts returns of 1, is 0. [ours]",
    )
    reveal: bool = Field(False, description="Name the object when the game is lost. [ours]")
    objects: DataPath = Field(
        "",
        description="CSV or JSONL file of objects (needs an LLM oracle); empty = the package's own. [ours; paper: THINGS]",
    )
    size: int = Field(
        0, ge=0, description="Number of objects, the same ones whatever is dealt to the splits; 0 = all. [ours]"
    )
    train_size: int = Field(
        0,
        ge=0,
        description="Exact number of train objects, with test_size; the rest is validation. 0 = by shares. [ours; paper: 1000]",
    )
    test_size: int = Field(
        0, ge=0, description="Exact number of test objects, with train_size. 0 = by shares. [ours; paper: 500]"
    )
    test: float = Field(0.25, ge=0, le=1, description="Share of the objects in the test split. [ours]")
    validation: float = Field(
        0.15, ge=0, le=1, description="Share of the objects in the validation split. [ours; paper: none]"
    )
    split_seed: int = Field(0, description="Another number deals the objects to the splits anew. [ours]")
    again: bool = Field(
        False,
        description="Objects of the held-out splits come again, each as often as any other, where more episodes are wanted than there are. [ours]",
    )
    brief: bool = Field(
        False, description="Say everything in few words, for a small model that knows no others. [ours]"
    )
    oracle_tries: int = Field(
        3, ge=1, description="Replies of an LLM oracle without yes or no, after which the episode fails. [ours]"
    )


OPTIONS = Options


class TwentyQuestions:
    """One game."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, options: Options, names: Names, oracle: Oracle) -> None:
        self.system = BRIEF if options.brief else _SYSTEM.format(questions=options.questions)
        self._options, self._names, self._oracle = options, names, oracle
        self._target, self._left = "", 0

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        self._target, self._left = scenario.data["object"], self._options.questions
        asked = f"I am thinking of an object. You have {self._left} questions. What is the first one?"
        return ({"role": "user", "content": f"{self._left} left." if self._options.brief else asked},)

    def step(self, message: Message) -> Step:
        """Ask the question of a ReAct reply. Raises Malformed, SimulatorError, and RuntimeError after the end."""
        if self._left == 0:
            raise RuntimeError("the game is over: call reset first")
        question = first_question(message)
        named = self._names.guessed(question) if self._options.win == "guess" else self._names.mentioned(question)
        if self._target in named:
            self._left = 0
            text = f"{question[:-1]} yes. won." if self._options.brief else f"Yes, it is {self._target}. You win."
            return _say(text, reward=float(self._options.reward == "win"), terminated=True)
        answer = self._oracle(self._target, question)
        # Counted after the oracle: a failed oracle leaves the game where it was.
        self._left -= 1
        price = -1.0 if self._options.reward == "question" else 0.0
        text = brief_answer(question, answer, self._left) if self._options.brief else full_answer(answer, self._left)
        if self._left:
            return _say(text, reward=price)
        reveal = f" It was {self._target}." if self._options.reveal else ""
        return _say(f"{text}{reveal} {'lost.' if self._options.brief else 'You lose.'}", reward=price, terminated=True)


def full_answer(answer: str | None, left: int) -> str:
    """What the other player says to a question that does not win."""
    spoken = f"{answer.capitalize()}." if answer else "I cannot answer that with yes or no."
    return f"{spoken} {left or 'No'} question{'' if left == 1 else 's'} left."


def brief_answer(question: str, answer: str | None, left: int) -> str:
    """The same with `brief`, after the question, which a small model then need not look for; that nothing is left is not
    said, since the game is lost then.
    """
    return f"{question.removesuffix('?')} {answer or 'unclear'}." + (f" {left} left." if left else "")


def first_question(message: Message) -> str:
    """The first question of the action: its first line with a '?', up to that; else its first line. Raises Malformed
    where it has no word.
    """
    content = message.get("content")
    if not isinstance(content, str):
        raise Malformed("the reply has no text")
    _, action = parse_react(content)
    lines = action.splitlines()
    question = next((line for line in lines if "?" in line), lines[0]).split("?")[0].strip()
    if not words(question):
        raise Malformed("there is no question after 'Action:'")
    return f"{question}?"


def readable(options: Mapping[str, Any], state: Sequence[Message], reply: str) -> None:
    """Raises Malformed as the game would: where there is no question."""
    first_question({"content": reply})


def _say(text: str, *, reward: float = 0.0, terminated: bool = False) -> Step:
    return Step(({"role": "user", "content": text},), reward=reward, terminated=terminated)


def _table(options: Options) -> Table:
    table = object_table(options.objects) if options.objects else own_table()
    return cut_table(table, options.size) if options.size else table


def make(options: Mapping[str, Any], ask: Ask | None) -> Callable[[], Env]:
    """Games over one table and one oracle: the rule, or an LLM where `ask` is given. Raises UsageError where neither
    can answer.
    """
    checked = Options.model_validate(dict(options))
    table = _table(checked)
    if ask is None and not table.attributes:
        raise UsageError(
            f"task.oracle: no rule can answer for the objects of {checked.objects!r}. Set task.oracle to engine or openai."
        )
    names = Names(table.items.values())
    oracle = rule_oracle(table) if ask is None else llm_oracle(ask, tries=checked.oracle_tries)
    return lambda: TwentyQuestions(checked, names, oracle)


def scenarios(options: Mapping[str, Any], split: str, n: int | None, seed: int) -> list[Scenario]:
    """The split's objects in an order fixed by the seed, the first n of them.

    Of the train split, n larger than it begins anew in another order; of the held-out splits no object comes twice,
    except with `again`.
    """
    checked = Options.model_validate(dict(options))
    check_split("twenty_questions", split)
    mine = _dealt(list(_table(checked).items), checked)[split]
    drawn = draw(mine, split, n, seed, again=checked.again)
    return [Scenario("twenty_questions", split, name, {"object": name}) for name in drawn]


def describe(options: Mapping[str, Any], episodes: Sequence[Episode]) -> dict[str, float]:
    """How well was asked, by the table that the rule answers by; nothing of objects without attributes, and a share of
    nothing is left out.

    guesses: turns that name one object and ask nothing else. guess_fits: guesses of an object that fits all answers so
    far. settled: other questions to which all objects that fit have the same answer. open: objects that still fit at
    the end, of games that were lost.
    """
    checked = Options.model_validate(dict(options))
    table = _table(checked)
    if not table.attributes:
        return {}
    names, oracle = Names(table.items.values()), functools.cache(rule_oracle(table))
    found: dict[str, list[float]] = {"guesses": [], "guess_fits": [], "settled": [], "open": []}
    for episode in episodes:
        fitting = set(table.items)
        for turn in episode.turns:
            if turn.malformed:
                continue
            question = first_question({"content": f"Action: {turn.action}"})
            guessed = names.guessed(question)
            answer = oracle(episode.scenario.data["object"], question)
            same = {name for name in fitting if oracle(name, question) == answer}
            found["guesses"].append(bool(guessed))
            found["guess_fits" if guessed else "settled"].append(
                bool(guessed & fitting) if guessed else same == fitting
            )
            fitting = same
        if not episode.won:
            found["open"].append(len(fitting))
    return {name: sum(values) / len(values) for name, values in found.items() if values}


def _dealt(names: Sequence[str], options: Options) -> dict[str, list[str]]:
    """The objects of each split, in the order of the table. By shares, an object's split depends on its name alone.
    Raises UsageError.
    """
    seed, train, test = options.split_seed, options.train_size, options.test_size
    if not train and not test:
        shares = {"test": options.test, "validation": options.validation}
        return {split: [name for name in names if deal(name, seed, **shares) == split] for split in SPLITS}
    if not train or not test:
        raise UsageError(
            "task.options of twenty_questions: train_size and test_size go together. Set both, or neither."
        )
    if train + test > len(names):
        raise UsageError(
            f"task.options of twenty_questions: {train} + {test} objects are wanted, there are {len(names)}. Lower train_size or test_size."
        )
    order = sorted(names, key=lambda name: place(name, seed))
    parts = {
        "test": set(order[:test]),
        "train": set(order[test : test + train]),
        "validation": set(order[test + train :]),
    }
    return {split: [name for name in names if name in part] for split, part in parts.items()}
