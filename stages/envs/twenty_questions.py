"""20 Questions: find the object by yes/no questions; reward 1 at the win, else 0; the game ends after the last
question.

Source: NLAC, arXiv 2512.04601 (reward, 20 questions, win = the object is named) and LMRL-Gym (oracle's prompt).
Departures: the default objects and their attributes are our own (stages/envs/data), so that a rule can answer offline;
names are matched on word boundaries; running out of questions is the rule of the game, hence terminated, not truncated;
a reply with several questions asks only the first. With `ask`, an LLM answers instead of the rule. An unreadable reply
uses up no question.
LMRL-Gym's own game is reward = "question" with its 158 objects (docs/tasks.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from stages.envs.objects import Names, Table, object_table, own_table, words
from stages.envs.oracle import Oracle, llm_oracle, rule_oracle
from stages.envs.splits import SPLITS, check_split, deal, draw, place
from stages.frame.contract import Config, DataPath
from stages.frame.react import parse_react
from stages.frame.types import Ask, Env, Malformed, Message, Scenario, Step, UsageError

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
    oracle_tries: int = Field(
        3, ge=1, description="Replies of an LLM oracle without yes or no, after which the episode fails. [ours]"
    )


OPTIONS = Options


class TwentyQuestions:
    """One game."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, options: Options, names: Names, oracle: Oracle) -> None:
        self.system = _SYSTEM.format(questions=options.questions)
        self._options, self._names, self._oracle = options, names, oracle
        self._target, self._left = "", 0

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        self._target, self._left = scenario.data["object"], self._options.questions
        return (
            {
                "role": "user",
                "content": f"I am thinking of an object. You have {self._left} questions. What is the first one?",
            },
        )

    def step(self, message: Message) -> Step:
        """Ask the question of a ReAct reply. Raises Malformed, SimulatorError, and RuntimeError after the end."""
        if self._left == 0:
            raise RuntimeError("the game is over: call reset first")
        question = first_question(message)
        named = self._names.guessed(question) if self._options.win == "guess" else self._names.mentioned(question)
        if self._target in named:
            self._left = 0
            return _say(
                f"Yes, it is {self._target}. You win.", reward=float(self._options.reward == "win"), terminated=True
            )
        answer = self._oracle(self._target, question)
        # Counted after the oracle: a failed oracle leaves the game where it was.
        self._left -= 1
        spoken = f"{answer.capitalize()}." if answer else "I cannot answer that with yes or no."
        price = -1.0 if self._options.reward == "question" else 0.0
        if self._left:
            return _say(f"{spoken} {self._left} question{'s' if self._left > 1 else ''} left.", reward=price)
        reveal = f" It was {self._target}." if self._options.reveal else ""
        return _say(f"{spoken} No questions left.{reveal} You lose.", reward=price, terminated=True)


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
    return object_table(options.objects) if options.objects else own_table()


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

    Of the train split, n larger than it begins anew in another order; of the held-out splits no object comes twice.
    """
    checked = Options.model_validate(dict(options))
    check_split("twenty_questions", split)
    mine = _dealt(list(_table(checked).items), checked)[split]
    return [Scenario("twenty_questions", split, name, {"object": name}) for name in draw(mine, split, n, seed)]


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
